"""When a server in doubt is asked again: after a pause that doubles, with jitter."""

from __future__ import annotations

import random


class Breaker:
    """Counts failed proofs in a row and says how long to wait before the next.

    Closed while ``failures`` is 0. One failure opens it; each proof after a pause is the half-open state: a
    single request decides. Jitter keeps clients that lost a server together from coming back together.

    Args:
        first_seconds: pause after the first failure.
        longest_seconds: no pause is longer.
        seed: of the jitter, for tests.
    """

    def __init__(
        self, first_seconds: float = 0.25, longest_seconds: float = 30.0, seed: int | None = None
    ) -> None:
        self._first, self._longest = first_seconds, longest_seconds
        self._random = random.Random(seed)
        self.failures = 0

    @property
    def open(self) -> bool:
        return self.failures > 0

    def failed(self) -> float:
        """Note a failure; returns seconds to wait, between half and all of the present pause."""
        self.failures += 1
        pause: float = min(self._longest, self._first * 2.0 ** (self.failures - 1))
        return pause * self._random.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        self.failures = 0
