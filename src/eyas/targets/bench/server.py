"""A server to be measured: which engine it is, what it serves, and what it counts."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Literal

from eyas.base.errors import ServerUnreachable, TargetError
from eyas.targets.serving.address import Address
from eyas.targets.serving.speculation import Speculation, parse_metrics, parse_speculation

BenchEngine = Literal["vllm", "sglang", "other"]
_GENERATED = "vllm:generation_tokens_total"
_LATE_SECONDS = 3.0
"""vLLM adds an answer to its counters a moment after it has sent it."""
_LOOK_AGAIN_SECONDS = 0.05


@dataclass(frozen=True)
class Counts:
    """vLLM's counters: drafts (None: it serves no drafter) and tokens written since its start."""

    speculation: Speculation | None
    tokens: int


@dataclass(frozen=True)
class MeasuredServer:
    """What a server said of itself.

    Attributes:
        num_drafts: drafts of a round where it tells; None: it serves no drafter, or does not tell.
        drafts: whether it serves a drafter; None when it does not tell.
        is_tree: it drafts trees, not chains.
    """

    address: Address
    engine: BenchEngine
    model: str
    drafts: bool | None
    num_drafts: int | None = None
    is_tree: bool = False

    @property
    def called(self) -> str:
        """What people are told it is; one that tells of no drafter is taken for one that has it."""
        return "no drafter" if self.drafts is False else "with drafter"

    def counts(self) -> Counts | None:
        """Counters now; None where the engine has none. Raises ServerUnreachable."""
        if self.engine != "vllm":
            return None
        text = self.address.text("/metrics")
        written = parse_metrics(text).get(_GENERATED, [])
        return Counts(parse_speculation(text), round(sum(value for _, value in written)))

    def counts_after(self, before: Counts, num_tokens: int) -> Counts:
        """Counters once they hold ``num_tokens`` more than ``before``, or after a moment of patience."""
        deadline = time.monotonic() + _LATE_SECONDS
        while True:
            now = self.counts()
            assert now is not None
            if now.tokens - before.tokens >= num_tokens or time.monotonic() > deadline:
                return now
            time.sleep(_LOOK_AGAIN_SECONDS)

    def average_since_start(self) -> float | None:
        """SGLang's own mean acceptance length since it started, for want of counts of each answer."""
        if self.engine != "sglang":
            return None
        states = _information(self.address).get("internal_states") or [{}]
        found = states[0].get("avg_spec_accept_length")
        return None if found is None else float(found)


def look_at(address: Address, model: str = "") -> MeasuredServer:
    """Find out what a server is.

    Args:
        model: name to send; empty: its only one.

    Raises:
        ServerUnreachable: it does not answer.
        TargetError: it serves no model of that name, or several and none was named.
    """
    entries = address.json("/v1/models").get("data") or []
    names = [str(entry.get("id")) for entry in entries]
    if (model and model not in names) or (not model and len(names) != 1):
        raise TargetError(
            f"the server serves {', '.join(names) or 'nothing'}",
            where=address.url,
            why=f"--model {model} is none of them" if model else "one model has to be chosen",
            hint=f"eyas bench {address.url} --model {names[0]}" if names else None,
        )
    entry = entries[names.index(model) if model else 0]
    found = MeasuredServer(address, _engine(address, entry), str(entry["id"]), None)
    if found.engine == "vllm":
        try:
            counted = found.counts()
        except ServerUnreachable:
            return replace(found, engine="other")  # its metrics are switched off
        speculation = counted.speculation if counted else None
        positions = len(speculation.accepted_at) if speculation else 0
        return replace(found, drafts=speculation is not None, num_drafts=positions or None)
    if found.engine == "sglang":
        told = _information(address)
        steps = told.get("speculative_num_steps")
        return replace(
            found,
            drafts=bool(told.get("speculative_algorithm") or told.get("speculative_draft_model_path")),
            num_drafts=int(steps) if steps else None,
            is_tree=int(told.get("speculative_eagle_topk") or 1) > 1,
        )
    return found


def _engine(address: Address, entry: dict[str, Any]) -> BenchEngine:
    owner = str(entry.get("owned_by", "")).lower()
    if owner in ("vllm", "sglang"):
        return "vllm" if owner == "vllm" else "sglang"
    try:  # a server behind a proxy may call its owner by another name
        if "vllm:" in address.text("/metrics"):
            return "vllm"
    except ServerUnreachable:
        pass
    return "sglang" if _information(address) else "other"


def _information(address: Address) -> dict[str, Any]:
    """SGLang's description of itself, at its new or its old path; empty where there is none."""
    for path in ("/server_info", "/get_server_info"):
        try:
            told = address.json(path)
        except ServerUnreachable:
            continue
        if isinstance(told, dict):
            return told
    return {}
