"""The newest view of a project, made at most once a second however many pages ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from eyas.report.overview import Overview, overview
from eyas.stages.project import Project

MAX_AGE_SECONDS = 1.0


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
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def get(self) -> Overview:
        """The view, at most a second old. Raises EyasError when the project cannot be opened."""
        with self._turn:
            if self._view is None or time.monotonic() - self._made > MAX_AGE_SECONDS:
                self._view = overview(self.open_project(), self.suffix)
                self._made = time.monotonic()
            return self._view
