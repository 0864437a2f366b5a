"""Progress: a line per 30 seconds, JSON lines, and a bar that leaves no trace of every step."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from eyas.base.errors import Stopped
from eyas.cli import progress
from eyas.cli.output import print_error


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


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
    assert "50%" in text
    assert "50 of 100 tokens" in text
    assert "5.00/s" in text
    assert "10 s left" in text
    assert "1.5 kB" in text


def bar_at(width: int, monkeypatch: pytest.MonkeyPatch) -> tuple[progress.BarProgress, Screen, Clock]:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    clock = Clock(monkeypatch)
    bar = progress.listener("regenerate", as_json=False)
    assert isinstance(bar, progress.BarProgress)
    return bar, screen, clock


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_bar_fits_the_terminal_and_what_matters_stays(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bar, screen, clock = bar_at(width, monkeypatch)
    bar.start("answer", total=40_000, unit="answers")
    clock.now += 10
    bar.advance(12_345, accepted=1.234, tokens=1_234_567, loss=11.66)
    # the line as it stands when the cursor has gone back to its start for the last time
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).splitlines()[-1].split("\r")[-1]
    assert len(shown) < width
    assert shown.startswith("regenerate: answer ━")
    assert "31% 12,345 of 40,000" in shown
    assert "…" not in shown
    assert ("22 s left" in shown) == (width >= 80)
    assert ("loss 11.66" in shown) == (width >= 200)
    bar.end()


def test_an_error_ends_the_bar_before_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bar, screen, clock = bar_at(80, monkeypatch)
    bar.start("answer", total=100, unit="answers")
    clock.now += 10
    bar.advance(10)
    print_error(Stopped(2), as_json=False)
    clock.now += 10
    bar.advance(10)
    assert screen.getvalue().endswith("hint: eyas run\n")
    assert screen.getvalue().count("state saved") == 1


def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Screen())
    monkeypatch.setenv("TERM", "dumb")
    assert type(progress.listener("train", as_json=False)) is progress.LineProgress


def test_messages_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    bar, screen, _ = bar_at(80, monkeypatch)
    bar.start("capture", total=100, unit="tokens")
    bar.say("aux_layers [1, 3, 5] and [bold]text[/bold]")
    assert "regenerate: aux_layers [1, 3, 5] and [bold]text[/bold]" in screen.getvalue()
    bar.end()


def test_bytes_are_shown_as_people_read_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    lines = progress.LineProgress("recover")
    lines.start("verify", total=6_908_076, unit="bytes")
    clock.now += 0.01
    lines.advance(6_908_076)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "recover: verify, 6.9 MB to do"
    # too short a time to say anything of the processor
    assert last == "recover: verify 6.9 MB of 6.9 MB, 690.8 MB/s"
