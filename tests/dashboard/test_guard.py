"""Nobody reads without the token and the right name, and nobody changes anything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import eyas
from tests.dashboard.serving import Dashboard, dashboard

PATHS = ("/", "/api/status", "/api/overview", "/api/parts", "/assets/plotly.js", "/assets/page.css", "/none")


@pytest.fixture(scope="module")
def served(finished: Path) -> Iterator[Dashboard]:
    with dashboard(finished) as running:
        yield running


def test_without_the_token_nothing_is_shown(served: Dashboard) -> None:
    for path in PATHS:
        for token in ("", "wrong", served.token[:-1], served.token + "x"):
            answer = served.ask(path, token=token)
            assert answer.code == 401, path
            assert "eyas dashboard printed" in answer.text
    assert served.ask("/?token=wrong", token="").code == 401
    assert served.ask("/", token="", Cookie=f"eyas-{served.port}=wrong").code == 401


def test_the_address_sets_a_cookie_that_then_opens_the_page(served: Dashboard) -> None:
    first = served.ask(f"/?token={served.token}", token="")
    assert first.code == 303
    assert first.headers["location"] == "/"
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    again = served.ask("/", token="", Cookie=cookie.partition(";")[0])
    assert again.code == 200
    assert "<h1>" in again.text


def test_a_foreign_name_is_refused_also_with_the_token(served: Dashboard) -> None:
    for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.", "", "[::2]"):
        assert served.ask("/api/status", Host=name).code == 421, name
    for name in ("127.0.0.1", f"localhost:{served.port}", "[::1]:1", "LOCALHOST"):
        assert served.ask("/api/status", Host=name).code == 200, name


def test_only_reading_is_possible(served: Dashboard, finished: Path) -> None:
    before = digests(finished)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        for path in PATHS:
            assert served.ask(path, method).code == 405, (method, path)
    for path in PATHS:
        assert served.ask(path).code == (404 if path == "/none" else 200)
        assert served.ask(path, "HEAD").code == (404 if path == "/none" else 200)
    for path in ("/assets/../../eyas.toml", "/assets/%2e%2e/app.py", "/assets/serve.py"):
        assert served.ask(path).code == 404
    assert digests(finished) == before


def digests(root: Path) -> dict[str, str]:
    """Content of every file; what SQLite shares among readers does not count."""
    return {
        str(p): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.suffix not in (".db-shm", ".db-wal")
    }


def test_headers_forbid_everything_from_elsewhere(served: Dashboard) -> None:
    for path in PATHS:
        headers = served.ask(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "script-src 'self';" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers


def test_the_api_tells_what_status_tells(served: Dashboard, finished: Path) -> None:
    served_status = json.loads(served.ask("/api/status").text)
    printed = eyas("status", "--project", finished, "--json").json
    for ages in (served_status, printed):
        ages["last_attempt"].pop("last_event_seconds")
        ages["training"].pop("checkpoint_seconds")
        ages.pop("free_bytes")
        ages["disk"].pop("free_bytes")
    assert served_status["next_command"] is None
    assert served_status == printed


def test_a_taken_port_and_a_wrong_folder_are_named(served: Dashboard, finished: Path, tmp_path: Path) -> None:
    taken = eyas("dashboard", "--project", finished, "--port", str(served.port))
    assert taken.code == 2
    assert "--port 0" in taken.err
    assert eyas("dashboard", "--project", tmp_path).code == 10
    assert eyas("dashboard", "--project", finished, "--port", "99999").code == 2
