"""Opening the ledger; one that is lost or damaged is rebuilt from the folder."""

from __future__ import annotations

from eyas.base.errors import DamageFound
from eyas.base.files import set_aside
from eyas.base.layout import Layout
from eyas.base.progress import Progress
from eyas.base.seal import is_sealed
from eyas.store.ledger import Ledger


def open_ledger(layout: Layout, progress: Progress) -> Ledger:
    """The project's ledger, ready to write.

    Raises:
        FormatTooNew: a newer eyas wrote it.
        DiskFull: it cannot be written.
    """
    lost = not layout.ledger.exists()
    if not lost:
        try:
            return Ledger.open(layout.ledger)
        except DamageFound as error:
            progress.say(f"the ledger is damaged ({error.why}); it is set aside and rebuilt")
            for path in sorted(layout.state.glob("ledger.db*")):
                set_aside(path, layout.set_aside, f"damaged: {error.why}")
    ledger = Ledger.open(layout.ledger)
    if is_sealed(layout.samples) or layout.segments.is_dir():
        from eyas.store.scrub import rebuild_ledger

        rebuild_ledger(layout, ledger)
        progress.say("the ledger was rebuilt from the samples and segments in the folder")
    return ledger
