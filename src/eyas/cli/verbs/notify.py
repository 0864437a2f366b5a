"""``eyas notify``: messages when something happens."""

from __future__ import annotations

from eyas.base.errors import UsageError
from eyas.cli.common import Common
from eyas.cli.notifying import LOOK_SECONDS, Watched, sender, watch
from eyas.cli.output import note
from eyas.report.notices import Notice


def notify(
    *,
    test: bool = False,
    every: float = LOOK_SECONDS,
    pid: int | None = None,
    attempts: int = 0,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Watch the project and send a message when it stalls, stops, finishes, fills the disk or is damaged.

    eyas run starts this by itself when notify.urls is set; it sees a run that was killed, too.

    Args:
        test: send one message to every address and end.
        every: seconds between two looks.
        pid: end after this process is gone; goes on until Ctrl-C when left out.
        attempts: attempts there were before that process began.
    """
    if every <= 0:
        raise UsageError("--every has to be above 0", hint="eyas notify --every 15")
    project = common.open()
    settings = project.config.notify
    if test:
        kind = settings.on[0]
        sender(settings)(Notice(kind, f"eyas {project.layout.root.name}: test", "messages arrive"))
        note("sent")
        return 0
    run = Watched(pid, attempts) if pid is not None else None

    def ready() -> None:
        until = "Ctrl-C ends it" if pid is None else f"ends with process {pid}"
        note(f"watching {project.layout.root.name} for {', '.join(settings.on).replace('_', ' ')}; {until}")

    try:
        watch(
            lambda: common.as_last_run().open(),
            sender(settings),
            suffix=common.suffix,
            every=every,
            run=run,
            ready=ready,
        )
    except KeyboardInterrupt:
        return 0
    return 0
