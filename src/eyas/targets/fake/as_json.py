"""States as JSON, as SGLang returns them without a plugin: aux states or last states, never both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch

from eyas.config.engine_layers import explicit_layer_ids
from eyas.targets.fake.dumps import TinyModel, spoiled

Returns = Literal["", "aux", "last"]
"""What a server hands over as JSON; empty: it dumps."""

JSON_KINDS = frozenset(
    {
        "no-echo", "swapped", "short", "wrong-width", "wrong-dtype", "nan", "infinite", "zero", "constant",
        "wrong-model",
    }
)  # fmt: skip
"""Faults of states that can be told from the reply."""


def json_information(returns: Returns, model: TinyModel, started: str) -> dict[str, Any]:
    """What ``/server_info`` says of it."""
    aux = returns == "aux"
    ids = explicit_layer_ids(model.layers, model.target.facts)["sglang"]
    return {
        "enable_return_aux_hidden_states": aux,
        "enable_return_hidden_states": True,
        "return_aux_hidden_state_layer_ids": ids if aux else None,
        "startup_time": started,
        "version": "0.5.23 (fake)",
    }


def json_meta(
    returns: Returns, model: TinyModel, name: str, tokens: tuple[int, ...], kind: str
) -> tuple[dict[str, Any], int]:
    """``meta_info`` of a reply, and the token that is chosen; ``kind`` spoils it."""
    states = model.states(tokens)
    handed = states if returns == "aux" else replace(states, aux=states.last.unsqueeze(1))
    rows = spoiled(kind, handed, model).aux.flatten(1)
    meta: dict[str, Any] = {"id": name, "prompt_tokens": len(tokens), "completion_tokens": 1}
    if kind != "no-echo":
        meta["hidden_states"] = [_with_null(rows)]
    another = (states.token + 1) % model.target.facts.vocab_size
    return meta, another if kind == "wrong-model" else states.token


def _with_null(rows: torch.Tensor) -> list[list[float | None]]:
    """Numbers as SGLang's encoder writes them: what is no finite number becomes null."""
    finite = rows.isfinite()
    listed: list[list[float | None]] = rows.tolist()
    for row, column in (~finite).nonzero().tolist():
        listed[row][column] = None
    return listed
