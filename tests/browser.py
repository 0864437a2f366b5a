"""A real Chromium for tests that look at pages; where there is none they skip and say so."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
PATIENCE_MS = 240_000
"""Start-ups on a loaded machine take many times longer than they should."""


class Seen:
    """A page, and everything that it should not have done."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.faults: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda m: self.faults.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true; asked from outside, since the page's policy forbids eval."""
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while not self.page.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"still not so: {expression}"
            self.page.wait_for_timeout(100)

    def wait_until_drawn(self) -> int:
        """Wait for all charts; returns how many the page says it drew."""
        self.wait_for("document.documentElement.dataset.drawn !== undefined")
        return int(self.page.evaluate("document.documentElement.dataset.drawn"))

    def drawn_charts(self) -> int:
        """Charts with something visible in them."""
        return int(
            self.page.evaluate(
                "[...document.querySelectorAll('.plot')].filter(p => p.querySelector('svg.main-svg') &&"
                " p.querySelectorAll('.trace path, .point path, .points path, .lines path').length).length"
            )
        )

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(
            self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        )

    def cut_off(self) -> list[str]:
        """Heads of the tables that one has to scroll sideways to read."""
        return list(
            self.page.evaluate(
                "[...document.querySelectorAll('.scroll')].filter(s => s.scrollWidth > s.clientWidth)"
                ".map(s => s.innerText.slice(0, 40))"
            )
        )

    def numbers(self) -> dict[str, Any]:
        """The numbers behind the cells, by their keys."""
        return dict(
            self.page.evaluate(
                "Object.fromEntries([...document.querySelectorAll('[data-key]')]"
                ".map(c => [c.dataset.key, JSON.parse(c.dataset.value)]))"
            )
        )

    def background(self) -> str:
        return str(self.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    def screenshot(self, name: str) -> None:
        """Keep a picture when EYAS_SCREENSHOTS names a folder."""
        folder = os.environ.get("EYAS_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A browser that is gone when the block ends, with whatever it kept."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        pytest.skip(f"no browser test: {error}")
    path = os.environ.get("EYAS_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no browser test: no chromium on this machine (EYAS_CHROMIUM names one)")
    with tempfile.TemporaryDirectory(prefix="eyas-chromium-") as home, sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=path, args=_FLAGS, timeout=PATIENCE_MS, env={**os.environ, "HOME": home}
        )
        try:
            yield started
        finally:
            started.close()


@contextlib.contextmanager
def looking_at(started: Any, url: str, **options: Any) -> Iterator[Seen]:
    """One page in a context of its own (``viewport``, ``color_scheme``)."""
    context = started.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    try:
        seen = Seen(context.new_page())
        seen.page.goto(url)
        yield seen
    finally:
        context.close()


def flat_numbers(status: dict[str, Any]) -> dict[str, Any]:
    """``status --json`` under the keys that pages use: ``stages.extract.tokens``, ``disk.used_bytes``."""
    found: dict[str, Any] = {}
    for stage in status["stages"]:
        found |= {f"stages.{stage['name']}.{key}": value for key, value in stage.items()}
    for part in ("disk", "running", "training"):
        found |= {f"{part}.{key}": value for key, value in (status[part] or {}).items()}
    return found | {key: status[key] for key in ("set_aside_samples", "set_aside_files")}
