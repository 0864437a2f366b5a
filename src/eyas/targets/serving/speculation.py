"""What a server that serves a drafter says of its acceptance."""

from __future__ import annotations

import re
from dataclasses import dataclass

from eyas.base.errors import ServerUnreachable, TargetError
from eyas.config.server_arguments import Engine
from eyas.targets.serving.address import Address

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ROUNDS = "vllm:spec_decode_num_drafts_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class Speculation:
    """Counts of speculative decoding since a server started, or between two readings.

    Args:
        rounds: rounds of drafting, one target forward each.
        accepted: accepted drafts.
        accepted_at: accepted drafts by position in the chain.
    """

    rounds: int
    accepted: int
    accepted_at: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """1 + accepted drafts / target forwards. Raises ZeroDivisionError before the first round."""
        return 1 + self.accepted / self.rounds

    @property
    def unconditional_rates(self) -> tuple[float, ...]:
        """Share accepted at each position among all rounds."""
        return tuple(count / self.rounds for count in self.accepted_at)

    def __add__(self, other: Speculation) -> Speculation:
        """Both together; positions that one of them does not have count nothing there."""
        length = max(len(self.accepted_at), len(other.accepted_at))
        one, two = (at + (0,) * (length - len(at)) for at in (self.accepted_at, other.accepted_at))
        return Speculation(
            self.rounds + other.rounds,
            self.accepted + other.accepted,
            tuple(a + b for a, b in zip(one, two, strict=True)),
        )

    def since(self, earlier: Speculation) -> Speculation:
        """What came after an earlier reading of the same server."""
        before = earlier.accepted_at + (0,) * (len(self.accepted_at) - len(earlier.accepted_at))
        return Speculation(
            self.rounds - earlier.rounds,
            self.accepted - earlier.accepted,
            tuple(now - then for now, then in zip(self.accepted_at, before, strict=True)),
        )


def parse_metrics(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Prometheus' text form: samples by metric, each with its labels; other lines are left out."""
    metrics: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        matched = _LINE.match(line.strip())
        if matched is None or line.startswith("#"):
            continue
        name, labels, value = matched.groups()
        try:
            metrics.setdefault(name, []).append((dict(_LABEL.findall(labels or "")), float(value)))
        except ValueError:
            continue
    return metrics


def parse_speculation(text: str) -> Speculation | None:
    """Counts in vLLM's ``/metrics``, summed over engines; None when it does not speculate."""
    metrics = parse_metrics(text)
    if _ROUNDS not in metrics or _ACCEPTED not in metrics:
        return None
    positions: dict[int, float] = {}
    for labels, value in metrics.get(_BY_POSITION, []):
        position = int(labels.get("position", 0))
        positions[position] = positions.get(position, 0.0) + value
    return Speculation(
        round(sum(value for _, value in metrics[_ROUNDS])),
        round(sum(value for _, value in metrics[_ACCEPTED])),
        tuple(round(positions.get(p, 0.0)) for p in range(max(positions, default=-1) + 1)),
    )


def read_speculation(address: Address) -> Speculation:
    """Counts of a vLLM server now.

    Raises:
        ServerUnreachable: it does not answer.
        TargetError: it serves no drafter.
    """
    found = parse_speculation(address.text("/metrics"))
    if found is None:
        raise TargetError(
            "the server counts no drafts",
            where=f"{address.url}/metrics",
            why="it serves no drafter",
            hint="eyas serve start --mode draft",
        )
    return found


def speculates(address: Address, engine: Engine) -> bool:
    """Whether a server serves a drafter. Raises ServerUnreachable when it does not answer."""
    if engine == "vllm":
        try:
            return parse_speculation(address.text("/metrics")) is not None
        except ServerUnreachable:
            if address.health() != "ok":
                raise
            return False  # a server whose metrics are switched off
    information = address.json("/get_server_info")
    return bool(information.get("speculative_draft_model_path"))
