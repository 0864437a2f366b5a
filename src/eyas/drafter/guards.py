"""What a run watches: numbers that are not finite, losses that jump, data without supervision."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from eyas.base.errors import TrainingDiverged
from eyas.base.progress import Progress
from eyas.drafter.checkpoint import TrainingState
from eyas.drafter.settings import TrainSettings

REMEMBERED_LOSSES = 64
"""Losses whose median a new one is compared with."""
FEWEST_LOSSES = 16
"""Losses that have to be known before one can jump."""
SPREADS = 8.0
"""Median deviations above the median that a jump exceeds as well: small batches differ much."""
_NAMED = 4

Record = Callable[..., None]
"""Writes one row of metrics: its kind, then its facts."""


class Guards:
    """Counts what is wrong into the state, writes it into the metrics and says it.

    Args:
        record: writes one row of metrics.
    """

    def __init__(
        self, settings: TrainSettings, state: TrainingState, record: Record, progress: Progress
    ) -> None:
        self._settings, self._state, self._record, self._progress = settings, state, record, progress
        self._told: set[str] = set()

    def not_finite(self, reason: str, samples: Sequence[str]) -> None:
        """A step that left weights and optimizer as they were.

        Raises:
            TrainingDiverged: it is one too many in a row.
        """
        state = self._state
        state.bad_steps += 1
        self._count("bad_steps")
        self._skipped(reason, samples)
        if state.bad_steps >= self._settings.max_bad_steps:
            raise TrainingDiverged(
                f"{state.bad_steps} training steps in a row had no finite loss or gradient",
                where=f"step {state.step}; samples {_named(samples)}",
                why=reason,
                hint=f"eyas train --set train.lr={self._settings.lr / 2:g} "
                "after setting the checkpoints aside",
            )

    def no_supervision(self, samples: Sequence[str]) -> None:
        """A step none of whose rows is supervised."""
        self._count("unsupervised_steps")
        self._skipped("no supervised row", samples)

    def unsupervised_batch(self, samples: Sequence[str]) -> None:
        """A batch without a supervised row in a step that has some elsewhere; said once for each."""
        self._count("unsupervised_batches")
        self._record("unsupervised", samples=list(samples))
        name = " ".join(samples)
        if name not in self._told:
            self._told.add(name)
            self._progress.say(
                f"step {self._state.step}: a batch has no supervised row; samples {_named(samples)}"
            )

    def good(self, loss: float, samples: Sequence[str]) -> None:
        """A step that counts; one whose loss jumps is named."""
        state = self._state
        state.bad_steps = 0
        if len(state.recent_losses) >= FEWEST_LOSSES:
            median = statistics.median(state.recent_losses)
            spread = statistics.median(abs(known - median) for known in state.recent_losses)
            if loss > max(self._settings.spike_ratio * median, median + SPREADS * spread) and median > 0:
                self._count("spikes")
                self._record("spike", loss=loss, median=median, samples=list(samples))
                self._progress.say(
                    f"step {state.step}: the loss jumped to {loss:.4g}, the median of the "
                    f"{len(state.recent_losses)} before is {median:.4g}; samples {_named(samples)}"
                )
        state.recent_losses = [*state.recent_losses, loss][-REMEMBERED_LOSSES:]

    def _skipped(self, reason: str, samples: Sequence[str]) -> None:
        state = self._state
        self._record("skipped", reason=reason, samples=list(samples), bad_steps=state.bad_steps)
        self._progress.say(f"step {state.step} skipped: {reason}; samples {_named(samples)}")

    def _count(self, what: str) -> None:
        self._state.counters[what] = self._state.counters.get(what, 0) + 1


def _named(samples: Sequence[str]) -> str:
    more = len(samples) - _NAMED
    return ", ".join(samples[:_NAMED]) + (f" and {more} more" if more > 0 else "")
