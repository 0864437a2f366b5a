"""The newest view of a project, made once however many pages ask, and ahead of the next one who asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from eyas.base.errors import EyasError
from eyas.report.overview import Overview, overview
from eyas.stages.project import Project

FRESH_SECONDS = 1.0
"""A view so young is given as it is."""
STALE_SECONDS = 10.0
"""A view so old is made anew before an answer; one in between is given while the next is made."""


@dataclass
class LiveView:
    """Looks at a project when it is asked.

    Args:
        open_project: opens it anew, so that an edited configuration is seen.
        suffix: added to suggested commands.
    """

    open_project: Callable[[], Project]
    suffix: str = ""
    _made: float = -1e9
    _view: Overview | None = None
    _error: EyasError | None = None
    _looking: bool = False
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def get(self) -> Overview:
        """The view, at most 10 s old, younger while pages are open.

        Raises:
            EyasError: the project cannot be opened now.
        """
        with self._turn:
            age = time.monotonic() - self._made
            if self._view is None or self._error is not None or age > STALE_SECONDS:
                self._look()
            elif age > FRESH_SECONDS and not self._looking:
                self._looking = True
                threading.Thread(target=self._look_ahead, daemon=True).start()
            if self._error is not None:
                raise self._error
            assert self._view is not None
            return self._view

    def _look(self) -> None:
        try:
            self._view, self._error = overview(self.open_project(), self.suffix), None
            self._made = time.monotonic()
        except EyasError as error:
            self._error = error

    def _look_ahead(self) -> None:
        try:
            self._look()
        finally:
            self._looking = False
