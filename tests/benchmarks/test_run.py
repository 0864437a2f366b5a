"""The harness and its quick benchmarks, on something tiny: they run, and print what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.serving.acceptance import served_acceptance

from eyas.stages.evaluate import prompts as prompts_module
from eyas.targets.fake.drafts import FakeDrafting
from eyas.targets.local.model import LocalTarget
from tests.cli.command import eyas
from tests.projects import make_project, tiny_target
from tests.targets.server.fakes import fake_server, tiny_server_model
from tests.tiny import save_tiny_target

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"


def call(*words: str) -> list[str]:
    done = subprocess.run([sys.executable, str(RUN), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_list_names_every_benchmark_with_what_it_measures() -> None:
    lines = call("--list")
    files = {path.stem for path in RUN.parent.glob("*.py")} - {"run"}
    assert {line.split()[0] for line in lines} == files
    assert all(len(line.split()) > 3 for line in lines)
    assert call() == lines


def test_an_unknown_name_is_a_usage_error() -> None:
    done = subprocess.run([sys.executable, str(RUN), "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "startup" in done.stderr


def test_startup_loads_no_torch() -> None:
    result = json.loads(call("startup", "--repeats", "1", "--samples", "100")[-1])
    assert list(result) == ["name", "value", "unit", "baseline", "ratio", "details"]
    assert result["details"]["heavy_modules_loaded"] == {"help": [], "status": []}
    assert result["ratio"] == pytest.approx(result["value"] / result["baseline"], rel=0.05)


def test_extract_measures_the_stage_itself(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny_target(model)
    words = ("--model", str(model), "--tokens", "600", "--rounds", "1", "--folder", str(tmp_path))
    result = json.loads(call("extract", *words)[-1])
    assert result["unit"] == "tokens/s"
    assert result["details"]["bytes"] > 0
    assert result["details"]["tokens"] >= 600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    root = make_project(folder / "p", tiny_target(folder / "model"), count=12)
    assert eyas("run", "--project", root).code == 0
    return root


def test_tree_is_measured_beside_the_chain(project: Path) -> None:
    words = ("--project", str(project), "--prompts", "3", "--max-new-tokens", "12", "--total", "2,12")
    result = json.loads(call("tree", *words)[-1])
    ways = result["details"]["ways"]
    assert set(ways) == {"chain", "tree of 2", "tree of 12"}
    assert all(row["equal_texts"] == result["details"]["prompts"] > 0 for row in ways.values())
    assert result["baseline"] == ways["chain"]["acceptance_length"]
    assert result["value"] == max(ways[name]["acceptance_length"] for name in ways if name != "chain")


def test_agreement_of_prediction_and_decoding(project: Path) -> None:
    words = ("--project", str(project), "--prompts", "3", "--max-new-tokens", "12", "--no-server")
    result = json.loads(call("agreement", *words)[-1])
    chains = result["details"]["chains"]
    assert set(chains) == {"1", "3", "5"}
    assert result["details"]["dtype"] == "float32"
    assert all(set(row) == {"predicted", "local", "predicted_along_local"} for row in chains.values())
    assert all(row["local"] >= 1 for row in chains.values())
    assert result["details"]["texts_equal_to_plain"] == {k: {"local": 3} for k in ("1", "3", "5")}
    # in float32 all texts are one
    assert all(row["predicted"] == row["predicted_along_local"] for row in chains.values())
    differences = [abs(row["predicted"] / row["local"] - 1) for row in chains.values()]
    assert result["value"] == pytest.approx(max(differences), abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [(["evaluate.max_new_tokens=5"], "same settings first: stale"), ([], "answers to 1 prompts")],
)
def test_served_acceptance_wants_an_evaluation_of_the_same_answers(
    project: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], said: str
) -> None:
    known = prompts_module.held_out_conversations
    monkeypatch.setattr(prompts_module, "held_out_conversations", lambda *words: known(*words)[:1])
    with pytest.raises(SystemExit, match=said):
        served_acceptance(project, settings, print)


def test_quality_on_a_few_answers(project: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    rows = [{"prompt_ids": [5 + i, 6, 7], "output_ids": [9, 10 + i, 11, 2]} for i in range(24)]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"w {d}", "domain": d}) + "\n" for d in "ab"))
    words = ("--model", str(project.parent / "model"), "--answers", str(answers), "--held-out", str(held_out))
    small = ("--set", "train.epochs=1", "--set", "evaluate.max_new_tokens=6", "--set", "data.validation=0.2")
    result = json.loads(call("quality", *words, *small)[-1])
    domains = result["details"]["domains"]
    assert set(domains) == {"a", "b"}
    assert result["value"] == pytest.approx(sum(domains.values()) / 2, abs=1e-3)
    curve = result["details"]["curve"]
    assert 0 < curve[0]["tokens"] <= curve[-1]["tokens"]
    assert 0 < curve[0]["minutes"] <= curve[-1]["minutes"]
    assert curve[-1]["walk_tau"] >= 1


def test_served_speed_against_servers_that_pretend(project: Path, tmp_path: Path) -> None:
    folder = project.parent / "model"
    target = LocalTarget.load(folder)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"bird {i}"}) + "\n" for i in range(4)))
    model = tiny_server_model(target, "vllm", (1, 3, 5))
    drafting = FakeDrafting(3, (3,))
    with (
        fake_server(model, folder, "vllm", None, drafting=drafting, round_seconds=0.01) as fast,
        fake_server(model, folder, "vllm", None, round_seconds=0.01) as plain,
    ):
        words = ("--url", fast.url, "--plain-url", plain.url, "--prompts", str(prompts))
        result = json.loads(call("served-speed", *words, "--max-tokens", "17", "--rounds", "2")[-1])
    chain = result["details"]["chains"]["3"]
    assert result["details"]["best_num_drafts"] == chain["advised_num_drafts"] == 3
    assert chain["acceptance_length"] == 4.0  # every draft is taken
    assert chain["texts"] == {"compared": 4, "equal": 4}
    assert len(chain["speedup_of_rounds"]) == 2
    assert result["ratio"] == pytest.approx(result["value"] / result["baseline"], rel=1e-3)
    assert result["ratio"] == chain["speedup"] > 1.2


def test_waves_measures_both_ways_on_the_same_answers(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny_target(model)
    words = ("--model", str(model), "--prompts", "30", "--epochs", "2", "--seconds", "0.01")
    result = json.loads(call("waves", *words, "--waves", "4", "--folder", str(tmp_path))[-1])
    details = result["details"]
    assert result["unit"] == "s"
    assert details["waves"] >= 2
    assert 0 < details["most_bytes"] <= details["bound_bytes"] < details["unbounded_bytes"]
    assert 0 <= details["overlap"] <= 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
