"""The fake server's HTTP: threads, broken connections, replies that are followed by something."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol


class Reset(Exception):
    """The connection is to be broken off."""


@dataclass
class Reply:
    status: int
    body: bytes
    content_type: str = "application/json"
    after: list[Callable[[], None]] = field(default_factory=list)
    stream: Iterator[bytes] | None = None


class App(Protocol):
    """What replies."""

    @property
    def api_key(self) -> str:
        """That requests have to bring; empty: none."""

    def get(self, path: str) -> Reply:
        """The reply to a GET."""

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        """The reply to a POST. Raises Reset where the connection is to break."""


def json_reply(value: object, status: int = 200) -> Reply:
    return Reply(status, json.dumps(value).encode())


def error_reply(status: int, why: str) -> Reply:
    return json_reply({"error": {"message": why}}, status)


class Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], app: App) -> None:
        self.app = app
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handleerror_reply(self, request: Any, client_address: Any) -> None:
        """A client that went away is no matter."""

    def break_all(self) -> None:
        """Break every open connection."""
        with self._open_lock:
            for connection in self._open:
                break_off(connection)


def break_off(connection: socket.socket) -> None:
    """Close at once with a reset instead of an orderly end."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        connection.close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Http

    def do_GET(self) -> None:
        self._serve(lambda: self.server.app.get(self.path))

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._serve(lambda: self.server.app.post(self.path, json.loads(data)))

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are counted, not logged."""

    def _serve(self, make: Callable[[], Reply]) -> None:
        key = self.server.app.api_key
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            reply = error_reply(401, "wrong or missing API key")
        else:
            try:
                reply = make()
            except Reset:
                self.close_connection = True
                break_off(self.connection)
                return
            except (ValueError, KeyError, TypeError) as error:
                reply = error_reply(400, f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            if reply.stream is not None:
                self._send_pieces(reply.stream)
            else:
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)
                self.wfile.flush()
        for action in reply.after:
            action()

    def _send_pieces(self, pieces: Iterator[bytes]) -> None:
        """A body in chunks, each sent when it is made."""
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()
