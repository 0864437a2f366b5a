"""The light half of extract."""

from __future__ import annotations

import contextlib
from pathlib import Path

from eyas.base.errors import DamageFound, EyasError
from eyas.base.hashing import recipe_differences
from eyas.base.layout import Layout
from eyas.base.seal import is_sealed, read_seal
from eyas.config.resolve import SAFETENSORS_DTYPE
from eyas.stages.project import Project
from eyas.stages.protocol import Damage, StageView
from eyas.stages.records import recorded_capture_recipe
from eyas.store.imports import imports_fault, imports_path, to_recheck
from eyas.store.ledger import Ledger, SegmentRecord
from eyas.store.recipe import StoreRecipe
from eyas.store.wave_record import read_waves, settled_at, waves_over

SAME_STATES = "stored samples come out the same"
"""What the log says when continuity holds; recovery waits for it."""


def capture_recipe(project: Project, fingerprint: str, dtype: str) -> StoreRecipe:
    """All that determines a capture's content besides the sample itself.

    Args:
        fingerprint: of the target's weights.
        dtype: resolved arithmetic of the target.
    """
    resolved = project.resolved
    return StoreRecipe(
        target_fingerprint=fingerprint,
        aux_layers=resolved.aux_layers,
        hidden_size=resolved.facts.hidden_size,
        compute_dtype=dtype,
        store_dtype=SAFETENSORS_DTYPE[project.config.store.dtype],
    )


def _size_damages(folder: Path, segment: SegmentRecord) -> list[Damage]:
    path = folder / segment.name
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        return [Damage(path, "in the ledger, not in the folder")]
    if num_bytes == segment.num_bytes:
        return []
    return [Damage(path, f"{num_bytes:,} bytes long, committed with {segment.num_bytes:,}")]


def _wave_detail(layout: Layout, stored: int, released: int) -> dict[str, object]:
    """Of a store with a bound: what is on disk now, what is gone, and how far the waves are."""
    detail: dict[str, object] = {"stored": stored, "released": released}
    record = read_waves(layout)
    if record is not None:
        detail |= {
            "waves_over": waves_over(layout, record.digest),
            "waves": record.num_waves,
            "captures": record.num_captures,
        }
    return detail


class ExtractStage:
    """Captures every sample that the store does not hold yet."""

    name = "extract"
    redone_when_stale = False
    work = "eyas.stages.extract.work"

    def reads(self, project: Project) -> tuple[Path, ...]:
        return (project.layout.samples, project.resolved.model)

    def writes(self, project: Project) -> tuple[Path, ...]:
        return (project.layout.store,)

    def look(self, project: Project) -> StageView:
        unit, layout = "samples", project.layout
        if not is_sealed(layout.samples):
            return StageView(self.name, "waiting", unit=unit)
        about = read_seal(layout.samples)["about"]
        total = int(about.get("num_samples", 0))
        counts, settled = {}, 0
        with contextlib.suppress(EyasError, OSError), Ledger.open_read_only(layout.ledger) as ledger:
            counts, settled = ledger.counts(), settled_at(ledger)
        stored, tokens = counts.get("stored", (0, 0))
        released, released_tokens = counts.get("released", (0, 0))
        set_aside = counts.get("set_aside", (0, 0))[0]
        captured = stored + released
        detail: dict[str, object] = {
            "tokens": tokens + released_tokens,
            "set_aside": set_aside,
            "failed": counts.get("failed", (0, 0))[0],
        }
        bounded = project.config.store.bound_bytes is not None
        detail |= _wave_detail(layout, stored, released) if bounded or released else {}
        recorded = recorded_capture_recipe(project)
        if recorded is not None:
            # weights and dtype are compared by the work, which may hash and load
            dtype = project.config.target.dtype
            kept = str(recorded.get("compute_dtype")) if dtype == "auto" else dtype
            wanted = capture_recipe(project, str(recorded.get("target_fingerprint")), kept)
            differences = tuple(recipe_differences(recorded, wanted.as_dict()))
            if differences:
                return StageView(self.name, "stale", captured, total, unit, detail, differences)
        known = sum(samples for samples, _ in counts.values())
        left = counts.get("pending", (0, 0))[0] + counts.get("in_flight", (0, 0))[0]
        left += counts.get("failed", (0, 0))[0]
        with contextlib.suppress(DamageFound):
            detail["imported_unchecked"] = len(to_recheck(layout))
        # released samples are needed again when training began anew or fell back, or when the bound is gone
        left += released if not bounded else settled != detail.get("waves_over", 0)
        if counts and known >= total and left == 0 and not detail.get("imported_unchecked"):
            return StageView(self.name, "done", captured, total, unit, detail)
        return StageView(self.name, "partial" if captured else "pending", captured, total, unit, detail)

    def damages(self, project: Project, *, deep: bool) -> list[Damage]:
        layout = project.layout
        why = imports_fault(layout)
        damages = [Damage(imports_path(layout), why)] if why else []
        if deep:
            from eyas.store import scrub  # numpy is loaded only when it is needed

            found = scrub.deep(layout)
            return damages + [Damage(fault.path, fault.detail) for fault in found if fault.is_damage]
        segments: list[SegmentRecord] = []
        with contextlib.suppress(EyasError), Ledger.open_read_only(layout.ledger) as ledger:
            segments = ledger.segments()
        damages += [damage for segment in segments for damage in _size_damages(layout.segments, segment)]
        if segments and recorded_capture_recipe(project) is None:
            damages.append(Damage(layout.store_recipe, "missing or not readable"))
        return damages
