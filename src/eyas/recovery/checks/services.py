"""Services that would take the GPUs at the next boot, or failed."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.hosts.processes import owner_of
from eyas.hosts.units import Unit, list_services
from eyas.recovery.findings import Check, Finding, Line, verdict
from eyas.recovery.scene import Scene


@dataclass(frozen=True)
class ServiceFacts:
    """Services of the system's and the user's manager (None: it does not answer); units on GPUs now."""

    system: tuple[Unit, ...] | None
    user: tuple[Unit, ...] | None
    on_gpus: frozenset[str]
    has_gpus: bool


def look(scene: Scene) -> ServiceFacts:
    system, user = list_services(scene.host, False), list_services(scene.host, True)
    gpus = scene.gpu_list or []
    owners = {owner_of(scene.host, u.pid).unit for gpu in gpus for u in gpu.users}
    return ServiceFacts(
        None if system is None else tuple(system),
        None if user is None else tuple(user),
        frozenset(name for name in owners if name is not None),
        bool(gpus),
    )


def judge(scene: Scene, facts: ServiceFacts) -> Line:
    if facts.system is None and facts.user is None:
        return Line("services", "unknown", "systemctl does not answer on this machine")
    units = [*(facts.system or ()), *(facts.user or ())]
    evidence = [
        f"{unit.title}: {unit.active}, {unit.enabled or 'not installed'}"
        for unit in units
        if unit.wants_gpus or unit.active == "failed"
    ]
    if facts.system is None or facts.user is None:
        evidence.append(
            f"the {'system' if facts.system is None else 'user'}'s manager does not answer: not checked"
        )
    findings = [
        Finding(
            "service-at-boot",
            unit.name,
            "warn",
            f"{unit.title} starts at boot and looks like an inference server",
            (f"{unit.title}: {unit.active}, {unit.enabled}", unit.command),
            mend="eyas recover --yes-stop-services",
            detail={"unit": unit.name, "user": unit.user, "active": unit.is_active},
        )
        for unit in units
        if facts.has_gpus and unit.starts_at_boot and unit.wants_gpus and unit.name not in facts.on_gpus
    ]
    wanting = "" if facts.has_gpus else "; no GPU here that they could take"
    fine = f"{len(units)} services, none waits to take the GPUs{wanting}"
    return verdict("services", findings, fine, evidence)


CHECK = Check("services", look, judge, of_machine=True)
