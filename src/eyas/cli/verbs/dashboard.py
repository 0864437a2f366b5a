"""``eyas dashboard``: the live page."""

from __future__ import annotations

import os

from eyas.base.errors import UsageError
from eyas.cli.common import Common
from eyas.cli.output import note, print_json

TOKEN_VARIABLE = "EYAS_DASHBOARD_TOKEN"


def dashboard(
    *,
    host: str = "127.0.0.1",
    port: int = 7415,
    name: tuple[str, ...] = (),
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Show the project as a live, read-only page in a browser; Ctrl-C ends it.

    The address holds a token, new at every start unless EYAS_DASHBOARD_TOKEN gives one. From another
    machine: ssh -L 7415:127.0.0.1:7415 HOST.

    Args:
        host: address to listen on; only this machine reaches the default.
        port: 0 takes a free one.
        name: further host name under which browsers may call; may be repeated.
    """
    try:
        from eyas.dashboard.serve import Place, serve
        from eyas.dashboard.view import LiveView
    except ModuleNotFoundError as error:
        raise UsageError(
            "the dashboard's libraries are not installed",
            why=str(error),
            hint="pip install 'eyas[dashboard]'",
        ) from error
    if not 0 <= port <= 65535:
        raise UsageError(f"there is no port {port}", hint="eyas dashboard --port 0")
    common.open()  # a wrong folder is named before anything listens

    def ready(place: Place) -> None:
        if common.json:
            print_json({"url": place.url, "host": place.host, "port": place.port, "pid": os.getpid()})
        else:
            print(place.url, flush=True)
            note("\nread-only; Ctrl-C ends it")

    token = os.environ.get(TOKEN_VARIABLE) or None
    try:
        view = LiveView(lambda: common.as_last_run().open(), common.as_last_run().suffix)
        serve(view, host=host, port=port, names=name, token=token, ready=ready)
    except KeyboardInterrupt:
        return 0
    return 0
