"""Doctor and todo as a person and an agent call them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.cli.command import eyas
from tests.projects import make_project, tiny_target


def test_doctor_tells_the_mending_command_and_the_worst_exit_code(tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=4)
    assert eyas("run", "--until", "extract", "--project", root).code == 0
    segment = sorted((root / "store" / "segments").glob("*.safetensors"))[0]
    os.truncate(segment, 100)
    seen = eyas("doctor", "--project", root)
    assert seen.code == 14
    lines = seen.out.splitlines()
    (number,) = [i for i, line in enumerate(lines) if line.startswith("damage  store")]
    assert segment.name in lines[number]
    assert lines[number + 1].strip() == f"-> eyas recover --project {root}"
    assert all(
        line[:8].strip() in {"ok", "skipped", "unknown", "warn", "damage", "failed", ""} for line in lines
    )
    assert f"next: eyas recover --project {root}" in seen.err
    told = eyas("doctor", "--json", "--project", root)
    assert (told.code, told.json["worst"]) == (14, "damage")
    (line,) = [check for check in told.json["checks"] if check["check"] == "store"]
    assert line["findings"][0]["code"] == "segment-damaged"
    verbose = eyas("doctor", "-v", "--project", root)
    others = [path for path in segment.parent.iterdir() if path != segment]
    assert f"{segment.name}  " in verbose.out
    assert re.search(rf"{segment.name}  \d+ samples? expected, \d+ found, damaged: \w+", verbose.out)
    assert all(re.search(rf"{path.name}  \d+ samples? expected, \d+ found\n", verbose.out) for path in others)


def test_todo_is_one_object_for_todo_tools(tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=4)
    assert eyas("todo", "--json", "--project", root).json == {"todos": []}
    assert eyas("run", "--until", "extract", "--project", root).code == 0
    told = eyas("todo", "--json", "--project", root).json
    assert list(told) == ["todos"]
    for todo in told["todos"]:
        assert set(todo) == {"id", "content", "priority", "status", "depends_on", "evidence"}
        assert todo["priority"] in ("high", "medium", "low")
        assert todo["status"] in ("pending", "in_progress", "completed", "blocked", "cancelled")
    history = eyas("todo", "--json", "--history", "--project", root).json["history"]
    (captured,) = [changes for id_, changes in history.items() if id_.endswith("/capture")]
    assert [change["status"] for change in captured] == ["pending", "in_progress", "completed"]


def test_todos_of_a_lost_ledger_come_back(tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=4)
    assert eyas("run", "--until", "extract", "--project", root).code == 0
    before = eyas("todo", "--json", "--project", root).json
    assert before["todos"]
    for path in (root / "state").glob("ledger.db*"):
        path.unlink()
    told = eyas("todo", "--project", root)
    assert "the ledger is gone" in told.err
    assert told.err.splitlines()[-1] == f"next: eyas recover --project {root}"
    assert eyas("recover", "--only", "ledger", "--project", root).code == 0
    ids = {todo["id"]: todo for todo in eyas("todo", "--all", "--json", "--project", root).json["todos"]}
    assert [ids[todo["id"]] for todo in before["todos"]] == before["todos"]


def test_a_host_that_is_not_declared(tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"), count=2)
    for words in (
        ("doctor", "--host", "nowhere"),
        ("push", "--host", "nowhere"),
        ("status", "--host=nowhere"),
    ):
        done = eyas(*words, "--project", root)
        assert done.code == 2
        assert "nowhere" in done.err
    assert eyas("push", "--project", root).code == 2
