"""Serving the page on a socket of one's own."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import uvicorn

from eyas.base.errors import EyasError, UsageError
from eyas.dashboard.app import make_app
from eyas.dashboard.view import LiveView

_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Place:
    """Where the page is: ``url`` holds the token."""

    host: str
    port: int
    token: str

    @property
    def url(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.port}/?token={self.token}"


def serve(
    live: LiveView,
    *,
    host: str,
    port: int,
    names: Sequence[str] = (),
    token: str | None = None,
    ready: Callable[[Place], None] = lambda place: None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        host: address to listen on.
        port: 0 takes a free one.
        names: further host names under which browsers may call.
        token: None makes one.
        ready: called once the socket listens.

    Raises:
        UsageError: the address cannot be listened on.
    """
    listening = _listen(host, port)
    with suppress(EyasError):  # the page will say it
        live.get()  # the first look reads whole logs; nobody should wait for it in a browser
    place = Place(host, listening.getsockname()[1], token or secrets.token_urlsafe(24))
    own = () if _is_loopback(host) else (f"[{host}]" if ":" in host else host,)
    app = make_app(
        live, token=place.token, hosts=(*_LOOPBACK_NAMES, *own, *names), cookie=f"eyas-{place.port}"
    )
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", server_header=False, date_header=False
    )
    ready(place)
    with listening:
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(64)
    except OSError as error:
        listening.close()
        raise UsageError(
            "the dashboard cannot listen here", where=f"{host}:{port}", why=error.strerror or str(error),
            hint="eyas dashboard --port 0 takes a free port",
        ) from error  # fmt: skip
    return listening


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
