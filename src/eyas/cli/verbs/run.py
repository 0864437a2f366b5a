"""``eyas run``: everything that is left, in order."""

from __future__ import annotations

from eyas.base.errors import UsageError
from eyas.cli.common import Common
from eyas.cli.execute import execute
from eyas.pipeline.order import STAGES


def run_all(
    *,
    redo: tuple[str, ...] = (),
    until: str | None = None,
    retry_failed: bool = False,
    dry_run: bool = False,
    detach: bool = False,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Do everything that is left; resumes after any stop or crash.

    Args:
        redo: set a stage's output aside and make it anew; may be repeated.
        until: end after this stage.
        retry_failed: take up samples again that were set aside after their retries.
        dry_run: print the plan and change nothing.
        detach: go on in the background, also when the terminal closes.
    """
    names = [stage.name for stage in STAGES]
    for name in (*redo, *([until] if until else [])):
        if name not in names:
            raise UsageError(f"no stage is called {name!r}", hint=f"stages: {', '.join(names)}")
    stages = STAGES[: names.index(until) + 1] if until else STAGES
    return execute("run", stages, common, redo, retry_failed, dry_run, detach)
