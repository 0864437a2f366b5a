"""``eyas store ls | repair | compact | gc``: the store's own upkeep."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from eyas.base.clock import boot_id
from eyas.base.errors import ConfigError, DamageFound, DiskFull
from eyas.base.layout import Layout
from eyas.base.stop import StopFlag
from eyas.base.storage import named_storage_errors
from eyas.base.units import counted, format_bytes, format_count, parse_bytes
from eyas.cli.common import Common
from eyas.cli.output import next_command, note, print_json, table
from eyas.cli.progress import listener
from eyas.pipeline.lock import hold_lock
from eyas.pipeline.signals import stop_on_signals
from eyas.stages.project import Project
from eyas.store.ledger import Ledger

_COMMON = Common()


@contextmanager
def writing(layout: Layout, verb: str) -> Iterator[StopFlag]:
    """The project lock, held, signals that ask for a stop between two steps, and errors of the disk named."""
    stop = StopFlag()
    with named_storage_errors(layout.root), hold_lock(layout.state, verb), stop_on_signals(stop):
        yield stop


def refuse_bound(project: Project, why: str) -> None:
    """Raise ConfigError when the store has a bound."""
    if project.config.store.bound_bytes is not None:
        raise ConfigError(
            "this cannot be done to a store with a bound",
            where="store.max_bytes of eyas.toml",
            why=why,
            hint="take store.max_bytes out of eyas.toml for a store that keeps everything",
        )


def ls(*, common: Common = _COMMON) -> int:
    """List segments: samples, tokens, bytes, when they were last hashed, and their state."""
    from eyas.store.ledger_moves import segment_uses
    from eyas.store.place import mount_identity

    layout = common.open().layout
    with Ledger.open_read_only(layout.ledger) as ledger:
        records, released = ledger.segments(), ledger.segments(state="released")
        used = {use.name: use.num_used for use in segment_uses(ledger)}
    here = (boot_id(), mount_identity(layout.segments) if layout.segments.is_dir() else "")
    listed = []
    for record in records:
        present = (layout.segments / record.name).is_file()
        held = "present" if used.get(record.name) else "superseded"
        now = (record.verified_boot, record.verified_mount) == here
        listed.append(
            {
                "name": record.name,
                "samples": used.get(record.name, 0),
                "written_samples": record.num_samples,
                "tokens": record.num_tokens,
                "bytes": record.num_bytes,
                "committed_at": record.committed_at,
                "verified_at": record.verified_at,
                "verified_since_boot": now,
                "state": held if present else "missing",
            }
        )
    if common.json:
        gone = {"segments": len(released), "samples": sum(record.num_samples for record in released)}
        print_json({"segments": listed, "released": gone})
        return 0
    columns = ["segment", "samples", "tokens", "bytes", "hashed", "state"]
    table(None, columns, [_row(entry) for entry in listed])
    total = sum(record.num_bytes for record in records)
    note(
        f"{counted(len(records), 'segment')}, {counted(sum(used.values()), 'sample')}, {format_bytes(total)}"
    )
    if released:
        samples = counted(sum(record.num_samples for record in released), "sample")
        note(f"{len(released)} more with {samples} are trained on and released (store.max_bytes)")
    missing = any(entry["state"] == "missing" for entry in listed)
    next_command(f"eyas store repair{common.suffix}" if missing else None)
    return 0


def _row(entry: dict[str, object]) -> list[object]:
    when = str(entry["verified_at"] or "not since it was written").partition(".")[0].replace("T", " ")
    if entry["verified_at"]:
        when += ", this boot" if entry["verified_since_boot"] else ", before this boot or mount"
    num_bytes = entry["bytes"]
    shown = format_bytes(num_bytes) if isinstance(num_bytes, int) else "-"
    samples, tokens = (format_count(int(str(entry[key]))) for key in ("samples", "tokens"))
    return [entry["name"], samples, tokens, shown, when, entry["state"]]


def repair(
    *, quick: bool = False, again: bool = False, dry_run: bool = False, common: Common = _COMMON
) -> int:
    """Set damaged segments aside, make their samples pending, adopt whole segments, mend the ledger.

    Nothing is deleted. Hashes every segment that was not hashed since this boot and mount.

    Args:
        quick: look at names, sizes and headers only.
        again: hash also what was hashed since this boot and mount.
        dry_run: print what would be done and change nothing.
    """
    from eyas.store.mend import mend_store, would_do
    from eyas.store.place import require_mounted
    from eyas.store.scrub import deep
    from eyas.store.scrub import quick as quick_scrub

    layout = common.open().layout
    progress = listener("repair", common.json)
    if dry_run:
        require_mounted(layout)
        faults = quick_scrub(layout) if quick else deep(layout, progress=progress)
        rows = [[str(f.path.relative_to(layout.root)), f.detail, todo] for f, todo in would_do(faults)]
        if common.json:
            print_json({"would": [{"what": w, "why": y, "do": d} for w, y, d in rows]})
            return 0
        if rows:
            table(None, ["what", "why", "would be"], rows)
        next_command(f"eyas store repair{common.suffix}" if rows else None)
        return 0
    with writing(layout, "store repair"):
        done = mend_store(layout, hashes=not quick, again=again, progress=progress)
    if common.json:
        print_json({"done": done})
        return 0
    for line in done:
        print(line)
    next_command(f"eyas run{common.suffix}" if done else None)
    return 0


def compact(*, dry_run: bool = False, common: Common = _COMMON) -> int:
    """Merge segments below 64 MiB into ones of up to 128 MiB; eyas store gc removes the small ones then.

    Args:
        dry_run: print what would be merged and change nothing.
    """
    from eyas.store.compact import compact as merge
    from eyas.store.compact import plan_groups
    from eyas.store.ledger_moves import segment_uses
    from eyas.store.place import require_place

    project = common.open()
    layout = project.layout
    refuse_bound(project, "compacting joins samples that are released at different times")
    if dry_run:
        with Ledger.open_read_only(layout.ledger) as ledger:
            groups = plan_groups(segment_uses(ledger))
        rows = [[len(group), format_bytes(sum(use.num_bytes for use in group))] for group in groups]
        if common.json:
            print_json({"would": [[use.name for use in group] for group in groups]})
            return 0
        table(None, ["segments", "become one of"], rows)
        next_command(f"eyas store compact{common.suffix}" if groups else None)
        return 0
    with writing(layout, "store compact") as stop, Ledger.open(layout.ledger, create=False) as ledger:
        require_place(layout, ledger)
        needed = sum(use.num_bytes for group in plan_groups(segment_uses(ledger)) for use in group)
        _require_room(layout, needed, parse_bytes(project.config.disk.reserve))
        result = merge(layout, ledger, progress=listener("compact", common.json), stop=stop)
    if common.json:
        merged = sum(len(group) for group in result.groups)
        faults = [fault.as_dict() for fault in result.faults]
        print_json({"merged": merged, "into": result.segments, "bytes": result.num_bytes, "faults": faults})
    else:
        merged = sum(len(group) for group in result.groups)
        note(f"{counted(merged, 'segment')} became {len(result.segments)}, {format_bytes(result.num_bytes)}")
        for fault in result.faults:
            note(f"left alone: {fault.path.name}: {fault.detail}")
        then = "repair" if result.faults else "gc" if result.groups else None
        next_command(f"eyas store {then}{common.suffix}" if then else None)
    return DamageFound.exit_code if result.faults else 0


def _require_room(layout: Layout, num_bytes: int, reserve_bytes: int) -> None:
    free = shutil.disk_usage(layout.root).free
    if num_bytes + reserve_bytes > free:
        raise DiskFull(
            f"compacting writes {format_bytes(num_bytes)} before anything can be removed",
            where=layout.segments,
            why=f"{format_bytes(free)} is free, {format_bytes(reserve_bytes)} stay free",
            hint="free space, then: eyas store compact",
        )


def gc(*, yes: bool = False, dry_run: bool = False, common: Common = _COMMON) -> int:
    """Remove superseded segments, what killed processes left unfinished, and checkpoints beyond those kept.

    Anything else stays. Without --yes it only lists.

    Args:
        yes: remove what is listed.
        dry_run: list and change nothing, as without --yes.
    """
    from eyas.store.clear import find_removable, remove
    from eyas.store.place import require_place

    project = common.open()
    layout, keep = project.layout, project.config.train.keep_checkpoints
    if dry_run or not yes:
        with Ledger.open_read_only(layout.ledger) as ledger:
            found = find_removable(layout, ledger, keep)
    else:
        with writing(layout, "store gc") as stop, Ledger.open(layout.ledger, create=False) as ledger:
            require_place(layout, ledger)
            found = find_removable(layout, ledger, keep)
            found = remove(layout, ledger, found, listener("gc", common.json), stop)
    removed = yes and not dry_run
    if common.json:
        entries = [
            {
                "path": str(item.path.relative_to(layout.root)),
                "kind": item.kind,
                "bytes": item.num_bytes,
                "why": item.why,
            }
            for item in found
        ]
        print_json({"removed" if removed else "would_remove": entries})
        return 0
    rows = [
        [str(item.path.relative_to(layout.root)), item.kind, format_bytes(item.num_bytes), item.why]
        for item in found
    ]
    if rows:
        table(None, ["what", "kind", "bytes", "why"], rows)
    total = format_bytes(sum(item.num_bytes for item in found))
    verdict = "removed" if removed else "may be removed"
    note(f"{counted(len(found), 'thing')} {verdict}, {total}" if found else f"nothing {verdict}")
    next_command(f"eyas store gc --yes{common.suffix}" if found and not removed else None)
    return 0
