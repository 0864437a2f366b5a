"""What a check says: a line with a state, and the findings behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from eyas.base.errors import EyasError
from eyas.recovery.scene import Scene

State = Literal["ok", "skipped", "unknown", "warn", "damage", "failed"]
Severity = Literal["warn", "damage", "failed"]
STATES: tuple[State, ...] = ("ok", "skipped", "unknown", "warn", "damage", "failed")
"""From best to worst."""
DAMAGE_EXIT = 14
DISK_EXIT = 12
SERVER_EXIT = 13


@dataclass(frozen=True)
class Finding:
    """A fault, named once.

    Attributes:
        code: what kind of fault.
        subject: what it is about; code and subject are the finding's identity.
        severity: ``warn`` can wait, ``damage`` is redone, ``failed`` keeps the run from going on.
        what: one sentence.
        evidence: what was seen, one line each.
        mend: what a person types or does about it.
        exit_code: doctor's, when nothing worse was found.
        detail: what a remedy needs to know, as JSON values.
    """

    code: str
    subject: str
    severity: Severity
    what: str
    evidence: tuple[str, ...] = ()
    mend: str = "eyas recover"
    exit_code: int = DAMAGE_EXIT
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its identity as text."""
        return f"{self.code}:{self.subject}"

    def as_dict(self) -> dict[str, object]:
        """The finding as ``--json`` prints it."""
        return {
            "code": self.code,
            "subject": self.subject,
            "severity": self.severity,
            "what": self.what,
            "evidence": list(self.evidence),
            "mend": self.mend,
            "detail": dict(self.detail),
        }


@dataclass(frozen=True)
class Line:
    """One check's result: a state, a sentence, evidence, findings."""

    check: str
    state: State
    says: str
    evidence: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """The line as ``--json`` prints it."""
        return {
            "check": self.check,
            "state": self.state,
            "says": self.says,
            "evidence": list(self.evidence),
            "findings": [finding.as_dict() for finding in self.findings],
            "seconds": round(self.seconds, 3),
        }


def verdict(
    check: str, findings: Sequence[Finding], fine: str, evidence: Sequence[str] = (), state: State = "ok"
) -> Line:
    """The line of a check that looked: the worst of its findings, or ``state`` with ``fine``."""
    if not findings:
        return Line(check, state, fine, tuple(evidence))
    worst = max(findings, key=lambda finding: STATES.index(finding.severity))
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return Line(check, worst.severity, worst.what + more, tuple(evidence), tuple(findings))


Facts = TypeVar("Facts")


@dataclass(frozen=True)
class Check(Generic[Facts]):
    """Looks at one thing.

    Attributes:
        look: gathers facts through the scene's host; read-only.
        judge: facts to a line; reads nothing.
        of_machine: whether it needs no file of the project, so that it works on any host.
    """

    name: str
    look: Callable[[Scene], Facts]
    judge: Callable[[Scene, Facts], Line]
    of_machine: bool = False

    def run(self, scene: Scene) -> Line:
        """Look and judge; what cannot be looked at is unknown, with the reason."""
        if not self.of_machine and not scene.host.is_here:
            return Line(self.name, "unknown", "not looked at: eyas is not on that host")
        try:
            facts = self.look(scene)
        except (EyasError, OSError) as error:
            text = getattr(error, "what", None) or str(error)
            why = getattr(error, "why", None)
            return Line(self.name, "unknown", f"could not look: {text}", (str(why),) if why else ())
        return self.judge(scene, facts)
