"""From findings to todos, in the order in which recovery has to go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.recovery.bench import Remedy
from eyas.recovery.doctor import Diagnosis, check_of
from eyas.recovery.findings import Finding
from eyas.recovery.remedies.files import HashWeights, RestoreFile
from eyas.recovery.remedies.processes import StopProcess
from eyas.recovery.remedies.resume import Continuity, Resume, ServedBy, Watch, stages_left
from eyas.recovery.remedies.servers import DumpsAside, SetPatch, StopServers
from eyas.recovery.remedies.services import StopService
from eyas.recovery.remedies.storage import ByHand
from eyas.recovery.remedies.store import MendLedger, MendStatistics, MendStore, Scrub, SetOutputsAside
from eyas.recovery.scene import Scene

_BY_HAND = {  # code to group
    "filesystem-read-only": "storage",
    "store-not-mounted": "storage",
    "disk-full": "storage",
    "process-stuck": "processes",
    "gpu-held": "gpus",
    "file-source-lost": "files",
    "source-missing": "files",
    "weights-missing": "weights",
    "weights-changed": "weights",
    "segment-too-new": "store",
    "recipe-changed": "recipe",
    "patch-drifted": "patch",
    "patch-missing": "patch",
    "server-unreachable": "server",
    "server-list-damaged": "server",
}
_OUTPUTS = ("samples-damaged", "answers-damaged", "drafter-damaged", "evaluation-damaged", "export-damaged")
_STORE = (
    "segment-missing",
    "segment-damaged",
    "segment-of-other-recipe",
    "segment-disagrees",
    "segment-unknown",
    "store-recipe-damaged",
    "foreign-file",
)
_LEDGER = ("ledger-missing", "ledger-damaged", "samples-missing")
_SERVERS = ("server-ended", "server-silent", "server-left", "server-wrong-model")
_PATCHES = ("patch-not-applied", "patch-left")
_UNSURE = ("store-unhashed", "store-changed", "store-moved", "segment-found-damaged")
_DOUBTS = ("attempt-killed", *_UNSURE, *_STORE, *_LEDGER)
"""After these everything in the store is hashed, and the weights as well."""

GROUPS = (
    "storage", "processes", "gpus", "ledger", "outputs", "store", "scrub", "weights", "patch", "files",
    "dumps", "server", "recipe", "resume", "canary", "continuity", "watch",
)  # fmt: skip
"""The order of recovery; a todo's group decides where it stands."""
_NEEDS = {
    "processes": ("storage",),
    "gpus": (),
    "ledger": ("storage", "processes"),
    "outputs": ("ledger",),
    "store": ("ledger",),
    "scrub": ("store", "ledger"),
    "files": ("storage",),
    "statistics": ("ledger",),
    "dumps": ("processes",),
    "server": ("gpus", "weights", "patch", "files", "dumps"),
    "resume": GROUPS[: GROUPS.index("resume")],
    "canary": ("resume",),
    "continuity": ("resume", "canary"),
    "watch": ("resume",),
}


@dataclass(frozen=True)
class Step:
    """A todo with what carries it out.

    Attributes:
        key: its id within a phase.
        group: of `GROUPS`.
        depends_on: keys of steps that have to be completed first.
    """

    key: str
    group: str
    content: str
    priority: str
    remedy: Remedy
    depends_on: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def notes(diagnosis: Diagnosis) -> list[Finding]:
    """Findings that no todo is made of: they can wait, and a person decides."""
    mended = {*_BY_HAND, *_OUTPUTS, *_DOUBTS, "statistics-damaged", "process-left", "writer-silent"}
    mended |= {
        *_SERVERS,
        *_PATCHES,
        "dumps-stale",
        "service-holds-gpus",
        "service-at-boot",
        "file-missing",
        "file-changed",
    }
    return [finding for finding in diagnosis.findings if finding.code not in mended]


def make_plan(scene: Scene, diagnosis: Diagnosis, since: str) -> list[Step]:
    """The steps that bring the project back, each after those it needs; empty when nothing is to be done.

    Args:
        since: attempts of the pipeline that began at or after this time are the resumed run.
    """
    steps = _of_findings(diagnosis)
    codes = {finding.code for finding in diagnosis.findings}
    doubtful = bool(codes & set(_DOUBTS))
    if doubtful and scene.layout.segments.is_dir():
        hashed = tuple(finding for finding in diagnosis.findings if finding.code in _UNSURE)
        text = "Hash the whole store; set aside what is damaged"
        steps.append(Step("scrub", "scrub", text, "high", Scrub(hashed), findings=hashed))
        if not any(step.group == "weights" for step in steps):
            text = "Compare the target's weights with what the states were captured with"
            steps.append(Step("weights", "weights", text, "high", HashWeights()))
    left = stages_left(scene)
    if left or steps:
        steps += [
            Step("resume", "resume", "Start eyas run in the background", "high", Resume(since)),
            *_canary(scene, since, left),
            Step(
                "continuity",
                "continuity",
                "See that stored samples, captured again, come out the same",
                "high",
                Continuity(since),
            ),
            Step("watch", "watch", "Watch the first new samples", "medium", Watch(since)),
        ]
    steps.sort(key=lambda step: GROUPS.index(step.group))
    return [_with_needs(step, steps) for step in steps]


def _canary(scene: Scene, since: str, left: Sequence[str]) -> list[Step]:
    """Where servers capture: they have to be proven before anything is stored."""
    if scene.project.config.target.kind == "local" or "extract" not in left:
        return []
    text = "See the run's servers proven by a real request (canary)"
    return [Step("canary", "canary", text, "high", ServedBy(since))]


def _with_needs(step: Step, steps: Sequence[Step]) -> Step:
    wanted = _NEEDS.get(step.group, ())
    keys = tuple(other.key for other in steps if other.group in wanted and other.priority != "low")
    if step.key == "statistics":
        keys = tuple(key for key in keys if key != "statistics")
    return Step(step.key, step.group, step.content, step.priority, step.remedy, keys, step.findings)


def _of_findings(diagnosis: Diagnosis) -> list[Step]:
    steps: list[Step] = []
    grouped: dict[str, list[Finding]] = {}
    for finding in diagnosis.findings:
        code, one = finding.code, (finding,)
        if code in _BY_HAND:
            remedy: Remedy = ByHand(one, check_of(finding, diagnosis))
            steps.append(_step(finding.key, _BY_HAND[code], finding.what, remedy, one))
        elif code in ("writer-silent", "process-left"):
            remedy = StopProcess(finding, check_of(finding, diagnosis))
            steps.append(
                _step(finding.key, "processes", f"End {finding.subject}: {finding.what}", remedy, one)
            )
        elif code in ("service-holds-gpus", "service-at-boot"):
            text = f"Stop, disable and mask {finding.subject}: {finding.what}"
            priority = "high" if finding.severity == "failed" else "low"
            key = f"service:{finding.subject}"
            steps.append(_step(key, "gpus", text, StopService(finding), one, priority))
        elif code in ("file-missing", "file-changed"):
            text = f"Bring {finding.subject} back from its source"
            steps.append(_step(f"file:{finding.subject}", "files", text, RestoreFile(finding), one))
        elif code in _PATCHES:
            priority = "low" if code == "patch-left" else "high"
            verb = "Restore" if code == "patch-left" else "Apply"
            text = f"{verb} the edit {finding.subject}: {finding.what}"
            steps.append(_step(finding.key, "patch", text, SetPatch(finding), one, priority))
        elif code in _SERVERS:
            grouped.setdefault("servers", []).append(finding)
        elif code == "dumps-stale":
            grouped.setdefault("dumps", []).append(finding)
        elif code in _LEDGER:
            grouped.setdefault("ledger", []).append(finding)
        elif code in _STORE:
            grouped.setdefault("store", []).append(finding)
        elif code in _OUTPUTS:
            grouped.setdefault("outputs", []).append(finding)
        elif code == "statistics-damaged":
            steps.append(
                _step(
                    "statistics",
                    "outputs",
                    f"Write the statistics anew: {finding.what}",
                    MendStatistics(one),
                    one,
                    "medium",
                )
            )
    for name, found in grouped.items():
        steps.append(_grouped(name, tuple(found), diagnosis))
    return steps


def _grouped(name: str, found: tuple[Finding, ...], diagnosis: Diagnosis) -> Step:
    what = found[0].what + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")
    if name == "ledger":
        return _step("ledger", "ledger", f"Mend the ledger: {what}", MendLedger(found), found)
    if name == "store":
        return _step("store", "store", f"Mend the store: {what}", MendStore(found), found)
    if name == "servers":
        return _step(name, "processes", f"Stop servers of ours: {what}", StopServers(found), found)
    if name == "dumps":
        return _step(name, "dumps", f"Set stale dumps aside: {what}", DumpsAside(found), found, "medium")
    checks = tuple(sorted({check_of(finding, diagnosis) for finding in found}))
    return _step(
        "outputs", "outputs", f"Set damaged outputs aside: {what}", SetOutputsAside(found, checks), found
    )


def _step(
    key: str, group: str, content: str, remedy: Remedy, findings: tuple[Finding, ...], priority: str = "high"
) -> Step:
    return Step(key, group, content, priority, remedy, (), findings)
