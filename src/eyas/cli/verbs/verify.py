"""``eyas verify``: is everything still what was written?"""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from eyas.base.errors import DamageFound, UsageError
from eyas.base.units import counted, format_count
from eyas.cli.common import Common
from eyas.cli.output import next_command, note, print_json, table
from eyas.cli.progress import listener
from eyas.pipeline.verify import Finding, Verification, verify_project

_MOST_IDS_SHOWN = 3


def verify(
    *,
    deep: bool = False,
    sample: Annotated[str | None, Parameter(name="--sample")] = None,
    seed: int = 0,
    again: bool = False,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Compare store, samples, answers, vocabulary, checkpoints, exports and reports with what was written.

    Quick by default: names, sizes, headers, and the ledger against the folder. Changes no file.

    Args:
        deep: hash every byte; segments that were whole since this boot and mount are skipped, so it resumes.
        sample: hash only a share of the segments, as in 5%; implies --deep.
        seed: picks another share.
        again: hash also what was hashed since this boot and mount.
    """
    share = None if sample is None else parse_share(sample)
    result = verify_project(
        common.open(),
        deep=deep or share is not None,
        share=share,
        seed=seed,
        again=again,
        progress=listener("verify", common.json),
    )
    if common.json:
        print_json(as_dict(result))
    else:
        _show(result)
        next_command(f"{command}{common.suffix}" if (command := mend(result.findings)) else None)
    return DamageFound.exit_code if result.damage else 0


def parse_share(text: str) -> float:
    """``5%`` or ``0.05`` as a share above 0 and at most 1. Raises UsageError."""
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise UsageError(f"--sample {text} is no share", hint="eyas verify --sample 5%")
    return number


def as_dict(result: Verification) -> dict[str, object]:
    """The result as ``--json`` prints it."""
    return {
        "deep": result.deep,
        "segments": result.num_segments,
        "hashed": result.num_hashed,
        "skipped": result.num_skipped,
        "damaged": len(result.damage),
        "findings": [finding.as_dict() for finding in result.findings],
        "notes": result.notes,
        "next": mend(result.findings),
    }


def mend(findings: list[Finding]) -> str | None:
    """The command that mends the findings; None when there is nothing to mend."""
    if any(finding.part == "store" and finding.is_damage for finding in findings):
        return "eyas store repair"
    if any(finding.is_damage for finding in findings):
        return "eyas run"
    return "eyas store repair" if any(finding.kind == "unknown" for finding in findings) else None


def _show(result: Verification) -> None:
    if result.findings:
        table(None, ["what", "kind", "why", "samples"], [_row(finding) for finding in result.findings])
    for line in result.notes:
        note(line)
    if result.deep:
        skipped = ""
        if result.num_skipped:
            skipped = f", {format_count(result.num_skipped)} hashed before since this boot"
        of = f"{format_count(result.num_hashed)} of {counted(result.num_segments, 'segment')}"
        note(f"{of} hashed{skipped}; {_verdict(result)}")
    else:
        note(f"names, sizes and headers of {counted(result.num_segments, 'segment')}; {_verdict(result)}")


def _verdict(result: Verification) -> str:
    if not result.damage:
        return "no damage"
    samples = {sample for finding in result.damage for sample in finding.sample_ids}
    inside = f", {counted(len(samples), 'sample')} in them" if samples else ""
    return f"{format_count(len(result.damage))} damaged{inside}"


def _row(finding: Finding) -> list[str]:
    ids = [sample[:12] for sample in finding.sample_ids[:_MOST_IDS_SHOWN]]
    more = len(finding.sample_ids) - len(ids)
    shown = " ".join(ids) + (f" and {more} more" if more else "")
    return [finding.place, finding.kind if finding.is_damage else f"({finding.kind})", finding.detail, shown]
