"""The whole way through the real engines on a small set; each start of an engine takes about a minute."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from benchmarks.serving.acceptance import served_acceptance
from benchmarks.serving.own_way import own_server

from eyas.base.errors import EyasError
from eyas.base.layout import Layout
from eyas.stages.project import Project
from eyas.stages.stored_states import to_torch
from eyas.store.ledger import Ledger
from eyas.store.reader import StoreReader
from eyas.targets.compare import TOLERANCE, relative_error
from eyas.targets.serving.records import ServerBook
from tests.cli.command import eyas, eyas_process
from tests.servers.conftest import end_servers, write_project

pytestmark = [pytest.mark.servers, pytest.mark.timeout(5400)]

States = dict[str, tuple[torch.Tensor, torch.Tensor]]


def states_of(root: Path) -> States:
    layout = Layout(root)
    with Ledger.open_read_only(layout.ledger) as ledger:
        reader = StoreReader(layout.segments, ledger)
        return {
            sample.id: (to_torch(sample.aux).clone(), to_torch(sample.last).clone())
            for sample in reader.get_many(reader.ids(), check=True)
        }


def counts_of(root: Path) -> dict[str, int]:
    with Ledger.open_read_only(Layout(root).ledger) as ledger:
        return {state: samples for state, (samples, _) in ledger.counts().items()}


def sample_ids(root: Path) -> set[str]:
    table = pq.read_table(sorted(Layout(root).samples.glob("part-*.parquet")), columns=["id"])
    return set(table.column("id").to_pylist())


def require_same(found: States, expected: States) -> float:
    """All layers of all samples within the tolerance that tells a layer from its neighbours."""
    assert set(found) == set(expected)
    worst = 0.0
    for name, (aux, last) in expected.items():
        for slot in range(aux.shape[1]):
            worst = max(worst, relative_error(found[name][0][:, slot], aux[:, slot]))
            for other in range(aux.shape[1]):
                if other != slot:
                    assert relative_error(found[name][0][:, slot], aux[:, other]) > TOLERANCE
        worst = max(worst, relative_error(found[name][1], last))
    assert worst < TOLERANCE
    return worst


@pytest.fixture(scope="module")
def through_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project that went from prompts to an export with vLLM as its target."""
    root = write_project(tmp_path_factory.mktemp("vllm") / "p", "vllm")
    try:
        done = eyas("run", "--project", root)
        assert done.code == 0, done.err
        yield root
    finally:
        end_servers(root)


@pytest.fixture(scope="module")
def local_states(through_vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> States:
    """The same samples captured by transformers in this process."""
    root = copy_without_store(through_vllm, tmp_path_factory.mktemp("local") / "p")
    done = eyas("extract", "--project", root, "--set", "target.kind=local")
    assert done.code == 0, done.err
    return states_of(root)


def copy_without_store(source: Path, root: Path) -> Path:
    shutil.copytree(source, root, symlinks=True, ignore=shutil.ignore_patterns("dumps", "servers*"))
    shutil.rmtree(root / "store")
    (root / "state" / "ledger.db").unlink()
    return root


def test_vllm_and_the_local_target_give_the_same_states(through_vllm: Path, local_states: States) -> None:
    worst = require_same(states_of(through_vllm), local_states)
    print(f"vLLM against transformers: largest relative error {worst:.2g}")
    assert eyas("verify", "--deep", "--project", through_vllm).code == 0
    assert not list((through_vllm / "dumps").rglob("*.dump")), "dumps are left"


def test_the_same_vllm_serves_the_drafter_as_evaluate_measured_it(through_vllm: Path) -> None:
    found = served_acceptance(through_vllm, (), print)
    print(found)
    assert found.rounds > 50
    assert abs(found.served / found.evaluated - 1) <= 0.03
    assert found.different == 0, "a text differs from plain serving, and not by a numeric tie"
    assert found.equal + found.ties == found.num_answers


def test_sglang_gives_the_same_states(through_vllm: Path, local_states: States, tmp_path: Path) -> None:
    root = copy_without_store(through_vllm, tmp_path / "p")
    shutil.copy(write_project(tmp_path / "other", "sglang") / "eyas.toml", root / "eyas.toml")
    try:
        done = eyas("extract", "--project", root)
        assert done.code == 0, done.err
        worst = require_same(states_of(root), local_states)
        print(f"SGLang against transformers: largest relative error {worst:.2g}")
        noted = json.loads((root / "store/captured_by.json").read_text())["sources"]
        assert [entry["kind"] for entry in noted] == ["sglang"]
    finally:
        end_servers(root)


def test_sglang_without_the_plugin_gives_the_same_states_as_json(
    through_vllm: Path, local_states: States, tmp_path: Path
) -> None:
    root = copy_without_store(through_vllm, tmp_path / "p")
    shutil.copy(write_project(tmp_path / "other", "sglang") / "eyas.toml", root / "eyas.toml")
    project = Project.open(root)
    try:
        with own_server(project, tmp_path) as aux, own_server(project, tmp_path, last=True) as last:
            pair = (f'serve.urls=["{aux.url}"]', f'serve.last_urls=["{last.url}"]')
            done = eyas("extract", "--project", root, "--set", pair[0], "--set", pair[1])
            assert done.code == 0, done.err
            assert "(JSON) gives valid states; every layer" in done.err
        worst = require_same(states_of(root), local_states)
        print(f"SGLang's JSON against transformers: largest relative error {worst:.2g}")
        noted = json.loads((root / "store/captured_by.json").read_text())["sources"]
        assert [entry["engines"] for entry in noted] == [["sglang 0.5.23 (JSON)"]]
    finally:
        end_servers(root)


def test_sglang_gives_the_same_answers(through_vllm: Path, tmp_path: Path) -> None:
    root = write_project(tmp_path / "p", "sglang")
    try:
        for stage in ("prepare", "regenerate"):
            done = eyas(stage, "--project", root)
            assert done.code == 0, done.err
        # greedy in float32 from both engines; a sample's id is the hash of its token ids and spans
        assert sample_ids(root) == sample_ids(through_vllm)
    finally:
        end_servers(root)


def test_a_killed_server_is_started_again_and_the_run_ends_complete(
    through_vllm: Path, local_states: States, tmp_path: Path
) -> None:
    root = copy_without_store(through_vllm, tmp_path / "p")
    slow = ("--set", "client.tokens_in_flight=100")  # one request at a time: the kill falls in the middle
    process = eyas_process("extract", "--project", root, *slow)
    killed: list[int] = []

    def kill_the_engine() -> None:
        deadline = time.monotonic() + 3000
        while time.monotonic() < deadline and process.poll() is None:
            if anything_stored(root):
                break
            time.sleep(0.05)
        for pid in [record.process.pid for record in ServerBook(Layout(root).servers).read()]:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    killer = threading.Thread(target=kill_the_engine)
    killer.start()
    try:
        _, err = process.communicate(timeout=5000)
        killer.join(10)
        assert process.returncode == 0, err
        assert killed, "the server was not killed"
        assert "restarting the server" in err, "the kill came too late to be noticed"
        assert "proven" in err
        counts = counts_of(root)
        assert counts["stored"] == len(local_states) == sum(counts.values())
        require_same(states_of(root), local_states)
    finally:
        process.kill()
        end_servers(root)


def anything_stored(root: Path) -> bool:
    """False also while there is no ledger yet."""
    try:
        return counts_of(root)["stored"] > 0
    except (EyasError, OSError):
        return False
