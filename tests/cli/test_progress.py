"""Progress: a line per 30 seconds, JSON lines, and a bar that leaves no trace of every step."""

from __future__ import annotations

import io
import json
import sys

import pytest

from eyas.cli import progress


class Clock:
    """Time that goes by as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_a_log_gets_a_line_at_the_start_every_thirty_seconds_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    lines = progress.LineProgress("extract")
    lines.start("capture", total=1000, unit="tokens", done=100)
    for _ in range(90):
        clock.now += 1.0
        lines.advance(10, bytes=4_200_000)
    shown = capsys.readouterr().err.splitlines()
    # the start, 30 s, 60 s, and the end at 90 s
    assert len(shown) == 4
    assert shown[0] == "extract: capture, 900 tokens to do"
    assert shown[1].startswith("extract: capture 400 of 1,000 tokens, 10/s, 1 min 0 s left, 4.2 MB, CPU ")
    assert shown[3].startswith("extract: capture 1,000 of 1,000 tokens, 10/s, 4.2 MB")


def test_json_lines_hold_the_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    lines = progress.JsonProgress("train")
    lines.start("train", total=500, unit="tokens", done=100)
    clock.now += 40
    lines.advance(200, loss=2.5)
    lines.say("hello")
    first, second, third = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (first["done"], first["seconds_left"]) == (100, None)
    assert (second["done"], second["rate"], second["seconds_left"], second["fact_loss"]) == (
        300,
        5.0,
        40.0,
        2.5,
    )
    assert third["text"] == "train: hello"


def test_a_bar_shows_count_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    clock = Clock(monkeypatch)
    bar = progress.BarProgress("extract")
    bar.start("capture", total=100, unit="tokens")
    for _ in range(4):
        clock.now += 5
        bar.advance(25, bytes=1500)
    text = screen.getvalue()
    assert "50 of 100 tokens" in text
    assert "5.00/s" in text
    assert "10 s left" in text
    assert "1.5 kB" in text
