"""What extract and train share when the store has a bound: the plan of waves, and who may go on with which.

Both work in turn when the target computes in this process, and at the same time when servers compute
elsewhere: then capture runs in a thread and asks the `Feed` before each wave.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from eyas.base.stop import StopFlag
from eyas.stages.project import Project
from eyas.store.ledger import Ledger
from eyas.store.waves import Wave, WavePlan, WaveRule, plan_waves

_TOKEN_ID_BYTES = 4
_SPAN_BYTES = 8
_LOOK_SECONDS = 0.1


def wave_rule(project: Project) -> WaveRule | None:
    """What decides the waves of a project; None when its store has no bound.

    Raises:
        TargetError: the target's configuration cannot be read.
    """
    config, resolved = project.config, project.resolved
    bound = config.store.bound_bytes
    if bound is None:
        return None
    token_bytes = resolved.bytes_per_token_aux + _TOKEN_ID_BYTES
    # a supervised token has at most one last state, and begins at most one span
    row_bytes = resolved.bytes_per_token_last + _SPAN_BYTES
    return WaveRule(
        max_bytes=bound,
        least_bytes=config.train.batch_tokens * config.train.accumulate * (token_bytes + row_bytes),
        token_bytes=token_bytes,
        row_bytes=row_bytes,
        epochs=config.train.epochs,
        recapture=config.store.recapture,
        seed=config.train.seed,
    )


def project_waves(project: Project, ledger: Ledger) -> WavePlan | None:
    """The plan of a project whose samples the ledger lists; None when its store has no bound.

    Raises:
        ConfigError: the bound is too small for the data.
    """
    rule = wave_rule(project)
    return None if rule is None else plan_waves(ledger.entries(), rule)


def not_captured(ledger: Ledger, ids: Iterable[str]) -> int:
    """How many of these samples are neither stored nor set aside."""
    with ledger.reading() as connection:
        left = {
            row[0]
            for row in connection.execute(
                "SELECT id FROM samples WHERE listed IN (0, 1) AND state NOT IN ('stored', 'set_aside')"
            )
        }
    return sum(name in left for name in ids)


def is_captured(ledger: Ledger, plan: WavePlan, number: int) -> bool:
    """Whether a wave can be trained: it and the kept samples are stored, or given up."""
    return not_captured(ledger, (*plan.kept, *plan.waves[number].ids)) == 0


class Feed:
    """Tells a capture that runs beside training which wave may be captured, as training goes on.

    Args:
        position: waves that are over.
    """

    def __init__(self, plan: WavePlan, position: int) -> None:
        self._plan, self._position = plan, position
        self._changed = threading.Condition()
        self._asked = False
        self._over = False

    def moved(self, position: int) -> None:
        """Training is done with so many waves, and what is over is off the disk."""
        with self._changed:
            self._position = position
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more is to be captured."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def await_room(self, number: int, stop: StopFlag) -> Wave | None:
        """The wave once it may be captured; None when the feed ended before.

        Raises:
            Stopped: a stop was asked for.
        """
        with self._changed:
            self._asked = True
            self._changed.notify_all()
            while not self._over and number not in self._plan.on_disk(self._position):
                stop.check()
                self._changed.wait(_LOOK_SECONDS)
            return None if self._over else self._plan.waves[number]

    @property
    def asked(self) -> bool:
        """Whether the capture has looked at what is there and asked for a wave."""
        with self._changed:
            return self._asked
