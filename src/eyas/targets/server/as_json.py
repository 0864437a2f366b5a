"""States as JSON, from SGLang servers of others that do not load eyas' plugin.

SGLang hands over aux states or last states, never both, so a capture is two requests: to a server started
with ``--enable-return-aux-hidden-states`` and to one with ``--enable-return-hidden-states``. Neither
repeats the tokens: whose states these are rests on the request's id, the length of the prompt, the token
that was chosen, and on the rows being whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eyas.base.hashing import recipe_hash
from eyas.config.engine_layers import IDS_KEY, layers_in_sglang
from eyas.config.target_facts import TargetFacts
from eyas.targets.server.connection import Connection, ServedModel
from eyas.targets.server.dump import Dump, Expected
from eyas.targets.server.faults import ServerFault


@dataclass(frozen=True)
class HandedOver:
    """What one server said: states [T, width] in the target's arithmetic, and the token that it chose."""

    states: torch.Tensor
    token: int


@dataclass(frozen=True)
class Told:
    """What the server of aux states said of itself: engine and version, and which start of it this is."""

    engine: str
    instance: str


async def prove_beside(
    aux: Connection, last: Connection, served: ServedModel, layers: Sequence[int], facts: TargetFacts
) -> Told:
    """Whether both servers are SGLang's, serve one model, and the first captures these layers.

    Raises:
        ServerFault: they are not what they have to be.
    """
    await last.health()
    other = await last.model("")
    if other.path != served.path:
        raise ServerFault("wrong_model", f"{last.url} serves {other.path}, {aux.url} serves {served.path}")
    said, beside = await aux.about(), await last.about()
    if not said.get("enable_return_aux_hidden_states") or beside.get("enable_return_aux_hidden_states"):
        why = "the server of serve.urls has to return aux states, the one of serve.last_urls last states"
        raise ServerFault("no_echo", why)
    ids = said.get("return_aux_hidden_state_layer_ids")
    found = layers_in_sglang({"eagle_config": {IDS_KEY: ids}}, facts.num_layers, facts.model_type)
    if found != tuple(layers):
        raise ServerFault("wrong_layers", f"it captures layers {list(found)}, asked for {list(layers)}")
    # how long each part of its start took: no two starts are alike to the last digit
    starts = recipe_hash({"aux": said.get("startup_time"), "last": beside.get("startup_time")})
    return Told(f"sglang {said.get('version', 'unknown')} (JSON)", starts)


def request_states(tokens: Sequence[int], name: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a request for the states of ``tokens``; ``name`` identifies it."""
    body = {
        "input_ids": [int(token) for token in tokens],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_hidden_states": True,
        "rid": name,
        "extra_key": name,  # nothing of an earlier request's cache
    }
    return "/generate", body


def join(aux: bytes, last: bytes, expected: Expected, engine: str, instance: str) -> tuple[Dump, list[int]]:
    """Both replies as one dump, and the tokens that the servers chose.

    Raises:
        ServerFault: with a code of its own for each fault that the form shows.
    """
    width, num_layers = expected.hidden_size, len(expected.layers)
    packed = _read(aux, expected, num_layers * width)
    final = _read(last, expected, width)
    states = packed.states.reshape(len(expected.tokens), num_layers, width)
    dump = Dump(aux=states, last=final.states, before_norm=False, engine=engine, instance=instance)
    return dump, [packed.token, final.token]


def _read(content: bytes, expected: Expected, width: int) -> HandedOver:
    """One reply. Raises ServerFault."""
    try:
        reply = json.loads(content)
        meta: Mapping[str, Any] = reply["meta_info"]
        rows, token = meta["hidden_states"], int(reply["output_ids"][0])
        name, count = str(meta["id"]), int(meta["prompt_tokens"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerFault("bad_reply", f"it holds no states as SGLang returns them: {error!r}") from error
    if name != expected.name:
        raise ServerFault("swapped", f"it is about the request {name!r}, not {expected.name!r}")
    if count != len(expected.tokens):
        raise ServerFault(
            "other_tokens", f"it counts {count} prompt tokens, {len(expected.tokens)} were sent"
        )
    return HandedOver(_numbers(rows, len(expected.tokens), width, expected.dtype), token)


def _numbers(rows: object, num_tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The prompt's rows, which are the first entry; null stands for what is no number."""
    exact = np.float64 if dtype == torch.float64 else np.float32
    try:
        found = np.array(rows[0] if isinstance(rows, list) else None, dtype=exact)
    except (IndexError, TypeError, ValueError) as error:
        raise ServerFault("bad_reply", f"its states are no table of numbers: {error}") from error
    if found.ndim != 2:
        raise ServerFault("bad_reply", f"its states have {found.ndim} dimensions, not 2")
    if len(found) != num_tokens:
        why = f"{len(found)} rows for {num_tokens} tokens"
        raise ServerFault("rows", f"{why}: SGLang returns the last chunk only; --chunked-prefill-size -1")
    if found.shape[1] != width:
        raise ServerFault("wrong_width", f"{found.shape[1]} numbers a row, not {width}")
    wide = torch.from_numpy(found)
    states = wide.to(dtype)
    # states in float32 are never all as round as a narrower type's; zeros are found elsewhere
    rounder = (torch.bfloat16, torch.float16) if dtype == torch.float32 and bool(wide.any()) else ()
    if not _same(states, wide) or any(_same(wide.to(one), wide) for one in rounder):
        raise ServerFault("wrong_dtype", f"its numbers are not those of {dtype}")
    return states


def _same(narrow: torch.Tensor, wide: torch.Tensor) -> bool:
    """Whether every number that is one came through unchanged."""
    return bool(((narrow.to(wide.dtype) == wide) | wide.isnan()).all())
