"""What is written down of waves: the rule in force, what came of it, and how many are over."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from eyas.base.checked import require_check, with_check
from eyas.base.errors import SealBroken
from eyas.base.files import read_json, write_json
from eyas.base.layout import Layout
from eyas.base.seal import is_sealed, read_seal
from eyas.store.ledger import Ledger
from eyas.store.waves import WaveRule

SETTLED_KEY = "waves_over"
"""Under it the ledger notes how many waves were over when it was last settled."""
_NAME = "waves.json"


@dataclass(frozen=True)
class WaveRecord:
    """What ``store/waves.json`` says: the rule in force, and what came of it.

    Args:
        digest, num_waves, num_captures: of the plan.
        passed: samples that training has gone past without, for they could not be captured, by their reason.
        epoch: the present one, where samples are captured anew in each.
        first_segment: the lowest number of a segment that was captured for these waves in this epoch.
    """

    rule: WaveRule
    digest: str
    num_waves: int
    num_captures: int
    passed: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    first_segment: int = 0


def waves_path(layout: Layout) -> Path:
    return layout.store / _NAME


def read_waves(layout: Layout) -> WaveRecord | None:
    """The record; None when there is none, or it is damaged: a run with a bound writes it anew."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = require_check(read_json(waves_path(layout)))
        return WaveRecord(
            WaveRule(**content["rule"]),
            content["digest"],
            content["waves"],
            content["captures"],
            dict(content["passed"]),
            content["epoch"],
            content["first_segment"],
        )
    return None


def write_waves(layout: Layout, record: WaveRecord) -> None:
    """Write the record atomically, unless it is there already. Raises OSError."""
    if read_waves(layout) == record:
        return
    content = {
        "rule": record.rule.as_dict(),
        "digest": record.digest,
        "waves": record.num_waves,
        "captures": record.num_captures,
        "passed": record.passed,
        "epoch": record.epoch,
        "first_segment": record.first_segment,
    }
    write_json(waves_path(layout), with_check(content))


def settled_at(ledger: Ledger) -> int:
    """How many waves were over when the ledger was last brought to where training stood."""
    return int(ledger.meta(SETTLED_KEY) or 0)


def waves_over(layout: Layout, digest: str | None) -> int:
    """How many waves training is done with, by the newest sealed checkpoint.

    Args:
        digest: of the plan that is asked about; a checkpoint of other waves says nothing of these.
    """
    folders = sorted(layout.checkpoints.glob("step-*")) if layout.checkpoints.is_dir() else []
    for folder in reversed(folders):
        # a damaged one does not count: training sets it aside and goes back to the one before
        with contextlib.suppress(SealBroken):
            if is_sealed(folder):
                about = read_seal(folder)["about"]
                return int(about["waves_over"]) if digest and about.get("waves") == digest else 0
    return 0
