"""With servers, one wave is captured while the one before it is trained; and what goes wrong meanwhile."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from eyas.base.layout import Layout
from eyas.drafter.passes import BatchPasses
from eyas.pipeline import waves as pipeline_waves
from eyas.stages.project import Project
from eyas.stages.waves import project_waves
from eyas.store.ledger import Ledger
from eyas.store.waves import WavePlan
from tests.cli.command import eyas, eyas_process
from tests.faults.small import LONG, SEED
from tests.projects import store_content, weights_digest
from tests.stages.served.helping import PATIENT, Servers
from tests.waves import BOUND, bounded_project, ids_of, states_of, store_bytes

NUM_KILLS = 30 if LONG else 4


@pytest.fixture(scope="module")
def bounded(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = bounded_project(tmp_path_factory.mktemp("bounded") / "p", target, epochs="6")
    assert eyas("run", "--project", root, "--until", "regenerate").code == 0
    return root


@pytest.fixture
def waves(bounded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bounded, tmp_path / "p", symlinks=True))


class Watch:
    """When which samples were committed and trained on; and the largest store at a commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, step_seconds: float = 0.0) -> None:
        self.commits: list[tuple[float, set[str]]] = []
        self.steps: list[tuple[float, set[str]]] = []
        self.most = 0
        commit, loss = Ledger.commit_segment, BatchPasses.loss

        def committed(ledger: Ledger, *arguments: Any, **options: Any) -> Any:
            done = commit(ledger, *arguments, **options)
            self.commits.append((time.monotonic(), set(done.stored)))
            self.most = max(self.most, store_bytes(root))
            return done

        def trained(passes: BatchPasses, batch: Any, *arguments: Any) -> Any:
            self.steps.append((time.monotonic(), set(batch.ids)))
            time.sleep(step_seconds)
            return loss(passes, batch, *arguments)

        monkeypatch.setattr(Ledger, "commit_segment", committed)
        monkeypatch.setattr(BatchPasses, "loss", trained)

    def trained_between(self, ids: set[str]) -> tuple[float, float]:
        times = [at for at, batch in self.steps if batch & ids]
        return min(times), max(times)

    def committed_at(self, ids: set[str]) -> list[float]:
        return [at for at, stored in self.commits if stored & ids]


def plan_of(root: Path) -> WavePlan:
    with Ledger.open_read_only(Layout(root).ledger) as ledger:
        plan = project_waves(Project.open(root), ledger)
    assert plan is not None
    return plan


def run(root: Path, *more: str) -> Any:
    words = ("--set", "target.kind=vllm", "--set", "extract.retry_seconds=0.01")
    return eyas("run", "--project", root, "--until", "train", *words, *PATIENT, *more)


def test_a_wave_is_captured_while_the_one_before_it_is_trained(
    waves: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.start("vllm", "slow@1+:0.05")
    watch = Watch(monkeypatch, waves, step_seconds=0.05)
    done = run(waves, "--set", "client.tokens_in_flight=60")
    assert done.code == 0, done.err
    assert servers.modes == ["capture"], "one session with the servers for all waves"
    plan = plan_of(waves)
    assert len(plan) >= 4
    overlaps = 0
    for number in range(1, len(plan)):
        before, ids = set(plan.waves[number - 1].ids), set(plan.waves[number].ids)
        first, last = watch.trained_between(before)
        overlaps += any(first < at < last for at in watch.committed_at(ids))
        assert max(watch.committed_at(ids)) < watch.trained_between(ids)[0], "trained only when it is whole"
    for number in range(2, len(plan)):
        gone = set(plan.waves[number - 2].ids)
        assert min(watch.committed_at(set(plan.waves[number].ids))) > watch.trained_between(gone)[1]
    print(f"{overlaps} of {len(plan) - 1} waves were captured while the one before was trained")
    assert overlaps >= len(plan) // 2
    assert 0 < watch.most <= BOUND
    kept, train = ids_of(waves, "validation"), ids_of(waves, "train")
    assert states_of(waves) == {"stored": len(kept), "released": len(train)}
    counts = [name for _, batch in watch.steps for name in batch]
    assert {name: counts.count(name) for name in set(counts)} == dict.fromkeys(train, 6)


def test_servers_that_hold_the_gpus_of_training_take_turns_with_it(
    waves: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_waves, "can_work_together", lambda config, gpus: False)
    servers.start("vllm")
    watch = Watch(monkeypatch, waves)
    done = run(waves)
    assert done.code == 0, done.err
    plan = plan_of(waves)
    assert servers.modes == ["capture"] * -(-len(plan) // 2), "a session for every two waves"
    for wave in plan.waves:
        first, last = watch.trained_between(set(wave.ids))
        assert not any(first < at < last for at, _ in watch.commits)
    assert 0 < watch.most <= BOUND


def test_a_lost_server_ends_the_run_after_the_wave_at_hand_and_it_goes_on(
    waves: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.start("vllm", "dies@12", "slow@1+:0.02")
    watch = Watch(monkeypatch, waves, step_seconds=0.02)
    stopped = run(waves, "--set", "client.tokens_in_flight=60", "--set", "serve.start_seconds=1")
    assert stopped.code == 13, stopped.err
    assert "training goes on to the end of its wave" in stopped.err
    states = states_of(waves)
    assert states["released"] > 0
    assert states.get("in_flight", 0) == 0
    servers.start("vllm")
    done = run(waves)
    assert done.code == 0, done.err
    kept, train = ids_of(waves, "validation"), ids_of(waves, "train")
    assert states_of(waves) == {"stored": len(kept), "released": len(train)}
    assert watch.most <= BOUND


@pytest.mark.parametrize("kind", ["nan", "500", "short"])
def test_faults_of_the_server_cost_no_sample(
    kind: str, waves: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.start("vllm", *(f"{kind}@{number}" for number in (5, 9, 13)))
    watch = Watch(monkeypatch, waves)
    done = run(waves)
    assert done.code == 0, done.err
    train = ids_of(waves, "train")
    counts = [name for _, batch in watch.steps for name in batch]
    assert {name: counts.count(name) for name in set(counts)} == dict.fromkeys(train, 6)


def served_by(root: Path, servers: Servers, epochs: int) -> Path:
    """A project that finds the running fake server by its own configuration."""
    [server] = servers.keeper.servers
    text = (root / "eyas.toml").read_text().replace("epochs = 6", f"epochs = {epochs}")
    text = text.replace("[target]", '[target]\nkind = "vllm"')
    text += f'\n[serve]\nurls = ["{server.url}"]\ndump_dir = "{server.dump_dir}"\n'
    (root / "eyas.toml").write_text(text)
    return root


def saved(root: Path) -> set[str]:
    """The names of what a killed run leaves: segments of the store, checkpoints of the drafter."""
    return {path.name for path in root.glob("store/segments/*")} | {
        path.name for path in root.glob("drafter/checkpoints/step-*")
    }


def test_killed_while_both_work_it_comes_to_the_same(bounded: Path, servers: Servers, tmp_path: Path) -> None:
    """The fake server gives the same states whatever it does beside, so even the weights are the same."""
    servers.start("vllm", "slow@1+:0.05")
    rng, ends, kills, unbroken = Random(SEED), [], 0, 0.0
    for name in ("unbroken", "killed"):
        root = served_by(Path(shutil.copytree(bounded, tmp_path / name, symlinks=True)), servers, 8)
        begun = time.monotonic()
        while True:
            before = saved(root)
            process = eyas_process("run", "--project", root, "--until", "train")
            if name == "killed" and kills < NUM_KILLS:
                # each of the runs saves something new before it is killed, at a moment that nobody chose
                while process.poll() is None and saved(root) == before:
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, unbroken / NUM_KILLS))
                process.kill()
            _, err = process.communicate(timeout=300)
            assert store_bytes(root) <= BOUND
            if process.returncode == 0:
                break
            assert process.returncode == -9, err
            kills += 1
        unbroken = unbroken or time.monotonic() - begun
        kept, train = ids_of(root, "validation"), ids_of(root, "train")
        assert states_of(root) == {"stored": len(kept), "released": len(train)}
        ends.append((weights_digest(root), store_content(root)))
    print(f"seed {SEED}: {kills} kills")
    assert kills >= NUM_KILLS / 2
    assert ends[0] == ends[1]


def test_both_stop_on_a_signal_and_go_on(waves: Path, servers: Servers) -> None:
    servers.start("vllm", "slow@1+:0.05")
    served_by(waves, servers, 60)
    process = eyas_process("run", "--project", waves, "--until", "train")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if any((waves / "drafter" / "checkpoints").glob("step-*")):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert states_of(waves).get("in_flight", 0) == 0
    status = eyas("status", "--project", waves, "--json").json
    assert status["last_attempt"]["outcome"] == "Stopped"
