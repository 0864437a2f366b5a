"""vLLM's stock connector of hidden states, made to run where there is no CUDA; loaded into vLLM's process.

On a CPU it ends the engine twice over: it asks for pinned memory, and it asks vLLM's stand-in for a CUDA
event whether it is over, which that stand-in cannot say. Both are taken away here and nothing else is.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)


class StockConnector(ExampleHiddenStatesConnector):
    """The stock connector itself where CUDA is; without pinned memory and events where it is not."""

    def _submit_async_write(self, pending: Any) -> None:
        if torch.cuda.is_available():
            super()._submit_async_write(pending)
            return
        with _without_pinning():
            super()._submit_async_write(pending)
        self._req_copy_events[pending.req_id] = _Over()


class _Over:
    """An event of a copy that was over when it returned, as all are on a CPU."""

    def query(self) -> bool:
        return True


@contextmanager
def _without_pinning() -> Any:
    empty_like = torch.empty_like

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty_like(*args, **kwargs)

    with patch.object(torch, "empty_like", unpinned):
        yield
