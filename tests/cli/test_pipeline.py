"""The whole pipeline on a tiny random target, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eyas.base.seal import seal_faults
from eyas.pipeline.lock import hold_lock
from tests.cli.command import eyas, eyas_process
from tests.projects import make_project, outcome, store_content, tiny_target, weights_digest
from tests.recovery.incident import wait_until_idle

STAGE_NAMES = ["prepare", "regenerate", "extract", "train", "evaluate", "export"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def finished(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that ran through in one go; tests copy it."""
    root = make_project(tmp_path_factory.mktemp("finished") / "p", target)
    done = eyas("run", "--project", root)
    assert done.code == 0, done.err
    assert "nothing to do" in done.err
    return root


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "p", symlinks=True))


def test_everything_is_there_and_a_second_run_finds_nothing_to_do(finished: Path) -> None:
    again = eyas("run", "--project", finished, "--json")
    assert again.code == 0
    assert again.json["ran"] == []
    assert again.json["left"] == []
    view = eyas("status", "--project", finished, "--json").json
    assert [(s["name"], s["state"]) for s in view["stages"]] == [(name, "done") for name in STAGE_NAMES]
    assert view["next_command"] is None
    report = json.loads((finished / "reports" / "evaluation.json").read_text())
    assert report["num_prompts"] >= 2
    assert report["lossless"]["equal"] == report["num_answers"]
    assert sum(row["num_prompts"] for row in report["domains"].values()) == report["num_prompts"]
    predicted = report["prediction"]["rows"]
    assert [row["num_drafts"] for row in predicted] == list(range(1, 9))
    metrics = [json.loads(line) for line in (finished / "drafter" / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in metrics if row["kind"] == "validation"][-1]
    assert predicted[2]["acceptance_length"] == pytest.approx(last["walk_tau"])
    assert all(row["low"] <= row["acceptance_length"] <= row["high"] for row in predicted)
    export = finished / "exports" / "eagle3"
    assert seal_faults(export) == []
    assert "Acceptance" in (export / "README.md").read_text()
    looked = eyas("inspect", export, "--json")
    assert looked.code == 0
    assert looked.json["faults"] == 0


def test_stopping_after_each_stage_changes_nothing(finished: Path, target: Path, tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", target)
    for name in STAGE_NAMES:
        plan = {
            s["stage"]: s["action"]
            for s in eyas("run", "--dry-run", "--project", root, "--json").json["plan"]
        }
        assert plan[name] in ("run", "resume")
        done = eyas(name, "--project", root)
        assert done.code == 0, done.err
        states = {s["name"]: s["state"] for s in eyas("status", "--project", root, "--json").json["stages"]}
        assert states[name] == "done"
    assert outcome(root) == outcome(finished)


def test_terminated_in_the_middle_and_resumed(finished: Path, target: Path, tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", target)
    stops = 0
    for needle in ('"label": "capture"', '"label": "train"'):
        process = eyas_process("run", "--project", root)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            log = root / "logs" / "latest" / "events.jsonl"
            if log.exists() and needle in log.read_text():
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.005)
        _, err = process.communicate(timeout=180)
        if process.returncode != 0:
            assert process.returncode == 143, err
            assert "state saved" in err
            stops += 1
    assert stops >= 1
    assert eyas("run", "--project", root).code == 0
    assert outcome(root) == outcome(finished)


def test_a_changed_recipe_is_refused_with_the_fields_and_redone_when_asked(copy: Path) -> None:
    before = store_content(copy), weights_digest(copy)
    refused = eyas("run", "--project", copy, "--set", "extract.aux_layers=[1,2,5]")
    assert refused.code == 2
    assert "aux_layers: [1, 3, 5] -> [1, 2, 5]" in refused.err
    assert "--redo extract" in refused.err
    refused = eyas("run", "--project", copy, "--set", "train.lr=0.5")
    assert refused.code == 2
    assert "train.lr: 0.001 -> 0.5" in refused.err
    assert (store_content(copy), weights_digest(copy)) == before
    redone = eyas(
        "run",
        "--project",
        copy,
        "--set",
        "extract.aux_layers=[1,2,5]",
        "--redo",
        "extract",
        "--redo",
        "train",
    )
    assert redone.code == 0, redone.err
    assert store_content(copy).keys() == before[0].keys()
    assert store_content(copy) != before[0]
    moved = [path.name for path in (copy / "set-aside").iterdir()]
    assert any("store" in name for name in moved)
    assert any("drafter" in name for name in moved)


def test_one_stage_in_another_arithmetic_is_no_reason_to_redo_what_it_reads(copy: Path) -> None:
    before = store_content(copy), weights_digest(copy)
    measured = eyas("evaluate", "--redo", "--project", copy, "--set", "target.dtype=float64")
    assert measured.code == 0, measured.err
    assert json.loads((copy / "reports" / "evaluation.json").read_text())["dtype"] == "float64"
    assert (store_content(copy), weights_digest(copy)) == before
    last = measured.err.rstrip().splitlines()[-1]
    assert "--redo" not in last
    assert "--set" not in last
    # what comes after it was told the same
    trained = eyas("train", "--redo", "--project", copy, "--set", "train.lr=0.5")
    assert trained.code == 0, trained.err
    assert trained.err.rstrip().splitlines()[-1] == f"next: eyas run --project {copy} --set train.lr=0.5"


def test_nothing_is_set_aside_for_a_target_that_is_not_there(copy: Path, tmp_path: Path) -> None:
    refused = eyas("evaluate", "--redo", "--project", copy, "--set", f"target.model={tmp_path / 'gone'}")
    assert refused.code == 2
    assert "config.json" in refused.err
    assert (copy / "reports" / "evaluation.json").is_file()
    assert not list(copy.glob("set-aside/*"))


def test_what_a_killed_run_was_given_goes_on_with_it(finished: Path, target: Path, tmp_path: Path) -> None:
    """--set counts for the run it was given to, however often that is taken up again."""
    root = make_project(tmp_path / "p", target)
    given = ("--set", "train.lr=0.002", "--set", 'notify.urls=["json://name:secret@127.0.0.1:9"]')
    process = eyas_process("run", "--project", root, *given)
    checkpoints = root / "drafter" / "checkpoints"
    while process.poll() is None and not any(checkpoints.glob("step-*")):
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert process.returncode == -9
    assert not any("secret" in path.read_text(errors="replace") for path in root.glob("logs/*/*"))
    again = f"eyas run --project {root} --set train.lr=0.002"
    view = eyas("status", "--project", root, "--json").json
    assert view["next_command"] == again
    assert {stage["name"]: stage["state"] for stage in view["stages"]}["train"] == "partial"
    for _ in range(2):
        refused = eyas("run", "--project", root)
        assert refused.code == 2
        assert "--set train.lr=0.002 (as attempt-0001 was given)" in refused.err
    assert eyas("status", "--project", root, "--json").json["next_command"] == again, "refused runs are none"
    assert "another recipe" not in eyas("doctor", "--project", root).out
    recovered = eyas("recover", "--project", root)
    assert recovered.code == 0, recovered.err
    assert "as attempt-0001 was given: --set train.lr=0.002" in recovered.err
    wait_until_idle(root)
    by_file = make_project(tmp_path / "q", target)
    text = (by_file / "eyas.toml").read_text()
    assert "\nlr = 1e-3\n" in text
    (by_file / "eyas.toml").write_text(text.replace("\nlr = 1e-3\n", "\nlr = 0.002\n"))
    assert eyas("run", "--project", by_file).code == 0
    assert weights_digest(root) == weights_digest(by_file)
    states = {s["name"]: s["state"] for s in eyas("status", "--project", root, "--json").json["stages"]}
    assert states["train"] == "stale", "it came to its end: eyas.toml alone counts again"


def test_changed_data_is_taken_in_and_known_captures_are_kept(copy: Path) -> None:
    before = store_content(copy)
    with open(copy / "prompts.jsonl", "a") as file:
        file.write('{"turns": ["one more about a heron"], "domain": "even"}\n')
    planned = {s["stage"]: s for s in eyas("run", "--dry-run", "--project", copy, "--json").json["plan"]}
    assert planned["prepare"]["action"] == "redo"
    done = eyas("run", "--project", copy, "--until", "extract", "--json")
    assert done.code == 0
    assert done.json["numbers"]["extract"]["captured"] == 1
    after = store_content(copy)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 1


def test_status_imports_no_torch_and_finds_a_killed_run(copy: Path) -> None:
    script = (
        "import sys; from eyas.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy)); sys.exit(code)"
    )
    for words in (["status", "--project", str(copy)], ["--help"], ["run", "--help"]):
        seen = subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, text=True, check=True
        )
        loaded = seen.stdout.rpartition("HEAVY")[2]
        assert "torch" not in loaded, words
        assert "transformers" not in loaded, words
    log = copy / "logs" / "latest" / "events.jsonl"
    log.write_text("\n".join(log.read_text().splitlines()[:-1]))
    assert "did not end by itself" in eyas("status", "--project", copy).out


def test_a_second_writer_exits_11(copy: Path) -> None:
    with hold_lock(copy / "state", "train"):
        blocked = eyas("run", "--project", copy)
        assert blocked.code == 11
        assert str(os.getpid()) in blocked.err
        assert eyas("status", "--project", copy).code == 0


@pytest.mark.parametrize("kind", ["cut", "flip"])
def test_a_damaged_segment_is_set_aside_and_redone(copy: Path, finished: Path, kind: str) -> None:
    victim = sorted((copy / "store" / "segments").glob("seg-*"))[0]
    data = bytearray(victim.read_bytes())
    if kind == "cut":
        data = data[:-100]
    else:
        data[20] ^= 1  # in the header, which every start looks at
    victim.write_bytes(data)
    (copy / "drafter").rename(copy / "old-drafter")
    done = eyas("run", "--project", copy)
    assert done.code == 0, done.err
    assert victim.name in done.err
    assert store_content(copy) == store_content(finished)
    assert weights_digest(copy) == weights_digest(finished)
    assert any(victim.name in path.name for path in (copy / "set-aside").iterdir())


def test_detach_logs_and_stop(target: Path, tmp_path: Path) -> None:
    root = make_project(tmp_path / "p", target)
    started = eyas_process("run", "--detach", "--project", root, "--json")
    out, err = started.communicate(timeout=180)
    assert started.returncode == 0, err
    pid = json.loads(out)["pid"]
    follow = eyas_process("logs", "--follow", "--project", root)
    text, _ = follow.communicate(timeout=400)
    assert "attempt started" in text
    assert "attempt ended" in text
    assert f"process {pid}" in text
    assert eyas("stop", "--project", root).code == 0
    assert eyas("status", "--project", root, "--json").json["next_command"] is None


def test_events_of_any_attempt_can_be_read(finished: Path) -> None:
    lines = eyas("logs", "--project", finished, "--attempt", "1", "--json").out.splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert events[0]["event"] == "attempt started"
    assert [e["stage"] for e in events if e["event"] == "stage ended"] == STAGE_NAMES
    assert eyas("logs", "--project", finished, "--attempt", "77").code == 2
