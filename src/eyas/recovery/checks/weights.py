"""Are the target's weights there, and the ones that states were captured with?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from eyas.base.errors import TargetError
from eyas.base.units import counted, format_bytes
from eyas.config.resolve import model_folder
from eyas.recovery.findings import Check, Finding, Line, State, verdict
from eyas.recovery.scene import Scene
from eyas.stages.records import recorded_capture_recipe
from eyas.targets.fingerprint import weights_fingerprint
from eyas.targets.weight_files import weight_files


@dataclass(frozen=True)
class WeightFacts:
    """Weight files, and what is known of their content.

    Attributes:
        missing: why they cannot be used; None when they are there.
        resized: files that have another size than when they were hashed.
        touched: files that were written to since they were hashed.
        found, recorded: fingerprints of now (None: not hashed in this look) and of the store.
    """

    folder: Path
    missing: TargetError | None
    num_files: int = 0
    num_bytes: int = 0
    resized: tuple[str, ...] = ()
    touched: tuple[str, ...] = ()
    unhashed: int = 0
    found: str | None = None
    recorded: str | None = None


def look(scene: Scene) -> WeightFacts:
    folder = model_folder(scene.project.config, scene.layout.root)
    recorded = (recorded_capture_recipe(scene.project) or {}).get("target_fingerprint")
    try:
        files = weight_files(folder)
        _ = scene.project.resolved  # config.json of the target is needed as well
    except TargetError as error:
        return WeightFacts(folder, error)
    stamps = _stamps(scene.project.fingerprint_cache)
    resized, touched, unhashed = [], [], 0
    for path in files:
        known, status = stamps.get(str(path.resolve())), path.stat()
        if known is None:
            unhashed += 1
        elif known[0] != status.st_size:
            resized.append(path.name)
        elif known[1:] != [status.st_mtime_ns, status.st_ino]:
            touched.append(path.name)
    found = weights_fingerprint(folder, None).hash if scene.deep else None
    num_bytes = sum(path.stat().st_size for path in files)
    return WeightFacts(
        folder, None, len(files), num_bytes, tuple(resized), tuple(touched), unhashed, found,
        None if recorded is None else str(recorded),
    )  # fmt: skip


def _stamps(cache: Path) -> dict[str, list[int]]:
    """Size, time and inode of each weight file when it was hashed."""
    try:
        files = json.loads(cache.read_text(encoding="utf-8"))["files"]
        return {str(name): [int(n) for n in entry["stamp"]] for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def judge(scene: Scene, facts: WeightFacts) -> Line:
    place = str(facts.folder)
    if facts.missing is not None:
        error = facts.missing
        finding = Finding(
            "weights-missing",
            place,
            "failed",
            error.what,
            (error.why or place,),
            mend=error.hint or "bring it back",
        )
        return verdict("weights", [finding], "")
    said = f"{counted(facts.num_files, 'file')}, {format_bytes(facts.num_bytes)}"
    changed = facts.recorded is not None and facts.found not in (None, facts.recorded)
    if changed or facts.resized:
        evidence = [f"{name}: another size than when it was hashed" for name in facts.resized]
        evidence += [f"hash {facts.found}, states were captured with {facts.recorded}"] if changed else []
        finding = Finding(
            "weights-changed",
            place,
            "failed",
            f"the target's weights are not those that states were captured with ({evidence[0]})",
            tuple(evidence),
            mend=f"bring the old files back to {place}, or: eyas run --redo extract",
        )
        return verdict("weights", [finding], "")
    state: State = "ok"
    if facts.found is not None:
        fine = (
            f"{said}: every hash as captured with"
            if facts.recorded
            else f"{said}: hashed, nothing captured yet"
        )
    elif facts.touched or facts.unhashed:
        state = "unknown"
        count = len(facts.touched) + facts.unhashed
        fine = f"{said}: {count} of them not hashed since they were written (eyas doctor --deep)"
    else:
        fine = f"{said}: not touched since they were hashed"
    return Line("weights", state, fine, (place, *(f"{name}: touched" for name in facts.touched)))


CHECK = Check("weights", look, judge)
