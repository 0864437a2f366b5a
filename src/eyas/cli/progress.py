"""Progress on stderr: a bar on a terminal, a line per 30 seconds elsewhere, JSON lines on demand."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from typing import Any

from eyas.base.progress import Progress
from eyas.base.units import format_amount, format_bytes, format_count, format_rate, format_seconds
from eyas.cli.output import OPEN_BARS, note
from eyas.hosts.gpus import GpuMeter

LINE_SECONDS = 30.0
_WIDEST_BAR, _SHORTEST_BAR = 24, 4


def listener(stage: str, as_json: bool) -> Progress:
    """The listener that fits where stderr goes."""
    if as_json:
        return JsonProgress(stage)
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
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

    def parts(self) -> list[str]:
        """Count, rate, time left, facts, use of the machine: what matters most comes first."""
        done = format_bytes(self.done) if self.unit == "bytes" else format_count(self.done)
        parts = [f"{done} of {format_amount(self.total, self.unit)}"]
        rate = self.rate
        if rate > 0:
            parts.append(format_rate(rate, self.unit))
            if self.done < self.total:
                parts.append(f"{format_seconds((self.total - self.done) / rate)} left")
        parts += [_fact(key, value) for key, value in self.facts.items()]
        percent = self._cpu.percent()
        parts += [] if percent is None else [f"CPU {percent:.0f}%"]
        if gpu := _gpu().text():
            parts.append(gpu)
        return parts

    def text(self) -> str:
        """``extract: capture 120 of 472 samples, 14/s, 25 s left, 3.0 kB, CPU 180%``."""
        return f"{self.stage}: {self.label} " + ", ".join(self.parts())


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
        self._wall, self._cpu = time.monotonic(), time.process_time()
        self._percent: float | None = None

    def percent(self) -> float | None:
        """None until enough time has passed to say."""
        wall, cpu = time.monotonic(), time.process_time()
        if wall - self._wall >= (0.05 if self._percent is None else 0.5):  # shorter spans say little
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
        self._line(f"{self.stage}: {label}, {format_amount(total - done, unit)} to do")

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
    """One line that is redrawn at most ten times a second and never wider than the terminal.

    Where it does not fit, the bar gets shorter, then what comes last (use of the machine, facts) is left out.
    """

    def __init__(self, stage: str) -> None:
        super().__init__(stage)
        self._bar: Any = None
        self._task: Any = None

    def start(self, label: str, *, total: int, unit: str, done: int = 0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        super().start(label, total=total, unit=unit, done=done)
        self.end()
        OPEN_BARS.add(self)
        self._column = BarColumn(bar_width=_WIDEST_BAR)
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            self._column,
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(stderr=True),
            auto_refresh=False,
        )
        self._bar.start()
        self._task = self._bar.add_task(self._head(), total=max(total, 1), completed=done, text="")
        self._shown = 0.0
        if done >= total:
            self.end()

    def _head(self) -> str:
        return f"{self.stage}: {self.label}"

    def advance(self, units: int, **facts: float | int | str) -> None:
        super().advance(units, **facts)
        now = time.monotonic()
        if self._bar is None or (now - self._shown < 0.1 and self.done < self.total):
            return
        self._shown = now
        self._bar.update(self._task, completed=self.done, text=self._fitted(), refresh=True)
        if self.done >= self.total:
            self.end()

    def _fitted(self) -> str:
        """Percent and parts, as many as the terminal has room for; sets the bar's width by what is left."""
        percent = f"{100 * self.done / max(self.total, 1):3.0f}% "
        # a space on each side of the bar, and the last column stays free: terminals wrap there
        room = self._bar.console.width - len(self._head()) - len(percent) - 3
        parts = self.parts()
        while len(parts) > 1 and len(", ".join(parts)) > room - _SHORTEST_BAR:
            parts.pop()
        text = ", ".join(parts)
        self._column.bar_width = max(_SHORTEST_BAR, min(_WIDEST_BAR, room - len(text)))
        return percent + text

    def say(self, message: str) -> None:
        if self._bar is not None:
            self._bar.console.print(f"{self.stage}: {message}", highlight=False, markup=False)
        else:
            note(f"{self.stage}: {message}", indent=2)

    def end(self) -> None:
        """Leave the bar as it stands; what is written now comes below it."""
        OPEN_BARS.discard(self)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
