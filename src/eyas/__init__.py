"""eyas trains EAGLE-3 draft models through a pipeline that may be killed anywhere and loses nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.report.opened import OpenedProject as OpenedProject
    from eyas.report.opened import open_project as open

__version__ = "0.1.0"
__all__ = ["OpenedProject", "__version__", "open"]


def __getattr__(name: str) -> Any:
    """Load what programs use only when they use it: the command line has no time for it."""
    if name in ("open", "OpenedProject"):
        from eyas.report import opened

        return opened.open_project if name == "open" else opened.OpenedProject
    raise AttributeError(f"module 'eyas' has no attribute {name!r}")
