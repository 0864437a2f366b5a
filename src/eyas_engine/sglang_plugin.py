"""An SGLang plugin that dumps hidden states; loaded by the entry point group ``sglang.srt.plugins``.

A server started with ``--enable-return-aux-hidden-states`` captures aux and last states in every
prefill. The plugin wraps the worker's forward pass, takes the rows of the requests that ask for a dump,
and hands them on in the engine's own protocol for auxiliary outputs, which copies them to the host and
calls back when the tokens are known. Prompts that are prefilled in chunks are gathered here.

SGLang only logs a plugin that does not load, so a client must insist on the echo in the reply.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eyas_engine.dump import DUMP_SUFFIX, ERROR_SUFFIX, Provenance
from eyas_engine.reply import echo
from eyas_engine.room import Room
from eyas_engine.settings import EngineSettings, check_name
from eyas_engine.writer import DumpWriter

_log = logging.getLogger("eyas_engine")
_LAST = "after-norm"
_STATE = "eyas_gathered"
"""Attribute of an engine's request that holds what was gathered of it."""

HOOKED = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"


def load() -> None:
    """What the entry point names: hook the forward pass of this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plugin = _Plugin(EngineSettings.from_environment())
    HookRegistry.register(HOOKED, plugin.around_forward, HookType.AROUND)


@dataclass
class _Gathered:
    """What is known of one request so far: its chunks, or why it fails."""

    num_rows: int = 0
    aux: list[torch.Tensor] = field(default_factory=list)
    last: list[torch.Tensor] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class _Rows:
    """Rows of one request in one forward pass; ``before`` counts those of earlier passes."""

    index: int
    before: int
    aux: torch.Tensor | None
    last: torch.Tensor | None
    error: str | None = None


class _Plugin:
    """Created in every process of the engine; threads start where the first dump is written."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.room = Room(settings.directory, settings.limit_bytes, settings.full_share)
        self._writer: DumpWriter | None = None

    @property
    def writer(self) -> DumpWriter:
        if self._writer is None:
            self._writer = DumpWriter(self.settings)
        return self._writer

    def around_forward(self, original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
        """The engine's forward pass, then the rows of requests that ask for a dump."""
        result = original(worker, *args, **kwargs)
        try:
            batch = args[0] if args else kwargs.get("batch")
            if batch is not None and batch.forward_mode.is_extend() and _writes_here():
                taken = self._take(batch, result)
                if taken:
                    from sglang.srt.managers.auxiliary_output import append_auxiliary_output

                    output = result.logits_output
                    output.auxiliary_device_output = append_auxiliary_output(
                        output.auxiliary_device_output, _OnDevice(self, taken)
                    )
        except Exception:  # an exception here would end the engine; without rows no echo is sent
            _log.exception("eyas: hidden states could not be taken")
        return result

    def _take(self, batch: Any, result: Any) -> list[_Rows]:
        """Rows of every request with a name; requests lie one after the other in the batch."""
        decoding = {id(request) for request in batch.decoding_reqs or ()}
        taken: list[_Rows] = []
        offset = 0
        for index, request in enumerate(batch.reqs):
            num_rows = int(batch.extend_lens[index])
            begin, offset = offset, offset + num_rows
            if _asked_name(request) is None or id(request) in decoding:
                continue
            before = int(batch.prefix_lens[index])
            try:
                aux, last = self._rows(result, begin, num_rows, offset)
                taken.append(_Rows(index, before, aux, last))
            except ValueError as error:
                taken.append(_Rows(index, before, None, None, f"bad-request: {error}"))
        return taken

    def _rows(self, result: Any, begin: int, num: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        output = result.logits_output
        packed, last = output.hidden_states, output.last_hidden_states
        if packed is None or last is None:
            raise ValueError("the engine captured no states; was it started to return them?")
        if getattr(output, "hidden_states_token_indices", None) is not None:
            raise ValueError("the engine captured some tokens only")
        if packed.shape[0] < end or last.shape[0] < end:
            raise ValueError(f"the engine captured {packed.shape[0]} rows, fewer than {end}")
        num_layers, width = len(self.settings.layers), last.shape[1]
        if packed.shape[1] != num_layers * width:
            raise ValueError(f"{packed.shape[1]} numbers a row are no {num_layers} layers of {width}")
        aux = packed[begin:end].reshape(num, num_layers, width)
        rows = last[begin:end]
        # a graph's buffers are written again by its next replay
        return (aux.clone(), rows.clone()) if result.can_run_cuda_graph else (aux, rows)

    def gather(self, request: Any, rows: _Rows) -> None:
        """Add the rows of one pass to what is gathered of a request, and finish when it is whole."""
        name, tokens = _asked_name(request), list(request.origin_input_ids)
        gathered: _Gathered = getattr(request, _STATE, None) or _Gathered()
        if rows.before == 0:
            gathered = _Gathered()  # a request that was set back begins anew
        setattr(request, _STATE, gathered)
        if rows.error is not None or rows.aux is None or rows.last is None:
            gathered.error = gathered.error or rows.error
        elif rows.before != gathered.num_rows:
            gathered.error = gathered.error or (
                f"rows: {rows.before} tokens came before this pass, {gathered.num_rows} of them were captured"
            )
        else:
            # on a CPU these are views of the whole batch, which would be kept alive
            gathered.aux.append(rows.aux.clone())
            gathered.last.append(rows.last.clone())
        gathered.num_rows = rows.before + (0 if rows.aux is None else rows.aux.shape[0])
        if gathered.num_rows < len(tokens) and gathered.error is None:
            return
        self._finish(request, name, tokens, gathered)

    def _finish(self, request: Any, name: object, tokens: list[int], gathered: _Gathered) -> None:
        error = check_name(name) or gathered.error
        directory = self.settings.directory
        if error is None and any(
            (directory / f"{name}{suffix}").exists() for suffix in (DUMP_SUFFIX, ERROR_SUFFIX)
        ):
            error = "bad-name: a dump of this name exists"
        num_bytes = sum(t.nbytes for t in (*gathered.aux, *gathered.last))
        if error is None:
            error = self.room.refuse(str(name), num_bytes)
        if error is None and not self.writer.has_room(num_bytes):
            error = f"full: {self.settings.pending_bytes} bytes wait to be written"
        engine = _engine()
        said = echo(self.settings, name=name, rows=len(tokens), last=_LAST, engine=engine, error=error)
        info = request.customized_info if isinstance(request.customized_info, dict) else {}
        request.customized_info = {**info, "eyas": [json.dumps(said)]}
        aux, last = gathered.aux, gathered.last
        gathered.aux, gathered.last = [], []
        if error is None:
            provenance = Provenance(
                name=str(name),
                request_id=str(request.rid),
                engine=engine,
                layers=self.settings.layers,
                last=_LAST,
                server_started=self.settings.server_started,
            )
            self.writer.submit(provenance, tokens, num_bytes, lambda: (torch.cat(aux), torch.cat(last)))


class _OnDevice:
    """The engine's protocol: states on the device, copied by the engine when it sees fit."""

    def __init__(self, plugin: _Plugin, taken: list[_Rows]) -> None:
        self._plugin, self._taken = plugin, taken

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> _OnHost:
        def copied(rows: _Rows) -> _Rows:
            if rows.aux is None or rows.last is None:
                return rows
            return _Rows(rows.index, rows.before, copy_tensor(rows.aux), copy_tensor(rows.last))

        return _OnHost(self._plugin, [copied(rows) for rows in self._taken])


class _OnHost:
    """The engine's protocol: states on the host, consumed when the tokens are known."""

    def __init__(self, plugin: _Plugin, taken: list[_Rows]) -> None:
        self._plugin, self._taken = plugin, taken

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        for rows in self._taken:
            try:
                self._plugin.gather(batch.reqs[rows.index], rows)
            except Exception:  # an exception here would end the scheduler
                _log.exception("eyas: hidden states could not be gathered")


def _asked_name(request: Any) -> object:
    """The name that a request asks its dump to have; None when it asks for none."""
    custom = getattr(request.sampling_params, "custom_params", None)
    return custom.get("eyas_name") if isinstance(custom, dict) else None


def _writes_here() -> bool:
    """Whether this rank writes: the first of those that share a request."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_tp_rank) == 0


def _engine() -> str:
    import sglang

    return f"sglang {sglang.__version__}"
