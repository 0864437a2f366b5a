"""``eyas doctor``: what survived, what is damaged, what to do."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from eyas.base.units import format_seconds
from eyas.cli.common import Common
from eyas.cli.hints import placed
from eyas.cli.main import PROJECT_VERBS
from eyas.cli.output import folded, next_command, note, print_json
from eyas.cli.progress import listener
from eyas.hosts.declared import declared, open_host
from eyas.hosts.host import Here, Host
from eyas.recovery.doctor import Diagnosis, diagnose
from eyas.recovery.findings import Line
from eyas.recovery.scene import Scene
from eyas.report.status import project_status

_INDENT = 20


def doctor(
    *,
    verbose: Annotated[bool, Parameter(name=["--verbose", "-v"])] = False,
    deep: bool = False,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Look at the project and its machine without changing anything; one line a check.

    ok, warn, damage and failed say what was found; unknown was not looked at, skipped does not apply.
    The exit code is that of the worst finding: 0, 12 (disk), 13 (server) or 14.

    Args:
        verbose: show the evidence behind each line, and the store segment by segment.
        deep: hash the store, all sealed folders and the target's weights as well.
    """
    common = common.as_last_run()
    project = common.open()
    host: Host = Here()
    if common.host is not None:  # eyas is not there: the machine can still be looked at
        host = open_host(declared(project.config, common.host))
    found = diagnose(Scene(project, host, deep=deep, progress=listener("doctor", common.json)))
    if common.json:
        print_json(found.as_dict())
        return found.exit_code
    print("\n".join(folded(line, _INDENT) for line in render(found, verbose, common.suffix)))
    note(f"\n{summary(found)}")
    if found.findings or not host.is_here:
        next_command(next_of(found, common.suffix))
    else:  # nothing to mend; there may be work that is left
        next_command(project_status(project, common.suffix).next_command)
    return found.exit_code


def render(found: Diagnosis, verbose: bool, suffix: str = "") -> list[str]:
    """The lines of the screen; ``suffix`` is what a suggested command needs to find the project."""
    lines = []
    for line in found.lines:
        lines.append(f"{line.state:<8}{line.check:<12}{line.says}")
        lines += [f"{'':{_INDENT}}{finding.what}" for finding in line.findings[1:4]]
        lines += [f"{'':{_INDENT}}-> {placed(mend, suffix, PROJECT_VERBS)}" for mend in _mends(line)]
        if verbose:
            seen = dict.fromkeys([*line.evidence, *(text for f in line.findings for text in f.evidence)])
            lines += [f"{'':{_INDENT}}| {text}" for text in seen]
    return lines


def _mends(line: Line) -> list[str]:
    return list(dict.fromkeys(finding.mend for finding in line.findings))


def summary(found: Diagnosis) -> str:
    """``21 checks in 0.9 s: 18 ok, 2 skipped, 1 damage``."""
    counts: dict[str, int] = {}
    for line in found.lines:
        counts[line.state] = counts.get(line.state, 0) + 1
    parts = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"{len(found.lines)} checks in {format_seconds(found.seconds)}: {parts}"


def next_of(found: Diagnosis, suffix: str) -> str | None:
    """The one next command: recovery when something is to be mended."""
    if not found.findings:
        return None
    mends = list(dict.fromkeys(finding.mend for finding in found.findings))
    if len(mends) == 1 and mends[0].startswith("eyas "):
        return placed(mends[0], suffix, PROJECT_VERBS)
    return f"eyas recover --dry-run{suffix}"
