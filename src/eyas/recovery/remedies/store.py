"""The ledger, the store, and everything else that stages wrote: set aside by name, made again by the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyas.base.errors import DamageFound, EyasError
from eyas.base.files import read_json, set_aside, write_json
from eyas.base.seal import is_sealed, read_seal
from eyas.base.units import counted
from eyas.pipeline.lock import hold_lock
from eyas.pipeline.mend import set_damages_aside
from eyas.pipeline.order import stage_named
from eyas.recovery.bench import Bench, Proof, Way
from eyas.recovery.doctor import diagnose
from eyas.recovery.findings import Finding
from eyas.store.doubt import unhashed_segments
from eyas.store.ledger import Ledger
from eyas.store.mend import mend_store
from eyas.store.place import remember_place
from eyas.store.repair import open_or_rebuild, set_ledger_aside
from eyas.store.samples import iter_sample_index


def _looked_again(bench: Bench, findings: Sequence[Finding], check: str) -> Proof:
    """Proof by the check that found it."""
    left = bench.still([finding.key for finding in findings], [check])
    if left:
        return Proof(False, left[0].what)
    line = diagnose(bench.scene, [check]).lines[0]
    return Proof(True, f"{check}: {line.says}")


@dataclass(frozen=True)
class MendLedger:
    """A lost or damaged ledger is set aside and rebuilt; one that misses samples lists them anew."""

    findings: tuple[Finding, ...]

    def blocked(self, bench: Bench) -> str | None:
        return None

    def ways(self, bench: Bench) -> Sequence[Way]:
        return [Way("rebuild from data/, store/ and logs/", lambda: self._rebuild(bench))]

    def _rebuild(self, bench: Bench) -> str:
        layout = bench.scene.layout
        bench.release()  # a ledger that is open cannot be set aside
        with hold_lock(layout.state, "recover"):
            damaged = [f for f in self.findings if f.code == "ledger-damaged"]
            if damaged and _unreadable(bench):
                set_ledger_aside(layout, damaged[0].what)
            ledger, adoption = open_or_rebuild(layout)
            said = "the ledger is readable"
            with ledger:
                if adoption is not None:
                    said = (
                        f"rebuilt: {len(adoption.segments)} segments, {adoption.num_samples} samples stored"
                    )
                elif is_sealed(layout.samples):
                    num_new = ledger.replace_samples(iter_sample_index(layout.samples))
                    said = f"{counted(num_new, 'sample')} listed anew"
            done = mend_store(layout, hashes=False)
        bench.attach(Ledger.open(layout.ledger, create=False))
        return "; ".join([said, *done[:3]])

    def proof(self, bench: Bench) -> Proof:
        return _looked_again(bench, self.findings, "ledger")


def _unreadable(bench: Bench) -> bool:
    try:
        with Ledger.open_read_only(bench.scene.layout.ledger) as ledger:
            return bool(ledger.integrity_faults())
    except EyasError:
        return True


@dataclass(frozen=True)
class MendStore:
    """Damaged segments set aside, whole unknown ones adopted, foreign files moved away."""

    findings: tuple[Finding, ...]

    def blocked(self, bench: Bench) -> str | None:
        return None

    def ways(self, bench: Bench) -> Sequence[Way]:
        return [Way("mend the store by names, sizes and headers", lambda: self._mend(bench))]

    def _mend(self, bench: Bench) -> str:
        layout = bench.scene.layout
        with hold_lock(layout.state, "recover"):
            done = mend_store(layout, hashes=False)
        return "; ".join(done[:5]) or "nothing was wrong any more"

    def proof(self, bench: Bench) -> Proof:
        return _looked_again(bench, self.findings, "store")


@dataclass(frozen=True)
class Scrub:
    """Every segment hashed since this boot and on this disk; what is damaged is set aside."""

    findings: tuple[Finding, ...] = ()

    def blocked(self, bench: Bench) -> str | None:
        return None

    def ways(self, bench: Bench) -> Sequence[Way]:
        return [Way("hash every segment", lambda: self._scrub(bench))]

    def _scrub(self, bench: Bench) -> str:
        layout = bench.scene.layout
        with hold_lock(layout.state, "recover"):
            # the place is written down when every hash is noted for it: a cut in between starts again
            done = mend_store(layout, hashes=True, progress=bench.scene.progress)
            ledger, _ = open_or_rebuild(layout)
            with ledger:
                remember_place(layout, ledger)
        return "; ".join(done[:5]) or "no damage"

    def proof(self, bench: Bench) -> Proof:
        scene = bench.look()
        with scene.ledger() as ledger:
            if ledger is None:
                return Proof(False, "there is no ledger to note hashes in")
            total, left = len(ledger.segments()), unhashed_segments(scene.layout, ledger)
        if left:
            return Proof(False, f"{len(left)} of {total} segments not hashed since this boot on this disk")
        moved = [f for f in diagnose(scene, ["mounts"]).findings if f.code == "store-moved"]
        said = moved[0].what if moved else f"{counted(total, 'segment')} hashed since this boot, whole"
        return Proof(not moved, said)


@dataclass(frozen=True)
class SetOutputsAside:
    """Damaged data, answers, checkpoints, reports and exports set aside; the run makes them again."""

    findings: tuple[Finding, ...]
    checks: tuple[str, ...]

    def blocked(self, bench: Bench) -> str | None:
        return None

    def ways(self, bench: Bench) -> Sequence[Way]:
        return [Way("set what is damaged aside", lambda: self._aside(bench))]

    def _aside(self, bench: Bench) -> str:
        project, layout, said = bench.scene.project, bench.scene.layout, []
        with bench.writing() as ledger:
            for part in sorted({str(f.detail["part"]) for f in self.findings}):
                try:
                    said += set_damages_aside(stage_named(part), project, ledger)
                except DamageFound as error:
                    said.append(error.what)
            for finding in self.findings:  # folders without their seal are no stage's damage
                path = layout.root / str(finding.detail["path"])
                if path.exists() and bench.still([finding.key], self.checks):
                    place = set_aside(path, layout.set_aside, finding.what)
                    said.append(f"{path.name}: set aside as {place.name}")
        return "; ".join(said) or "nothing was there any more"

    def proof(self, bench: Bench) -> Proof:
        left = bench.still([finding.key for finding in self.findings], self.checks)
        if left:
            return Proof(False, left[0].what)
        return Proof(True, f"{len(self.findings)} set aside, to be made again by the run")


@dataclass(frozen=True)
class MendStatistics:
    """data/stats.json written anew from the sealed copy beside the data."""

    findings: tuple[Finding, ...]

    def blocked(self, bench: Bench) -> str | None:
        return None

    def ways(self, bench: Bench) -> Sequence[Way]:
        return [Way("write it anew from its sealed copy", lambda: self._restore(bench))]

    def _restore(self, bench: Bench) -> str:
        layout = bench.scene.layout
        sealed = layout.prompts if is_sealed(layout.prompts) else layout.samples
        with hold_lock(layout.state, "recover"):
            values: dict[str, Any] = dict(read_json(sealed / layout.stats.name))
            if sealed == layout.prompts and is_sealed(layout.samples):
                about = read_seal(layout.samples)["about"]
                values["regenerate"] = {
                    "samples": about.get("num_samples"),
                    "tokens": about.get("num_tokens"),
                    "supervised_tokens": about.get("num_supervised"),
                }
            if layout.stats.exists():
                set_aside(layout.stats, layout.set_aside, self.findings[0].what)
            write_json(layout.stats, json.loads(json.dumps(values)))
        return f"written from {sealed.name}/{layout.stats.name}"

    def proof(self, bench: Bench) -> Proof:
        return _looked_again(bench, self.findings, "statistics")
