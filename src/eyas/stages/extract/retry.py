"""The wait before samples that failed are tried again: what failed may need time more than another try."""

from __future__ import annotations

from eyas.base.progress import Progress
from eyas.base.stop import StopFlag
from eyas.base.units import counted, format_seconds
from eyas.store.ledger import Ledger

_MAX_SECONDS = 300.0


def retry_delay(num_tried: int, first_seconds: float) -> float:
    """Seconds to wait after so many tries: the first delay, doubled with each further try."""
    return min(_MAX_SECONDS, first_seconds * 2.0 ** (num_tried - 1))


def wait_to_retry(
    ledger: Ledger, num_tried: int, first_seconds: float, progress: Progress, stop: StopFlag
) -> None:
    """Wait when only samples that failed are left; everything captured is committed.

    Raises:
        Stopped: a stop was asked for.
    """
    failed = [sample for sample in ledger.failed_samples() if sample.state == "failed"]
    if not failed:
        return
    seconds = retry_delay(num_tried, first_seconds)
    progress.say(
        f"{counted(len(failed), 'sample')} failed ({failed[0].id}: {failed[0].reason}); "
        f"trying again in {format_seconds(seconds)}"
    )
    stop.wait(seconds)
