"""The dashboard in a real Chromium."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from eyas.pipeline.lock import hold_lock
from tests.browser import browser, flat_numbers, looking_at
from tests.cli.command import eyas
from tests.dashboard.serving import dashboard

PHONE = {"width": 390, "height": 844}


def test_the_page_draws_and_its_numbers_are_those_of_status(finished: Path) -> None:
    looks: list[tuple[str, dict[str, Any]]] = [
        ("dashboard-light", {"color_scheme": "light"}),
        ("dashboard-dark-phone", {"color_scheme": "dark", "viewport": PHONE}),
    ]
    backgrounds = set()
    with dashboard(finished) as served, browser() as started:
        expected = flat_numbers(eyas("status", "--project", finished, "--json").json)
        for name, options in looks:
            with looking_at(started, served.url, **options) as seen:
                assert "token" not in seen.page.url
                assert seen.wait_until_drawn() >= 15
                assert seen.drawn_charts() == seen.page.locator(".plot").count()
                numbers = seen.numbers()
                assert numbers == {key: expected[key] for key in numbers}
                assert len(numbers) > 30
                assert seen.overflow() == 0
                assert seen.cut_off() == []
                seen.wait_for("Number(document.documentElement.dataset.looks) >= 2")
                assert seen.drawn_charts() == seen.page.locator(".plot").count()
                assert seen.faults == []
                assert all(
                    url.startswith((f"http://127.0.0.1:{served.port}/", "data:", "blob:"))
                    for url in seen.requests
                )
                backgrounds.add(seen.background())
                seen.screenshot(name)
    assert len(backgrounds) == 2


def test_a_page_left_open_follows_the_run_also_through_a_crash_and_damage(copy: Path) -> None:
    with dashboard(copy) as served, browser() as started, looking_at(started, served.url) as seen:
        seen.wait_until_drawn()
        assert "Everything is done." in seen.page.inner_text("#now")
        with hold_lock(copy / "state", "run"):
            folder = copy / "logs" / "attempt-0002"
            folder.mkdir()
            (folder / "events.jsonl").write_text("\n".join(run_events()) + "\n")
            seen.wait_for("document.querySelector('[data-key=\"running.done\"]')?.dataset.value === '640'")
            assert "eyas run is at work: extract, capture, 64% done" in seen.page.inner_text("#now")
        # the lock went without an end of the attempt: the run was killed
        seen.wait_for(
            "document.querySelector('#now').innerText.includes('attempt-0002')"
            " || document.querySelector('#timeline').innerText.includes('killed, or the machine went down')"
        )
        segment = next((copy / "store" / "segments").glob("*.safetensors"))
        segment.write_bytes(segment.read_bytes()[:-9])
        seen.page.wait_for_selector(f"text={segment.name}")
        assert seen.page.locator(".warning:visible").count() >= 1
        assert seen.faults == []
        # a configuration that cannot be read: the page says so and comes back by itself
        text = (copy / "eyas.toml").read_text()
        (copy / "eyas.toml").write_text("not toml [")
        seen.page.wait_for_selector("#contact:visible")
        (copy / "eyas.toml").write_text(text)
        seen.page.wait_for_selector("#contact", state="hidden")


def run_events() -> list[str]:
    now = datetime.now(UTC) - timedelta(seconds=60)
    started = {
        "at": now.isoformat(),
        "attempt": 2,
        "kind": "attempt started",
        "detail": {"verb": "run", "pid": os.getpid()},
    }
    stage = {"at": now.isoformat(), "attempt": 2, "kind": "stage started",
             "detail": {"stage": "extract", "action": "resume", "why": "left"}}  # fmt: skip
    beats = [
        {"at": (now + timedelta(seconds=5 * i)).isoformat(), "attempt": 2, "kind": "progress",
         "detail": {"stage": "extract", "label": "capture", "unit": "tokens", "done": 64 * i, "total": 1000,
                    "rate": 12.8}}
        for i in range(11)
    ]  # fmt: skip
    return [json.dumps(event) for event in (started, stage, *beats)]
