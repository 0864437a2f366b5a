"""A dashboard in a process of its own, as a person starts it."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.cli.command import eyas_process


@dataclass(frozen=True)
class Answer:
    """One HTTP answer."""

    code: int
    headers: dict[str, str]
    text: str


@dataclass(frozen=True)
class Dashboard:
    """Where it is."""

    url: str

    @property
    def port(self) -> int:
        return int(urlsplit(self.url).port or 0)

    @property
    def token(self) -> str:
        return parse_qs(urlsplit(self.url).query)["token"][0]

    def ask(self, path: str, method: str = "GET", token: str | None = None, **headers: str) -> Answer:
        """Ask as a program does; ``token`` empty asks without one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)
        given = self.token if token is None else token
        if given:
            headers.setdefault("Authorization", f"Bearer {given}")
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return Answer(
                answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
            )
        finally:
            connection.close()


@contextlib.contextmanager
def dashboard(root: Path) -> Iterator[Dashboard]:
    """Serve a project; Ctrl-C has to end it with exit code 0."""
    process = eyas_process("dashboard", "--project", root, "--port", "0", "--json")
    try:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = process.stdout.readline()
            if not line:
                raise AssertionError(process.communicate()[1])
            text += line
        yield Dashboard(json.loads(text)["url"])
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert "Traceback" not in err
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
