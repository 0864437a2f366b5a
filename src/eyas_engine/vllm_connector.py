"""A vLLM connector that dumps hidden states; loaded by ``kv_connector_module_path``.

vLLM's ``extract_hidden_states`` method keeps the states of a request in a cache layer, in the same
blocks as its keys and values, so chunked prefill and preemption need no care here. When a request is
finished the scheduler's half says where its dump will be; in the next step the worker's half copies
the states out of the blocks and lets threads write them.

The reply leaves before the write, so it can promise nothing: the file, or the error file, is the word.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from eyas_engine.dump import DUMP_SUFFIX, ERROR_SUFFIX, Provenance
from eyas_engine.reply import echo
from eyas_engine.room import Room
from eyas_engine.settings import EngineSettings, check_name
from eyas_engine.writer import DumpWriter

_log = logging.getLogger("eyas_engine")
_ENGINE = f"vllm {vllm.__version__}"
_LAST = "before-norm"


@dataclass
class Save:
    """One dump that the worker has to make: where the states are, and whose they are."""

    request_id: str
    name: str
    tokens: list[int]
    blocks: list[int]


@dataclass
class Saves(KVConnectorMetadata):
    """What the scheduler's half tells the worker's half in one step."""

    saves: list[Save] = field(default_factory=list)


class EyasConnector(KVConnectorBase_V1, SupportsHMA):
    """Dumps the states of requests that ask for it; leaves all others alone."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        table = self._kv_transfer_config.get_from_extra_config("eyas", None)
        self._settings = EngineSettings.from_table(table)
        self._group = _group_of_states(kv_cache_config)
        hidden = vllm_config.speculative_config.draft_model_config.hf_config
        # the engine sorts and de-duplicates the ids; these are its columns
        self._columns = sorted({int(k) for k in hidden.eagle_aux_hidden_state_layer_ids})
        model = vllm_config.model_config
        self._row_bytes = len(self._columns) * model.get_hidden_size() * model.dtype.itemsize
        # the scheduler's half
        self._room = Room(self._settings.directory, self._settings.limit_bytes, self._settings.full_share)
        self._coming: list[Save] = []
        # the worker's half, filled by register_kv_caches
        self._cache: torch.Tensor | None = None
        self._writer: DumpWriter | None = None
        self._waiting: dict[str, Save] = {}
        self._copies: dict[str, Any] = {}

    # -- the scheduler's half ------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        saves, self._coming = self._coming, []
        return Saves(saves)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say in the reply where the dump will be, and keep the request's blocks until it is copied."""
        try:
            asked = (request.kv_transfer_params or {}).get("eyas")
            if asked is None:
                return False, None
            name = asked.get("name") if isinstance(asked, dict) else None
            tokens = list(request.prompt_token_ids or ())
            error = self._refuse(request, name, tokens, block_ids)
            if error is None:
                self._coming.append(Save(request.request_id, str(name), tokens, list(block_ids[self._group])))
            said = echo(self._settings, name=name, rows=len(tokens), last=_LAST, engine=_ENGINE, error=error)
            return error is None, {"eyas": said}
        except Exception as error:  # an exception here would end the engine
            _log.exception("eyas: a finished request was not understood")
            return False, {"eyas": {"protocol": 1, "error": f"bad-request: {error!r}"}}

    def _refuse(self, request: Any, name: object, tokens: list[int], block_ids: Any) -> str | None:
        problem = check_name(name)
        if problem is not None:
            return problem
        if not tokens:
            return "bad-request: the prompt has no token ids"
        if request.status.name == "FINISHED_ABORTED" or request.num_computed_tokens < len(tokens):
            return f"rows: {request.num_computed_tokens} of {len(tokens)} tokens were computed"
        if self._group >= len(block_ids):
            return "bad-request: the request holds no blocks"
        directory = self._settings.directory
        if any((directory / f"{name}{suffix}").exists() for suffix in (DUMP_SUFFIX, ERROR_SUFFIX)):
            return "bad-name: a dump of this name exists"
        return self._room.refuse(str(name), len(tokens) * (self._row_bytes + 8))

    # -- the worker's half ---------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        layers = get_layers_from_vllm_config(
            self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches.keys())
        )
        if len(layers) != 1:
            raise RuntimeError(f"eyas: expected one layer that keeps hidden states, found {len(layers)}")
        self._cache = kv_caches[next(iter(layers))]
        if get_tensor_model_parallel_rank() == 0:  # every rank holds the same states; one writes
            self._writer = DumpWriter(self._settings)

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start the copies of this step's dumps; report the requests whose blocks may be freed."""
        if self._writer is None:
            return None, None
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            if isinstance(metadata, Saves):
                self._waiting.update({save.request_id: save for save in metadata.saves})
        done = set()
        for request_id, save in list(self._waiting.items()):
            num_bytes = len(save.tokens) * self._row_bytes
            if not self._writer.has_room(num_bytes):
                break  # the blocks are kept, which holds new requests back
            del self._waiting[request_id]
            try:
                event = self._start(save, self._writer, num_bytes)
            except Exception as error:  # an exception here would end the engine
                _log.exception("eyas: states of %s could not be copied", save.name)
                self._writer.fail(save.name, f"{type(error).__name__}: {error}")
                event = None
            if event is None:
                done.add(request_id)
            else:
                self._copies[request_id] = event
        for request_id, event in list(self._copies.items()):
            if event.query():
                del self._copies[request_id]
                done.add(request_id)
        return done or None, None

    def _start(self, save: Save, writer: DumpWriter, num_bytes: int) -> Any:
        """Copy the states of ``save`` and have them written; returns an event of an unfinished copy."""
        cache = self._cache
        if cache is None:
            raise RuntimeError("the cache of hidden states was never registered")
        num_tokens, block_size = len(save.tokens), cache.shape[2]
        num_blocks = -(-num_tokens // block_size)
        if len(save.blocks) < num_blocks:
            raise RuntimeError(f"{len(save.blocks)} blocks of {block_size} hold no {num_tokens} tokens")
        blocks = torch.tensor(save.blocks[:num_blocks], dtype=torch.long)
        # [blocks, columns, block size, H] -> [T, columns, H]; the gather is a copy
        rows = cache.transpose(1, 2)[blocks.to(cache.device)].reshape(-1, cache.shape[1], cache.shape[3])
        event = None
        if rows.is_cuda:
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            rows = host
        rows = rows[:num_tokens]
        aux_columns = [self._columns.index(k) for k in self._settings.layers]
        last_column = self._columns.index(self._settings.num_layers)

        def states() -> tuple[torch.Tensor, torch.Tensor]:
            if event is not None:
                event.synchronize()
            return rows[:, aux_columns], rows[:, last_column]

        provenance = Provenance(
            name=save.name,
            request_id=save.request_id,
            engine=_ENGINE,
            layers=self._settings.layers,
            last=_LAST,
            server_started=self._settings.server_started,
        )
        writer.submit(provenance, save.tokens, num_bytes, states)
        return event

    def shutdown(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def get_finished_count(self) -> int | None:
        return 1  # only rank 0 reports; waiting for the others would keep the blocks for ever

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "LBNHC"  # a token's states lie together


def _group_of_states(kv_cache_config: Any) -> int:
    """Index of the cache group that holds hidden states; a uniform model has one group for all."""
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    groups = getattr(kv_cache_config, "kv_cache_groups", None) or []
    found = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if len(found) > 1 or (not found and len(groups) > 1):
        raise RuntimeError(f"eyas: {len(found)} of {len(groups)} cache groups hold hidden states, not one")
    return found[0] if found else 0
