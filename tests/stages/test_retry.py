"""The wait before another try, under a clock that does not take time; and whether the disk keeps up."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from eyas.base import stop as stop_module
from eyas.base.errors import Stopped
from eyas.base.progress import SilentProgress
from eyas.base.stop import StopFlag
from eyas.stages.extract.pace import Pace
from eyas.stages.extract.retry import retry_delay, wait_to_retry
from eyas.store.entry import SampleEntry
from eyas.store.ledger import Ledger
from eyas.store.write_speed import measure_write_speed


class Said(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self.then: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.then()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    times = SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep)
    monkeypatch.setattr(stop_module, "time", times)
    return clock


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger.open(tmp_path / "ledger.db")
    ledger.add_samples([SampleEntry(name * 32, 5, 2, "train", "x") for name in "ab"])
    return ledger


def test_delays_double_up_to_five_minutes() -> None:
    assert [retry_delay(tried, 5.0) for tried in (1, 2, 3, 4)] == [5, 10, 20, 40]
    assert retry_delay(30, 5.0) == 300
    assert retry_delay(2, 0.0) == 0


def test_waits_only_for_samples_that_failed(ledger: Ledger, clock: Clock) -> None:
    said = Said()
    wait_to_retry(ledger, 1, 5.0, said, StopFlag())
    ledger.set_aside_sample("b" * 32, "hopeless")
    wait_to_retry(ledger, 1, 5.0, said, StopFlag())
    assert (clock.now, said.lines) == (0.0, [])
    ledger.fail_sample("a" * 32, "not finite", None, 3)
    wait_to_retry(ledger, 2, 5.0, said, StopFlag())
    assert clock.now == pytest.approx(10.0)
    assert "1 sample failed" in said.lines[0]
    assert "not finite" in said.lines[0]
    assert "10 s" in said.lines[0]


def test_a_stop_ends_the_wait_at_once(ledger: Ledger, clock: Clock) -> None:
    ledger.fail_sample("a" * 32, "not finite", None, 3)
    stop = StopFlag()

    def ask() -> None:
        if clock.now > 3:
            stop.request(signal.SIGTERM)

    clock.then = ask
    with pytest.raises(Stopped):
        wait_to_retry(ledger, 5, 5.0, Said(), stop)
    assert 3 < clock.now < 3.5
    before = clock.now
    with pytest.raises(Stopped):
        wait_to_retry(ledger, 1, 5.0, Said(), stop)
    assert clock.now == before


def test_a_disk_that_cannot_keep_up_is_said_once() -> None:
    said = Said()
    pace = Pace(90e6, 900_000_000_000, said)
    pace.note(4.0, 600_000_000)
    assert said.lines == []
    pace.note(2.0, 300_000_000)  # 150 MB/s by now
    pace.note(60.0, 9_000_000_000)
    assert len(said.lines) == 1
    assert "150.0 MB/s" in said.lines[0]
    assert "90.0 MB/s" in said.lines[0]
    assert "2 h 46 min instead of 1 h 40 min" in said.lines[0]


def test_a_disk_that_keeps_up_or_was_not_measured_is_not_mentioned() -> None:
    said = Said()
    for pace in (Pace(200e6, 10**12, said), Pace(None, 10**12, said)):
        pace.note(100.0, 15_000_000_000)
    assert said.lines == []


def test_the_measured_speed(tmp_path: Path) -> None:
    speed = measure_write_speed(tmp_path, 1 << 20)
    assert speed is not None
    assert speed > 0
    assert list(tmp_path.iterdir()) == []
    assert measure_write_speed(tmp_path / "not there") is None
