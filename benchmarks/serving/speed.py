"""A server with a drafter and one without, asked the same prompts in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from benchmarks.serving.cpu import CpuWatch


@dataclass
class Side:
    """One of the two, over all rounds.

    Attributes:
        look: what `eyas bench` knows of the server.
        pid: its first process, where it was started here.
        cpu_seconds: of all its processes while it was measured; 0 without ``pid``.
    """

    look: Any
    pid: int | None = None
    measured: list[Any] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    cpu_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.measured)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / float(sum(one.seconds for one in self.measured))

    @property
    def cpu_seconds_per_token(self) -> float | None:
        return self.cpu_seconds / self.tokens if self.pid is not None else None

    @property
    def seconds_per_token(self) -> float:
        """Between the tokens of one answer, behind its first."""
        later = [one.tokens - one.answers for one in self.measured]
        waited = [one.decode_seconds_per_token or 0.0 for one in self.measured]
        return float(sum(a * b for a, b in zip(later, waited, strict=True)) / sum(later))


def in_turns(
    drafted: Side,
    plain: Side,
    prompts: Sequence[Any],
    rounds: int,
    max_tokens: int,
    say: Callable[[str], None],
) -> None:
    """Ask one prompt at a time, each prompt once of either side; who goes first changes with each round."""
    from eyas.targets.bench.level import measure
    from eyas.targets.bench.stream import Asking

    for number in range(rounds):
        share = list(prompts[number::rounds])
        for side in (drafted, plain) if number % 2 == 0 else (plain, drafted):
            asking = Asking(side.look.model, max_tokens, 0.0, 0, side.look.engine == "sglang")
            watch: AbstractContextManager[Any] = CpuWatch(side.pid) if side.pid is not None else nullcontext()
            with watch as watched:
                found = asyncio.run(measure(side.look, share, 1, asking, lambda answer: None))
            side.cpu_seconds += watched.seconds if watched is not None else 0.0
            side.measured.append(found)
            side.texts |= found.texts
        rates = [side.measured[-1].tokens_per_second for side in (drafted, plain)]
        say(f"round {number + 1}: with the drafter {rates[0]:.1f}, plain {rates[1]:.1f} tokens/s")


def compared(drafted: Side, plain: Side) -> dict[str, Any]:
    """Speed-up by the clock and by CPU seconds, acceptance, texts, and the best number of drafts."""
    from eyas.targets.bench.advice import advise
    from eyas.targets.bench.run import compare_texts
    from eyas.targets.serving.speculation import Speculation

    counted = Speculation(0, 0, ())
    for one in drafted.measured:
        counted = one.speculation + counted if one.speculation is not None else counted
    rates = list(counted.unconditional_rates) if counted.rounds else []
    advice = advise(plain.seconds_per_token, drafted.seconds_per_token, rates) if rates else None
    texts = compare_texts(plain.texts, drafted.texts)
    costs = plain.cpu_seconds_per_token, drafted.cpu_seconds_per_token
    return {
        "tokens_per_second": round(drafted.tokens_per_second, 3),
        "plain_tokens_per_second": round(plain.tokens_per_second, 3),
        "speedup": round(drafted.tokens_per_second / plain.tokens_per_second, 4),
        "speedup_of_rounds": [
            round(one.tokens_per_second / other.tokens_per_second, 3)
            for one, other in zip(drafted.measured, plain.measured, strict=True)
        ],
        "speedup_by_cpu_seconds": round(costs[0] / costs[1], 4) if costs[0] and costs[1] else None,
        "acceptance_length": round(counted.acceptance_length, 4) if counted.rounds else None,
        "rounds": counted.rounds,
        "answers": sum(one.answers for one in drafted.measured),
        "tokens": drafted.tokens,
        "texts": {"compared": texts.compared, "equal": texts.equal},
        "advised_num_drafts": advice.best.num_drafts if advice else None,
    }
