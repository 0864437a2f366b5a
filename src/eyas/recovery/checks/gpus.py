"""GPU memory by process: ours or not, idle or busy, and which unit or container it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.base.units import counted, format_bytes
from eyas.hosts.gpus import Gpu
from eyas.hosts.processes import Owner, ProcessInfo, owner_of
from eyas.hosts.units import Unit, show_unit
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene

HELD_SHARE = 0.05
"""A process that holds less of a GPU's memory than this is no obstacle (a desktop, a monitor)."""
IDLE_PERCENT = 5


@dataclass(frozen=True)
class GpuHolder:
    """A process that is not ours on some GPUs."""

    pid: int
    process: ProcessInfo | None
    owner: Owner
    unit: Unit | None
    gpus: tuple[int, ...]
    used_bytes: int


@dataclass(frozen=True)
class GpuFacts:
    """All GPUs (None: no driver) and foreign holders."""

    gpus: tuple[Gpu, ...] | None
    holders: tuple[GpuHolder, ...]


def look(scene: Scene) -> GpuFacts:
    gpus = scene.gpu_list
    if not gpus:
        return GpuFacts(None if gpus is None else (), ())
    held: dict[int, list[tuple[Gpu, int]]] = {}
    for gpu in gpus:
        for user in gpu.users:
            used = gpu.used_bytes if user.used_bytes is None else user.used_bytes
            if user.pid not in scene.own_pids and used > HELD_SHARE * gpu.total_bytes:
                held.setdefault(user.pid, []).append((gpu, used))
    holders = []
    for pid, entries in sorted(held.items()):
        owner = owner_of(scene.host, pid)
        unit = None if owner.unit is None else show_unit(scene.host, owner.unit, owner.user_unit)
        holders.append(
            GpuHolder(
                pid,
                scene.processes.get(pid),
                owner,
                unit,
                tuple(gpu.index for gpu, _ in entries),
                sum(used for _, used in entries),
            )
        )
    return GpuFacts(tuple(gpus), tuple(holders))


def judge(scene: Scene, facts: GpuFacts) -> Line:
    if facts.gpus is None:
        return Line("gpus", "skipped", "no GPU driver on this machine")
    if not facts.gpus:
        return Line("gpus", "skipped", "the driver knows no GPU")
    used, total = sum(g.used_bytes for g in facts.gpus), sum(g.total_bytes for g in facts.gpus)
    evidence = [
        f"GPU {g.index} {g.name}: {format_bytes(g.used_bytes)} of {format_bytes(g.total_bytes)} used"
        + ("" if g.busy_percent is None else f", {g.busy_percent}% busy")
        for g in facts.gpus
    ]
    fine = f"{counted(len(facts.gpus), 'GPU')}, {format_bytes(used)} of {format_bytes(total)} used"
    if scene.project.config.target.device == "cpu":
        return Line("gpus", "ok", f"{fine}; this project runs on the CPU", tuple(evidence))
    return verdict("gpus", _findings(scene, facts), fine, evidence)


def _findings(scene: Scene, facts: GpuFacts) -> list[Finding]:
    assert facts.gpus is not None
    units: dict[str, list[GpuHolder]] = {}
    findings = []
    for holder in facts.holders:
        if holder.owner.unit is not None:
            units.setdefault(holder.owner.unit, []).append(holder)
            continue
        words = holder.process.words if holder.process is not None else "command not visible"
        container = f", container {holder.owner.container}" if holder.owner.container else ""
        findings.append(
            Finding(
                "gpu-held",
                f"process {holder.pid}",
                "failed",
                f"process {holder.pid} holds {_amount(facts, [holder])}{container}",
                (words, _busy(facts, holder)),
                mend=f"if it may end: kill {holder.pid}; then: eyas recover",
                detail={"pid": holder.pid, "gpus": list(holder.gpus), "container": holder.owner.container},
            )
        )
    for name, holders in units.items():
        unit, owner = holders[0].unit, holders[0].owner
        boot = ", starts at boot" if unit is not None and unit.starts_at_boot else ""
        answer = f"it is {unit.active}{boot}" if unit is not None else "systemctl does not answer"
        evidence = [
            f"process {h.pid}: {h.process.words if h.process else 'command not visible'}" for h in holders
        ]
        findings.append(
            Finding(
                "service-holds-gpus",
                name,
                "failed",
                f"{name} holds {_amount(facts, holders)}",
                (*evidence, f"{name}: {answer}", *(_busy(facts, h) for h in holders)),
                mend="eyas recover --yes-stop-services",
                detail={
                    "unit": name,
                    "user": owner.user_unit,
                    "container": owner.container,
                    "pids": [h.pid for h in holders],
                    "pgids": sorted({h.process.pgid for h in holders if h.process is not None}),
                    "ages": {str(h.pid): h.process.age_seconds for h in holders if h.process is not None},
                    "gpus": sorted({index for h in holders for index in h.gpus}),
                },
            )
        )
    return findings


def _amount(facts: GpuFacts, holders: list[GpuHolder]) -> str:
    assert facts.gpus is not None
    indexes = {index for holder in holders for index in holder.gpus}
    used = format_bytes(sum(holder.used_bytes for holder in holders))
    which = f"all {len(facts.gpus)} GPUs" if len(indexes) == len(facts.gpus) else f"{len(indexes)} GPUs"
    return f"{used} on {which if len(facts.gpus) > 1 else 'the GPU'}"


def _busy(facts: GpuFacts, holder: GpuHolder) -> str:
    assert facts.gpus is not None
    busy = [g.busy_percent for g in facts.gpus if g.index in holder.gpus and g.busy_percent is not None]
    if not busy:
        return "whether its GPUs are busy is not known"
    return f"its GPUs are {'idle' if max(busy) < IDLE_PERCENT else f'{max(busy)}% busy'}"


CHECK = Check("gpus", look, judge, of_machine=True)
