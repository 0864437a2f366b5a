"""Status: every phase of a project, against what the folder itself holds."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from eyas.cli.screens import status_lines
from eyas.pipeline.attempt import recent_events
from eyas.pipeline.lock import hold_lock
from eyas.report.status import project_status
from eyas.stages.project import Project
from tests.cli.command import eyas, eyas_process

DOCS = Path(__file__).parents[2] / "docs"


def schema() -> dict[str, Any]:
    return dict(json.loads((DOCS / "status.schema.json").read_text()))


def look(root: Path) -> dict[str, Any]:
    """``status --json``, held against the schema by another library."""
    done = eyas("status", "--project", root, "--json")
    assert done.code == 0, done.out + done.err
    jsonschema.validate(done.json, schema())
    return dict(done.json)


def beat(moment: datetime, done: int, total: int = 1000) -> str:
    detail = {
        "stage": "extract", "label": "capture", "unit": "tokens", "done": done, "total": total,
        "rate": 10.0, "bytes": 77,
    }  # fmt: skip
    return json.dumps({"at": moment.isoformat(), "attempt": 9, "kind": "progress", "detail": detail})


@pytest.fixture
def running(copy: Path) -> Iterator[Path]:
    """A project that this process seems to extract, 10 tokens a second, last heard of 3 s ago."""
    folder = copy / "logs" / "attempt-0009"
    folder.mkdir()
    now = datetime.now(UTC) - timedelta(seconds=3)
    start = {"at": now.isoformat(), "attempt": 9, "kind": "attempt started", "detail": {"pid": os.getpid()}}
    beats = [beat(now - timedelta(seconds=5 * (20 - i)), 50 * i) for i in range(20)]
    (folder / "events.jsonl").write_text("\n".join([json.dumps(start), *beats, '{"at": "torn']))
    with hold_lock(copy / "state", "run"):
        yield copy


def test_a_new_project(fresh: Path) -> None:
    view = look(fresh)
    assert [s["state"] for s in view["stages"]] == ["pending"] + ["waiting"] * 5
    assert view["running"] is None
    assert view["last_attempt"] is None
    assert view["next_command"].startswith("eyas run")


def test_a_finished_project_counts_what_the_folder_holds(finished: Path) -> None:
    view = look(finished)
    stages = {s["name"]: s for s in view["stages"]}
    with sqlite3.connect(f"file:{finished / 'state' / 'ledger.db'}?mode=ro", uri=True) as ledger:
        samples, tokens = ledger.execute("SELECT count(*), sum(length) FROM samples").fetchone()
    assert (stages["extract"]["samples"], stages["extract"]["tokens"]) == (samples, tokens)
    assert (stages["regenerate"]["samples"], stages["regenerate"]["tokens"]) == (samples, tokens)
    on_disk = sum(p.stat().st_size for p in (finished / "store").rglob("*") if p.is_file())
    assert stages["extract"]["bytes"] == on_disk
    everything = sum(p.stat().st_size for p in finished.rglob("*") if p.is_file() and not p.is_symlink())
    assert view["disk"]["used_bytes"] == everything
    rows = [json.loads(line) for line in (finished / "drafter" / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "train"][-1]
    assert (view["training"]["step"], view["training"]["loss"]) == (last["step"], last["loss"])
    assert view["last_attempt"]["outcome"] == "done"
    assert view["problems"] == []
    assert view["next_command"] is None
    assert view["disk"]["left_bytes"] is None


def test_a_running_project_says_rate_and_an_honest_range(running: Path) -> None:
    view = look(running)
    now = view["running"]
    assert (now["pid"], now["stage"], now["done"], now["facts"]) == (
        os.getpid(),
        "extract",
        950,
        {"bytes": 77},
    )
    assert now["seconds_left_low"] < 5.0 < now["seconds_left_high"]
    # the last beat was 8 s ago
    assert 7 < now["silent_seconds"] < 300
    assert not now["stalled"]
    assert view["next_command"].startswith("eyas logs --follow")
    text = "\n".join(status_lines(project_status(Project.open(running))))
    assert "> extract" in text
    assert "capture 950 of 1,000 tokens (95%)" in text


def test_a_silent_run_is_called_so(running: Path) -> None:
    path = running / "logs" / "attempt-0009" / "events.jsonl"
    path.write_text(path.read_text().replace(str(datetime.now(UTC).year), "2020"))
    view = look(running)
    assert view["running"]["stalled"]
    assert any("may hang" in problem for problem in view["problems"])


def test_a_killed_run(copy: Path) -> None:
    log = copy / "logs" / "latest" / "events.jsonl"
    log.write_text("\n".join(log.read_text().splitlines()[:-1]))
    view = look(copy)
    assert view["running"] is None
    assert view["last_attempt"]["outcome"] == "unfinished"
    assert "did not end by itself" in eyas("status", "--project", copy).out


def test_set_aside_samples_and_files_have_their_reasons(copy: Path) -> None:
    (copy / "set-aside").mkdir(exist_ok=True)
    note = {"from": "x", "reason": "bit flip", "at": "2026-01-01T00:00:00.000Z"}
    (copy / "set-aside" / "20260101T000000-seg.reason.json").write_text(json.dumps(note))
    with sqlite3.connect(copy / "state" / "ledger.db") as ledger:
        (name,) = ledger.execute("SELECT id FROM samples ORDER BY id LIMIT 1").fetchone()
        ledger.execute(
            "UPDATE samples SET state = 'set_aside', segment = NULL, failures = 3, reason = 'all zero'"
            " WHERE id = ?",
            (name,),
        )
    view = look(copy)
    assert view["failures"] == [{"id": name, "state": "set_aside", "failures": 3, "reason": "all zero"}]
    assert view["set_aside_samples"] == 1
    assert [moved["reason"] for moved in view["set_aside"]] == ["bit flip"]
    shown = eyas("status", "--project", copy).out
    assert name in shown
    assert "bit flip" in shown


def test_lines_fit_the_width(running: Path) -> None:
    view = project_status(Project.open(running))
    for width in (80, 120):
        assert all(len(line) <= width for line in status_lines(view, width))


def test_a_lost_ledger_is_named(copy: Path) -> None:
    for path in (copy / "state").glob("ledger.db*"):
        path.unlink()
    view = look(copy)
    assert [p for p in view["problems"] if "ledger" in p] == [
        "extract: the ledger is gone; eyas run rebuilds it from the segments"
    ]
    assert view["next_command"].startswith("eyas run")
    assert eyas("run", "--project", copy).code == 0
    assert look(copy)["problems"] == []


def test_half_broken_folders_are_still_shown(finished: Path, tmp_path: Path) -> None:
    """Each file that status reads is emptied, cut, overwritten, removed or made a folder."""
    seed, shown, refused = 11, 0, 0
    print(f"seed {seed}")
    source = random.Random(seed)
    names = [
        p.relative_to(finished)
        for p in sorted(finished.rglob("*"))
        if p.is_file() and p.suffix in (".json", ".jsonl", ".db", ".toml", ".parquet")
    ]
    assert len(names) > 15
    for number, name in enumerate(names):
        root = Path(shutil.copytree(finished, tmp_path / str(number), symlinks=True))
        path = root / name
        kind = source.choice(["empty", "cut", "noise", "json", "gone", "folder"])
        content = path.read_bytes()
        path.unlink()
        if kind == "empty":
            path.write_bytes(b"")
        elif kind == "cut":
            path.write_bytes(content[: len(content) // 2])
        elif kind == "noise":
            path.write_bytes(source.randbytes(max(64, len(content))))
        elif kind == "json":
            path.write_text('{"about": [], "files": 3, "at": {}, "lengths": 7}')
        elif kind == "folder":
            path.mkdir()
        done = eyas("status", "--project", root, "--json")
        if name == Path("eyas.toml"):
            assert done.code in (2, 10), (name, kind, done.out)
            refused += 1
        else:
            assert done.code == 0, (name, kind, done.out)
            jsonschema.validate(done.json, schema())
            shown += 1
        shutil.rmtree(root)
    print(f"{shown} folders shown, {refused} refused")
    assert refused == 1


def test_the_recent_events_of_a_long_log_are_its_first_and_its_end(tmp_path: Path) -> None:
    lines = [
        json.dumps({"at": f"t{i}", "attempt": 1, "kind": "message", "detail": {"text": "x" * 90}})
        for i in range(3000)
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    found = [event["at"] for event in recent_events(tmp_path, 20_000)]
    assert found[0] == "t0"
    assert found[-1] == "t2999"
    assert 50 < len(found) < 300
    assert found[1:] == [f"t{i}" for i in range(3000 - len(found) + 1, 3000)]


def test_the_schema_is_up_to_date() -> None:
    specification = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert (DOCS / "status.schema.json").read_text() == module.status_schema(), "run: make docs"


def test_watch_gives_a_line_a_look_and_ends_well_when_interrupted(fresh: Path) -> None:
    process = eyas_process("status", "--watch", "--json", "--every", "0.2", "--project", fresh)
    try:
        assert process.stdout is not None
        for _ in range(2):
            jsonschema.validate(json.loads(process.stdout.readline()), schema())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
        assert (process.returncode, err) == (0, "")
    finally:
        process.kill()
        process.communicate()
    assert eyas("status", "--watch", "--every", "0", "--project", fresh).code == 2
