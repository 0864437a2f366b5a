"""Progress on stderr: a bar on a terminal, a line per 30 seconds elsewhere, JSON lines on demand."""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any

from eyas.base.progress import Progress
from eyas.base.units import format_bytes, format_count, format_seconds
from eyas.hosts.gpus import GpuMeter

LINE_SECONDS = 30.0


def listener(stage: str, as_json: bool) -> Progress:
    """The listener that fits where stderr goes."""
    if as_json:
        return JsonProgress(stage)
    if sys.stderr.isatty():
        return BarProgress(stage)
    return LineProgress(stage)


class _Counting:
    """Counts work and its rate; subclasses show it."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.label, self.unit, self.total, self.done = "", "", 0, 0
        self._begun, self._started = 0, time.monotonic()
        self.facts: dict[str, float | int | str] = {}
        self._cpu = _CpuUse()

    def start(self, label: str, *, total: int, unit: str, done: int = 0) -> None:
        self.label, self.unit, self.total, self.done = label, unit, total, done
        self._begun, self._started, self.facts = done, time.monotonic(), {}

    def advance(self, units: int, **facts: float | int | str) -> None:
        self.done += units
        self.facts.update(facts)

    @property
    def rate(self) -> float:
        elapsed = time.monotonic() - self._started
        return (self.done - self._begun) / elapsed if elapsed > 0 else 0.0

    def text(self) -> str:
        """``extract: capture 120 of 472 samples, 14/s, 25 s left, 3.0 kB, CPU 180%``."""
        parts = [f"{format_count(self.done)} of {format_count(self.total)} {self.unit}"]
        rate = self.rate
        if rate > 0:
            parts.append(f"{format_count(rate) if rate >= 10 else f'{rate:.2f}'}/s")
            if self.done < self.total:
                parts.append(f"{format_seconds((self.total - self.done) / rate)} left")
        parts += [_fact(key, value) for key, value in self.facts.items()]
        parts.append(f"CPU {self._cpu.percent():.0f}%")
        if gpu := _gpu().text():
            parts.append(gpu)
        return f"{self.stage}: {self.label} " + ", ".join(parts)


def _fact(key: str, value: float | int | str) -> str:
    """``loss 2.31``, ``4.2 GB``, ``step 1,200``."""
    if key == "bytes" and isinstance(value, int | float):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{key} {value:.4g}"
    return f"{key} {format_count(value)}" if isinstance(value, int) else f"{key} {value}"


class _CpuUse:
    """Processor time of this process since it was last asked, in percent of one core."""

    def __init__(self) -> None:
        self._wall, self._cpu, self._percent = time.monotonic(), time.process_time(), 0.0

    def percent(self) -> float:
        wall, cpu = time.monotonic(), time.process_time()
        if wall - self._wall >= 0.5:  # shorter spans are mostly the clock's grain
            self._percent = 100 * (cpu - self._cpu) / (wall - self._wall)
            self._wall, self._cpu = wall, cpu
        return self._percent


class _GpuUse:
    """Use and memory of the GPUs, asked at most once a second; empty where there is none."""

    def __init__(self) -> None:
        self._meter, self._asked, self._text = GpuMeter(), float("-inf"), ""

    def text(self) -> str:
        if time.monotonic() - self._asked >= 1.0:
            self._asked, found = time.monotonic(), self._meter.read()
            self._text = ""
            if found is not None:
                percent, used, total = found
                self._text = f"GPU {percent:.0f}% {format_bytes(used)} of {format_bytes(total)}"
        return self._text


@functools.cache
def _gpu() -> _GpuUse:
    return _GpuUse()  # the driver is opened when a count is shown for the first time


class LineProgress(_Counting):
    """For logs: a line when work starts, every 30 seconds and when it ends."""

    _last = 0.0

    def start(self, label: str, *, total: int, unit: str, done: int = 0) -> None:
        super().start(label, total=total, unit=unit, done=done)
        self._last = time.monotonic()
        self._line(f"{self.stage}: {label}, {format_count(total - done)} {unit} to do")

    def advance(self, units: int, **facts: float | int | str) -> None:
        before = self.done
        super().advance(units, **facts)
        finished = before < self.total <= self.done
        if finished or time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            self._line(self.text())

    def say(self, message: str) -> None:
        self._line(f"{self.stage}: {message}")

    def _line(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class JsonProgress(LineProgress):
    """The same lines as JSON objects on stderr; ``seconds_left`` is None while no rate is known."""

    def _line(self, text: str) -> None:
        record = {
            "stage": self.stage,
            "label": self.label,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "rate": round(self.rate, 3),
            "seconds_left": round(max(0, self.total - self.done) / self.rate, 1) if self.rate > 0 else None,
            "text": text,
            **{f"fact_{key}": value for key, value in self.facts.items()},
        }
        sys.stderr.write(json.dumps(record, ensure_ascii=False) + "\n")
        sys.stderr.flush()


class BarProgress(_Counting):
    """One line that is redrawn at most ten times a second."""

    def __init__(self, stage: str) -> None:
        super().__init__(stage)
        self._bar: Any = None
        self._task: Any = None

    def start(self, label: str, *, total: int, unit: str, done: int = 0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar

        super().start(label, total=total, unit=unit, done=done)
        self._stop()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
            auto_refresh=False,
        )
        self._bar.start()
        self._task = self._bar.add_task(
            f"{self.stage}: {label}", total=max(total, 1), completed=done, text=""
        )
        self._shown = 0.0
        if done >= total:
            self._stop()

    def advance(self, units: int, **facts: float | int | str) -> None:
        super().advance(units, **facts)
        now = time.monotonic()
        if self._bar is None or (now - self._shown < 0.1 and self.done < self.total):
            return
        self._shown = now
        text = self.text().removeprefix(f"{self.stage}: {self.label} ")
        self._bar.update(self._task, completed=self.done, text=text, refresh=True)
        if self.done >= self.total:
            self._stop()

    def say(self, message: str) -> None:
        if self._bar is not None:
            self._bar.console.print(f"{self.stage}: {message}", highlight=False)
        else:
            sys.stderr.write(f"{self.stage}: {message}\n")

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
