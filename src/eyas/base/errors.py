"""Every error that eyas raises for its users.

EyasError                      exit  1
├── UsageError                 exit  2   wrong words on the command line
├── ConfigError                exit  2   eyas.toml or --set
├── DataError                  exit  2   conversations, samples, templates
├── TargetError                exit  2   a target that cannot be loaded or used
├── RecipeChanged              exit  2   an output was made by another recipe
│   └── ContinuityBroken       exit  2   stored states cannot be captured again
├── FormatTooNew               exit  2   written by a newer eyas
├── NotReady                   exit  2   a stage before this one has to run first
├── NoProject                  exit 10
├── ProjectLocked              exit 11
├── DiskFull                   exit 12
├── ServerUnreachable          exit 13
│   ├── ServerNotStarted       exit 13
│   └── ServerNotStopped       exit 13
├── HostUnreachable            exit 13   no way to a host of eyas.toml answers
├── DamageFound                exit 14   a file is not what was written
│   ├── SealBroken
│   └── SegmentDamaged
├── StorageFailed              exit 14   the disk does not read or write
├── StoreNotMounted            exit 14   the store's disk is not where it was
├── GateFailed                 exit 15
├── CaptureInvalid             exit  1   states that must not be stored
├── TrainingDiverged           exit  1   too many steps without a finite loss
├── WorkerLost                 exit  1   one of several training processes is gone
├── ExportMismatch             exit  1   an export does not compute what was trained
└── Stopped                    exit 130 or 143
"""

from __future__ import annotations

from typing import ClassVar


class EyasError(Exception):
    """An error with four parts: what is wrong, where, why, and the command that mends it.

    Args:
        what: one sentence, no full stop needed.
        where: file, line, stage or sample it is about.
        why: the cause, when it is known.
        hint: what to do next; a command where there is one.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self, what: str, *, where: object = None, why: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.why = why
        self.hint = hint

    @property
    def code(self) -> str:
        """Name of the error as it stands in the reference, for example ``ConfigError``."""
        return type(self).__name__

    def __str__(self) -> str:
        parts = [self.what]
        if self.where:
            parts.append(f"where: {self.where}")
        if self.why:
            parts.append(f"why: {self.why}")
        if self.hint:
            parts.append(f"hint: {self.hint}")
        return "\n".join(parts)

    def as_dict(self) -> dict[str, object]:
        """The error as ``--json`` prints it."""
        return {
            "error": self.code,
            "what": self.what,
            "where": self.where,
            "why": self.why,
            "hint": self.hint,
            "exit_code": self.exit_code,
        }


class UsageError(EyasError):
    """Words on the command line that mean nothing to eyas."""

    exit_code = 2


class ConfigError(EyasError):
    """A key or value in ``eyas.toml`` (or ``--set``) that cannot be used."""

    exit_code = 2


class DataError(EyasError):
    """Conversations or samples that cannot be read or hold nothing to train on."""

    exit_code = 2


class TargetError(EyasError):
    """A target model that cannot be loaded, or cannot do what was asked of it."""

    exit_code = 2


class RecipeChanged(EyasError):
    """An existing output was made by another recipe, and mixing the two is refused."""

    exit_code = 2


class ContinuityBroken(RecipeChanged):
    """Stored samples, captured again, give other states: going on would mix two kinds."""


class FormatTooNew(EyasError):
    """A folder or file was written by a newer eyas than this one."""

    exit_code = 2


class NotReady(EyasError):
    """A stage was asked for before the stage that feeds it is done."""

    exit_code = 2


class NoProject(EyasError):
    """There is no ``eyas.toml`` where one was expected."""

    exit_code = 10


class ProjectLocked(EyasError):
    """Another process is writing to this project."""

    exit_code = 11


class DiskFull(EyasError):
    """There is not enough room for what has to be written."""

    exit_code = 12


class ServerUnreachable(EyasError):
    """A server does not answer."""

    exit_code = 13


class HostUnreachable(EyasError):
    """No way to a host works, or it does not do what was asked."""

    exit_code = 13


class ServerNotStarted(ServerUnreachable):
    """A server ended before it answered, or did not answer in time."""


class ServerNotStopped(ServerUnreachable):
    """A server was killed and something of it is still there: a process, its port, its GPU memory."""


class DamageFound(EyasError):
    """A file is not what eyas wrote."""

    exit_code = 14


class SealBroken(DamageFound):
    """A sealed folder misses a file or holds one with another digest."""


class SegmentDamaged(DamageFound):
    """A segment of the store cannot be read or fails its checksums."""


class StorageFailed(EyasError):
    """The system refuses to read or write: an error of the disk, or a filesystem turned read-only."""

    exit_code = 14


class StoreNotMounted(EyasError):
    """The store is empty and lies on another disk than before: its own is not mounted."""

    exit_code = 14


class GateFailed(EyasError):
    """A number that the configuration demands was not reached."""

    exit_code = 15


class CaptureInvalid(EyasError):
    """Captured states that must not be stored: wrong shape, not finite, constant, of other tokens.

    Args:
        reason: one word that names the kind of fault, as the ledger and reports count it.
    """

    def __init__(
        self,
        what: str,
        *,
        reason: str = "invalid",
        where: object = None,
        why: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what, where=where, why=why, hint=hint)
        self.reason = reason


class TrainingDiverged(EyasError):
    """Too many training steps in a row had no finite loss or gradient."""


class WorkerLost(EyasError):
    """One of the processes that train together ended or cannot be reached."""


class ExportMismatch(EyasError):
    """An export, read back, does not compute what the trained drafter computes."""


class Stopped(EyasError):
    """The run was asked to stop and has saved its state.

    Args:
        signal_number: SIGINT (2) gives exit code 130, SIGTERM (15) gives 143.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__("stopped by signal, state saved", hint="eyas run")
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return 128 + self.signal_number
