"""systemd's units, system and user, through ``systemctl``; every call has a deadline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.hosts.host import Host, Result

_PROPERTIES = "Id,ActiveState,SubState,UnitFileState,MainPID,ControlGroup,ExecStart,Description"
_ENGINES = re.compile(
    r"vllm|sglang|tritonserver|text-generation|ollama|llama-server|llama_cpp|trtllm|lmdeploy|comfyui|nvidia-cuda",
    re.IGNORECASE,
)
ACTIVE = ("active", "activating", "reloading", "deactivating")


@dataclass(frozen=True)
class Unit:
    """One service."""

    name: str
    user: bool
    active: str
    sub: str
    enabled: str
    main_pid: int
    command: str
    description: str

    @property
    def is_active(self) -> bool:
        return self.active in ACTIVE

    @property
    def starts_at_boot(self) -> bool:
        return self.enabled in ("enabled", "enabled-runtime", "linked", "static-enabled")

    @property
    def wants_gpus(self) -> bool:
        """Whether it looks like an inference server, by its name and command."""
        return bool(_ENGINES.search(f"{self.name} {self.command} {self.description}"))

    @property
    def title(self) -> str:
        return f"{self.name} (user)" if self.user else self.name


def systemctl(host: Host, user: bool, words: Sequence[str], seconds: float = 5.0) -> Result:
    """``systemctl [--user] WORDS``; never asks for a password."""
    scope = ["--user"] if user else []
    return host.run(["systemctl", *scope, "--no-ask-password", *words], timeout_seconds=seconds)


def show_unit(host: Host, name: str, user: bool) -> Unit | None:
    """One unit as systemd has it; None when the manager does not answer."""
    found = _show(host, [name], user)
    return found[0] if found else None


def list_services(host: Host, user: bool) -> list[Unit] | None:
    """Services that are loaded and running or failed, or that start at boot; None: no answer."""
    running = systemctl(
        host,
        user,
        [
            "list-units",
            "--type=service",
            "--state=active,activating,failed",
            "--plain",
            "--no-legend",
            "--full",
        ],
    )
    if not running.ok:
        return None
    files = systemctl(
        host, user, ["list-unit-files", "--type=service", "--state=enabled", "--no-legend", "--full"]
    )
    names = [line.split()[0] for line in (running.out + "\n" + files.out).splitlines() if line.split()]
    names = sorted({name for name in names if name.endswith(".service") and not name.endswith("@.service")})
    return _show(host, names, user) if names else []


def _show(host: Host, names: Sequence[str], user: bool) -> list[Unit]:
    result = systemctl(host, user, ["show", f"--property={_PROPERTIES}", "--", *names])
    units = []
    for block in result.out.split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" not in fields:
            continue
        pid = fields.get("MainPID", "0")
        command = re.search(r"argv\[\]=([^;]*)", fields.get("ExecStart", ""))
        units.append(
            Unit(
                name=fields["Id"],
                user=user,
                active=fields.get("ActiveState", "unknown"),
                sub=fields.get("SubState", "unknown"),
                enabled=fields.get("UnitFileState", ""),
                main_pid=int(pid) if pid.isdigit() else 0,
                command=command[1].strip() if command else fields.get("ExecStart", ""),
                description=fields.get("Description", ""),
            )
        )
    return units
