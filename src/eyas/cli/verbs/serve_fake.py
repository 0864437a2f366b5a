"""``eyas serve fake``: a server of a small model with faults on order, to rehearse a run against."""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from eyas.base.units import counted
from eyas.cli.common import Apart
from eyas.cli.output import next_command, note, print_json


def fake(
    model: Path,
    *,
    engine: Literal["vllm", "sglang"] = "vllm",
    mode: Literal["capture", "generate"] = "capture",
    dump_dir: Path | None = None,
    returns: Literal["aux", "last"] | None = None,
    aux_layers: tuple[int, ...] = (),
    port: int = 0,
    name: str = "",
    dtype: str = "float32",
    fault: Annotated[tuple[str, ...], Parameter(name="--fault")] = (),
    faults: Path | None = None,
    api_key_env: str = "",
    certificate: Path | None = None,
    key: Path | None = None,
    accept: Annotated[tuple[int, ...], Parameter(name="--accept")] = (),
    round_seconds: float = 0.0,
    common: Apart = Apart(),  # noqa: B008 - frozen
) -> int:
    """Serve a small model as vLLM or SGLang would, with faults by schedule; ends with Ctrl-C.

    Answers and states are real, computed here by transformers. Only requests that name a dump
    count (mode capture), or requests for answers (mode generate); the first is number 1.

    Args:
        model: folder of a small target.
        engine: whose protocol it speaks.
        mode: capture dumps states; generate answers.
        dump_dir: where dumps go; needed in mode capture.
        returns: states that its replies hold as JSON, as SGLang does without a plugin; no dumps then.
        aux_layers: layers captured, as after k layers; by default those of extract.aux_layers = auto.
        port: on 127.0.0.1; 0 takes a free one.
        name: what it says it serves; by default the folder's name.
        dtype: arithmetic of the model.
        fault: KIND@N at request N, KIND@N+ from N on, KIND@N:SECONDS; may be repeated.
        faults: file with one fault a line.
        api_key_env: environment variable with the key that requests have to bring.
        certificate: PEM file, for https.
        key: PEM file of the certificate's key.
        accept: pretend a drafter: accepted drafts of an answer's rounds in turn; may be repeated.
        round_seconds: what a forward pass pretends to take, in streamed answers.
    """
    # loaded by name: the command line itself stays free of torch
    server = import_module("eyas.targets.fake.start").start_fake(
        model,
        engine=engine,
        mode=mode,
        dump_dir=dump_dir,
        returns=returns or "",
        aux_layers=aux_layers,
        port=port,
        name=name,
        dtype=dtype,
        faults=fault,
        schedule=faults,
        api_key_env=api_key_env,
        certificate=certificate,
        key=key,
        accepts=accept,
        round_seconds=round_seconds,
    )
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    if common.json:
        print_json({"url": server.url, "pid": os.getpid(), "engine": engine, "mode": mode})
    else:
        print(server.url)
        note(f"{engine}, {mode}, {counted(len(server.settings.faults), 'fault')} on order; Ctrl-C ends it")
        next_command(f"eyas extract --set target.kind={engine} --set 'serve.urls=[\"{server.url}\"]'")
    sys.stdout.flush()
    ended.wait()
    server.close()
    caused = ", ".join(f"{kind} {count}" for kind, count in sorted(server.caused.items()))
    note(f"{counted(server.requests, 'request')}; faults caused: {caused or 'none'}")
    return 0
