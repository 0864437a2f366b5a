"""A store with a bound: what the verbs say of it, and what is refused."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

import eyas as package
from tests.cli.command import eyas
from tests.projects import outcome, weights_digest
from tests.recovery.incident import wait_until_idle
from tests.waves import (
    BOUND,
    change,
    ids_of,
    run_into_the_waves,
    states_of,
    store_bytes,
    waves_of,
)


def test_an_outer_launcher_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pair in ("RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1"):
        monkeypatch.setenv(*pair.split("="))
    refused = eyas("run", "--project", project)
    assert refused.code == 2
    assert "outer launcher" in refused.err
    assert states_of(project).get("stored", 0) == 0


def test_a_bound_that_is_too_small_is_refused_before_anything_is_captured(project: Path) -> None:
    change(project, f'max_bytes = "{BOUND}"', 'max_bytes = "200kB"')
    for words in (["run"], ["extract"], ["run", "--dry-run"]):
        refused = eyas(*words, "--project", project)
        assert refused.code == 2, words
        assert "too small" in refused.err
        assert "set store.max_bytes to at least" in refused.err
    assert not list((project / "store").glob("segments/*"))


def test_a_bound_above_the_budget_is_refused(project: Path) -> None:
    change(project, "[disk]", '[disk]\nbudget = "100kB"')
    refused = eyas("status", "--project", project)
    assert refused.code == 2
    assert "disk.budget" in refused.err


def test_a_dry_run_says_what_the_bound_comes_to(project: Path, trained: Path) -> None:
    text = eyas("run", "--dry-run", "--project", project).out
    found = eyas("run", "--dry-run", "--project", project, "--json").json["forecast"]["waves"]
    record = waves_of(trained)
    assert found["count"] == record["waves"]
    assert (
        found["captures"]
        == record["captures"]
        == len(ids_of(trained, "train") | ids_of(trained, "validation"))
    )
    assert found["at_once_bytes"] <= found["max_bytes"] == BOUND
    assert f"{record['waves']} waves" in text
    assert "captures" in text


def test_redoing_the_training_captures_again_and_says_so(trained: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(trained, tmp_path / "p", symlinks=True))
    released = len(ids_of(root, "train"))
    plan = eyas("run", "--redo", "train", "--dry-run", "--project", root)
    assert f"{released} released samples are captured again" in " ".join(plan.out.split())
    done = eyas("run", "--redo", "train", "--project", root)
    assert done.code == 0, done.err
    assert f"{released} released samples are needed again" in done.err
    assert weights_digest(root) == weights_digest(trained)
    assert states_of(root) == states_of(trained)


def test_a_changed_bound_is_a_changed_recipe(trained: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(trained, tmp_path / "p", symlinks=True))
    before = states_of(root)
    for new in ("", f'max_bytes = "{BOUND + 40_000}"', f'max_bytes = "{BOUND}"\nrecapture = true'):
        text = (trained / "eyas.toml").read_text()
        (root / "eyas.toml").write_text(text.replace(f'max_bytes = "{BOUND}"', new))
        refused = eyas("run", "--project", root)
        assert refused.code == 2, new
        assert "--redo train" in refused.err
        assert states_of(root) == before, "nothing was captured for a training that is refused"


def test_a_finished_project_has_nothing_to_do_and_a_healthy_doctor(trained: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(trained, tmp_path / "p", symlinks=True))
    steps = eyas("run", "--dry-run", "--project", root, "--json").json["plan"]
    assert [step["action"] for step in steps] == ["skip"] * 6
    assert eyas("verify", "--deep", "--project", root).code == 0
    doctor = eyas("doctor", "--deep", "--project", root, "--json")
    bad = [line for line in doctor.json["checks"] if line["state"] in ("damage", "failed")]
    assert not bad, bad
    status = eyas("status", "--project", root, "--json").json
    waves = status["waves"]
    assert waves["waves_over"] == waves["waves"] == waves_of(root)["waves"]
    assert waves["stored"] == len(ids_of(root, "validation"))
    assert waves["released"] == len(ids_of(root, "train"))
    assert waves["store_bytes"] == store_bytes(root)
    assert status["next_command"] is None
    extract = next(stage for stage in status["stages"] if stage["name"] == "extract")
    assert (extract["state"], extract["done"]) == ("done", extract["total"])
    assert "waves are over" in eyas("status", "--project", root).out


def test_doctor_and_recover_are_calm_in_the_middle(project: Path, trained: Path) -> None:
    run_into_the_waves(project, lambda: bool(states_of(project).get("released")))
    doctor = eyas("doctor", "--project", project, "--json")
    bad = [line for line in doctor.json["checks"] if line["state"] in ("damage", "failed")]
    assert not bad, bad
    assert eyas("verify", "--project", project).code == 0
    states = states_of(project)
    assert eyas("store", "repair", "--project", project).code == 0
    assert states_of(project) == states
    for path in (project / "state").glob("ledger.db*"):
        path.unlink()
    assert eyas("store", "repair", "--project", project).code == 0
    rebuilt = states_of(project)
    assert rebuilt["released"] >= states["released"]
    assert sum(rebuilt.values()) == sum(states.values())
    assert eyas("run", "--project", project).code == 0
    assert outcome(project) == outcome(trained)


def test_recover_alone_brings_back_a_run_that_was_killed_in_the_middle(project: Path, trained: Path) -> None:
    run_into_the_waves(project, lambda: bool(states_of(project).get("released")))
    for path in (project / "state").glob("ledger.db*"):
        path.unlink()
    done = eyas("recover", "--project", project)
    assert done.code == 0, done.err
    wait_until_idle(project)
    assert outcome(project) == outcome(trained)
    todos = eyas("todo", "--project", project, "--all", "--json").json["todos"]
    assert todos
    assert {todo["status"] for todo in todos} == {"completed"}, todos


def test_what_would_break_a_bound_is_refused(trained: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(trained, tmp_path / "p", symlinks=True))
    (tmp_path / "old").mkdir()
    for words in (["store", "compact"], ["store", "import", str(tmp_path / "old")]):
        refused = eyas(*words, "--project", root)
        assert refused.code == 2, words
        assert "store.max_bytes" in refused.err


def test_stored_samples_are_listed_and_exported_and_released_ones_are_said(
    trained: Path, tmp_path: Path
) -> None:
    kept, train = ids_of(trained, "validation"), ids_of(trained, "train")
    listed = eyas("store", "ls", "--project", trained, "--json").json
    assert sum(segment["samples"] for segment in listed["segments"]) == len(kept)
    assert listed["released"]["samples"] == len(train)
    exported = eyas("store", "export", tmp_path / "out", "--project", trained, "--json").json
    assert (exported["samples"], exported["released"]) == (len(kept), len(train))
    opened = package.open(trained)
    assert set(opened.stored_ids()) == kept
    assert Counter(opened.samples().column("state").to_pylist()) == {
        "stored": len(kept),
        "released": len(train),
    }
    opened.states(min(kept))
    with pytest.raises(KeyError):
        opened.states(min(train))
    report = eyas("report", "--format", "md", "--project", trained)
    assert report.code == 0, report.err
    assert eyas("store", "gc", "--project", trained).code == 0
