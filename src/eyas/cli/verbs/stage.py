"""``eyas prepare``, ``eyas train`` and so on: one stage at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from cyclopts import Parameter

from eyas.cli.common import Common
from eyas.cli.execute import execute
from eyas.pipeline.order import stage_named

_COMMON = Common()


def _one(
    name: str, common: Common, redo: bool, dry_run: bool, detach: bool, retry_failed: bool = False
) -> int:
    return execute(name, (stage_named(name),), common, (name,) if redo else (), retry_failed, dry_run, detach)


def prepare(
    *, redo: bool = False, dry_run: bool = False, detach: bool = False, common: Common = _COMMON
) -> int:
    """Read the sources, render them with the target's template, split and count them.

    Args:
        redo: set the present output aside and make it anew.
        dry_run: print the plan and change nothing.
        detach: go on in the background.
    """
    return _one("prepare", common, redo, dry_run, detach)


def regenerate(
    *, redo: bool = False, dry_run: bool = False, detach: bool = False, common: Common = _COMMON
) -> int:
    """Let the target answer every prompt itself; kept as the token ids it emits.

    Args:
        redo: set the present answers aside and make them anew.
        dry_run: print the plan and change nothing.
        detach: go on in the background.
    """
    return _one("regenerate", common, redo, dry_run, detach)


def extract(
    *,
    redo: bool = False,
    retry_failed: bool = False,
    dry_run: bool = False,
    detach: bool = False,
    common: Common = _COMMON,
) -> int:
    """Capture hidden states of every sample that the store does not hold yet; at most store.max_bytes.

    Args:
        redo: set the present store aside and capture everything anew.
        retry_failed: take up samples again that were set aside after their retries.
        dry_run: print the plan and change nothing.
        detach: go on in the background.
    """
    return _one("extract", common, redo, dry_run, detach, retry_failed)


def train(
    *, redo: bool = False, dry_run: bool = False, detach: bool = False, common: Common = _COMMON
) -> int:
    """Train the drafter from the store; goes on from the newest whole checkpoint.

    With store.max_bytes it trains the waves that are captured; eyas run captures and trains in turn.

    Args:
        redo: set the present drafter aside and train from the start.
        dry_run: print the plan and change nothing.
        detach: go on in the background.
    """
    return _one("train", common, redo, dry_run, detach)


def evaluate(
    *, redo: bool = False, dry_run: bool = False, detach: bool = False, common: Common = _COMMON
) -> int:
    """Measure acceptance length and speed on held-out prompts.

    Args:
        redo: measure again although nothing changed.
        dry_run: print the plan and change nothing.
        detach: go on in the background.
    """
    return _one("evaluate", common, redo, dry_run, detach)


def export(
    *,
    to: Annotated[tuple[Literal["sglang", "vllm", "speculators"], ...], Parameter(name="--to")] = (),
    redo: bool = False,
    dry_run: bool = False,
    detach: bool = False,
    common: Common = _COMMON,
) -> int:
    """Write the trained drafter in the layout that vLLM and SGLang load, and in others on demand.

    Args:
        to: a further layout, written to exports/NAME-LAYOUT; may be repeated.
        redo: set the present exports aside and write them anew.
        dry_run: print the plan and change nothing.
        detach: go on in the background.
    """
    if to:
        wanted = ", ".join(f'"{layout}"' for layout in to)
        common = replace(common, set=(*common.set, f"export.to=[{wanted}]"))
    return _one("export", common, redo, dry_run, detach)
