"""Machines, what recovery may do on them, and who is told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from eyas.config.section import Section


class WayConfig(Section):
    """One way to reach a host; the first that answers is taken."""

    ssh: str | None = None
    """Destination as OpenSSH knows it (its own configuration counts); none: this machine."""
    inside: tuple[str, ...] = ()
    """Words put before every command there, for example ``["pct", "exec", "129", "--"]``."""


class HostConfig(Section):
    """A machine on which commands are run."""

    name: str
    """What ``--host`` calls it."""
    ways: tuple[WayConfig, ...] = Field(min_length=1)
    """Ways to reach it, in the order in which they are tried."""
    project: str | None = None
    """Where the project lies there (absolute)."""
    python: str = "python3"
    """Python there that has what eyas imports."""
    connect_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Patience with a connection before the next way is tried."""


class NeededFileConfig(Section):
    """A file outside the project that the run needs, and where it comes from."""

    path: str
    """Where it has to be."""
    source: str
    """A copy that outlives a reboot; relative to the project folder unless absolute."""
    sha256: str | None = None
    """What its bytes have to hash to; none: those of the source."""


class RecoveryConfig(Section):
    """What ``eyas recover`` may do and needs to know."""

    may_stop: tuple[str, ...] = ()
    """Services of others that may be stopped, disabled and masked without asking."""
    container_host: str | None = None
    """A host (by name) whose ``systemctl`` is asked when the one here does not answer."""
    files: tuple[NeededFileConfig, ...] = ()
    """Files that a reboot may wipe; restored by hash."""
    stop_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Patience with a service or process that was asked to stop."""
    silent_minutes: Annotated[float, Field(gt=0)] = 30.0
    """A running eyas without an event for so long counts as stuck."""
    watch_samples: Annotated[int, Field(ge=0)] = 3
    """New samples that recover waits for after it resumed the run."""
    watch_seconds: Annotated[float, Field(gt=0)] = 900.0
    """... at most so long."""


NoticeKind = Literal["stalled", "stopped", "disk_low", "damage", "finished"]


class NotifyConfig(Section):
    """Who is told when something happens."""

    urls: tuple[str, ...] = ()
    """Addresses in apprise's form (``mailto://``, ``slack://``); ``env:NAME`` takes one from a variable."""
    on: tuple[NoticeKind, ...] = Field(
        default=("stalled", "stopped", "disk_low", "damage", "finished"), min_length=1
    )
    """What is worth a message."""
