"""Proof that a server is the right one: it is healthy, serves the right model, and is in the right mode.

Each engine is asked in its own words. The mode is proven by a real request of one token, not by what
the server was started with: a plugin that failed to load leaves a server that looks the same.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.base.clock import Clock
from eyas.base.errors import TargetError
from eyas.config.server_arguments import Engine, Mode
from eyas.targets.serving.address import Address
from eyas.targets.serving.dumps import DUMP_SUFFIXES
from eyas.targets.serving.speculation import speculates

_PROBE_TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]
_DUMP_SECONDS = 120.0
_ANSWER_SECONDS = 300.0


@dataclass(frozen=True)
class Expected:
    """What a server has to be.

    Args:
        model: the target's folder, or the name that foreign servers call it.
        min_length: tokens that one request has to be able to hold; 0: not asked.
        layers: aux layers in mode ``capture``.
        dump_dir: the folder its dumps have to come to, in mode ``capture``.
        exact_model: whether the model is named by its whole path (a server of ours).
    """

    engine: Engine
    mode: Mode
    model: str
    min_length: int
    layers: tuple[int, ...]
    dump_dir: Path | None
    exact_model: bool


@dataclass(frozen=True)
class Proven:
    """What a server turned out to be: the name to send as ``model``, and where its dumps come to."""

    model: str
    dump_dir: Path | None


def prove(address: Address, expected: Expected, clock: Clock) -> Proven:
    """Ask a healthy server what it is.

    Raises:
        ServerUnreachable: it stops answering.
        TargetError: another model, another mode, or too short a context.
    """
    name = _prove_model(address, expected)
    said = _probe(address, expected, name)
    if expected.mode == "capture":
        return Proven(name, _prove_capture(address, expected, said, clock))
    if said is not None:
        raise _wrong_mode(address, expected, "it is set up to capture states")
    if speculates(address, expected.engine) != (expected.mode == "draft"):
        doing = "serves no drafter" if expected.mode == "draft" else "serves a drafter beside the target"
        raise _wrong_mode(address, expected, f"it {doing}")
    return Proven(name, None)


def prove_json(address: Address, beside: Address, expected: Expected) -> Proven:
    """Ask a pair of healthy SGLang servers whether they serve the model and return states as JSON.

    Which states these are is proven by the canary.

    Raises:
        ServerUnreachable: one stops answering.
        TargetError: another model, too short a context, or no states.
    """
    names = [_prove_model(one, expected) for one in (address, beside)]
    for one, flag in (
        (address, "--enable-return-aux-hidden-states"),
        (beside, "--enable-return-hidden-states"),
    ):
        sampling = {"max_new_tokens": 1, "temperature": 0}
        body = {"input_ids": _PROBE_TOKENS, "sampling_params": sampling, "return_hidden_states": True}
        reply = one.json("/generate", body, _ANSWER_SECONDS)
        if not (reply.get("meta_info") or {}).get("hidden_states"):
            raise TargetError(
                "the server returns no states", where=one.url, hint=f"it has to be started with {flag}"
            )
    return Proven(names[0], None)


def _wrong_mode(address: Address, expected: Expected, why: str) -> TargetError:
    return TargetError(
        f"the server is not in mode {expected.mode}",
        where=address.url,
        why=why,
        hint="eyas serve stop ends servers of eyas; one of yours has to be started for this mode",
    )


def _prove_model(address: Address, expected: Expected) -> str:
    models = address.json("/v1/models")
    try:
        entry = models["data"][0]
        name, root = str(entry["id"]), str(entry.get("root") or entry["id"])
        if expected.engine == "sglang":
            root = str(address.json("/get_model_info")["model_path"])
        length = int(entry.get("max_model_len") or 0)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise TargetError(
            "the server does not say which model it serves",
            where=f"{address.url}/v1/models",
            why=repr(error),
            hint=f"is a {expected.engine} server listening there? see serve.engine and serve.urls",
        ) from error
    same = root == expected.model
    if not expected.exact_model:
        same = same or name == expected.model or Path(root).name == Path(expected.model).name
    if not same:
        raise TargetError(
            "the server serves another model",
            where=address.url,
            why=f"it serves {root} as {name}, the target is {expected.model}",
            hint="if it is the same model under another name, set serve.model_name",
        )
    if length and length < expected.min_length:
        raise TargetError(
            "the server's context is too short",
            where=address.url,
            why=f"it takes {length} tokens, data.max_seq_len asks for {expected.min_length}",
            hint="start it with a longer context, or lower data.max_seq_len",
        )
    return name


def _probe(address: Address, expected: Expected, model: str) -> dict[str, Any] | None:
    """What the server says of a dump when it is asked for one; None when it says nothing."""
    dump = f"probe-{secrets.token_hex(8)}"
    try:
        if expected.engine == "vllm":
            body = {
                "model": model,
                "prompt": _PROBE_TOKENS,
                "max_tokens": 1,
                "temperature": 0,
                "kv_transfer_params": {"eyas": {"name": dump}},
            }
            reply = address.json("/v1/completions", body, _ANSWER_SECONDS)
            said = (reply.get("kv_transfer_params") or {}).get("eyas")
        else:
            sampling = {"max_new_tokens": 1, "temperature": 0, "custom_params": {"eyas_name": dump}}
            body = {"input_ids": _PROBE_TOKENS, "sampling_params": sampling, "rid": dump, "extra_key": dump}
            reply = address.json("/generate", body, _ANSWER_SECONDS)
            listed = reply["meta_info"].get("eyas")
            said = json.loads(listed[0]) if listed else None
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise TargetError(
            "the server's answer has another form than its engine's",
            where=address.url,
            why=repr(error),
            hint="see serve.engine",
        ) from error
    return said if isinstance(said, dict) else None


def _prove_capture(address: Address, expected: Expected, said: dict[str, Any] | None, clock: Clock) -> Path:
    if said is None:
        raise _wrong_mode(
            address, expected, "it answers, and says nothing of a dump: eyas' plugin is not loaded there"
        )
    if said.get("error"):
        raise TargetError("the server refuses a dump", where=address.url, why=str(said["error"]))
    if said.get("protocol") != 1:
        raise TargetError(
            f"the server's plugin speaks protocol {said.get('protocol')!r}",
            where=address.url,
            why="this eyas speaks 1",
            hint="restart the server with this eyas' plugin",
        )
    if list(said.get("layers") or ()) != list(expected.layers):
        raise TargetError(
            "the server captures other layers",
            where=address.url,
            why=f"it captures {said.get('layers')}, the project asks for {list(expected.layers)}",
            hint="restart it: eyas serve stop",
        )
    folder = Path(str(said.get("dir")))
    if expected.dump_dir is not None and folder != expected.dump_dir:
        raise TargetError(
            "the server dumps to another folder", where=str(folder), why=f"expected {expected.dump_dir}"
        )
    _await_dump(address, folder, str(said.get("name")), clock)
    return folder


def _await_dump(address: Address, folder: Path, name: str, clock: Clock) -> None:
    """The dump of the probe has to come; it is removed."""
    deadline = clock.now() + _DUMP_SECONDS
    dump, failed = folder / f"{name}.dump", folder / f"{name}.err"
    try:
        while not dump.exists():
            if failed.exists():
                raise TargetError(
                    "the server cannot write a dump", where=folder, why=failed.read_text()[:500]
                )
            if clock.now() >= deadline:
                raise TargetError(
                    "the server promised a dump that does not come",
                    where=folder,
                    why=f"{address.url} answered {_DUMP_SECONDS:.0f} s ago",
                    hint="is the folder on a filesystem that eyas and the server share?",
                )
            clock.sleep(0.05)
    finally:
        for suffix in DUMP_SUFFIXES:
            (folder / f"{name}{suffix}").unlink(missing_ok=True)
