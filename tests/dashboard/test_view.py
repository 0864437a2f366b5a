"""A page is answered from the view there is, while the next one is made."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from eyas.base.errors import ConfigError
from eyas.dashboard import view as module
from eyas.dashboard.view import LiveView
from eyas.stages.project import Project


def test_nobody_waits_for_a_look_but_the_first(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, opened = threading.Event(), []
    gate.set()

    def slowly() -> Project:
        opened.append(threading.current_thread())
        assert gate.wait(60)
        return Project.open(fresh)

    monkeypatch.setattr(module, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(module, "STALE_SECONDS", 3600.0)
    live = LiveView(slowly)
    first = live.get()
    gate.clear()
    # the next look is held up, and the page is answered all the same, by one look for all who ask
    assert all(live.get() is first for _ in range(5))
    assert len(opened) == 2
    gate.set()
    deadline = time.monotonic() + 60
    while live.get() is first:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_old_view_is_not_given(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE_SECONDS", 0.0)
    live = LiveView(lambda: Project.open(fresh))
    assert live.get() is not live.get()


def test_an_error_is_told_until_it_is_mended(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE_SECONDS", 0.0)
    live = LiveView(lambda: Project.open(fresh))
    live.get()
    text = (fresh / "eyas.toml").read_text()
    (fresh / "eyas.toml").write_text("not toml [")
    with pytest.raises(ConfigError):
        live.get()
    (fresh / "eyas.toml").write_text(text)
    assert live.get().status.next_command is not None
