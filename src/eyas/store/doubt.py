"""Which segments have to be hashed before they count as whole."""

from __future__ import annotations

from eyas.base.clock import boot_id, parse_time
from eyas.base.layout import Layout
from eyas.store.ledger import DOUBTFUL, Ledger, SegmentRecord
from eyas.store.place import mount_identity


def unhashed_segments(layout: Layout, ledger: Ledger) -> list[str]:
    """Segments whose hashes were not checked since this boot and mount, or that were written to since."""
    names = set(ledger.unverified(boot_id(), mount_identity(layout.segments)))
    names.update(segment.name for segment in ledger.segments() if is_doubtful(layout, segment))
    return sorted(names)


def is_doubtful(layout: Layout, segment: SegmentRecord) -> bool:
    """Whether a segment was found damaged, or its file was changed after its commit and its last check.

    eyas never writes to a segment again, so this was somebody else, or a copy that is younger than its check.
    """
    if segment.verified_boot == DOUBTFUL:
        return True
    known = [at for at in map(parse_time, (segment.committed_at, segment.verified_at)) if at is not None]
    if not known:
        return True
    try:
        changed = (layout.segments / segment.name).stat().st_mtime
    except OSError:
        return False  # it is missing, which has a name of its own
    return changed > max(known).timestamp()
