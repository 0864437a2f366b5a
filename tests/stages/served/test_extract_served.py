"""Extract through fake servers: complete or stopped with the right code, and never wrong."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections import namedtuple
from pathlib import Path
from random import Random
from typing import Any

import pytest

from eyas.base.layout import Layout
from eyas.store.ledger import Ledger
from tests.cli.command import eyas, eyas_process
from tests.stages.served.helping import (
    Servers,
    counts_of,
    extract,
    num_samples,
    require_true_states,
)
from tests.targets.server.fakes import ENGINES, Engine

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_whole_extraction(
    engine: Engine, project: Path, target: Path, servers: Servers, tmp_path: Path
) -> None:
    servers.start(engine)
    done = extract(project, engine)
    assert done.code == 0, done.err
    assert "every layer and the last state compared with transformers" in done.err
    assert servers.modes == ["capture"]
    total = num_samples(project)
    assert counts_of(project) == {
        "stored": total,
        "pending": 0,
        "in_flight": 0,
        "failed": 0,
        "set_aside": 0,
        "released": 0,
    }
    assert require_true_states(project, target) == total
    assert [p.name for p in (tmp_path / "dumps-0").iterdir()] == ["eyas-owner.json"], "dumps stay behind"
    assert eyas("verify", "--deep", "--project", project).code == 0


def test_engines_may_be_changed_when_their_states_agree(
    project: Path, target: Path, servers: Servers
) -> None:
    """vLLM gives half, SGLang goes on, the local target ends it; each proves stored samples first."""
    total = num_samples(project)
    one_by_one = ("--set", "client.tokens_in_flight=1", "--set", "serve.start_seconds=1")
    servers.start("vllm", "dies@5")
    stopped = extract(project, "vllm", *one_by_one, "--set", "extract.recheck=0")
    assert stopped.code == 13, stopped.err
    some = counts_of(project)["stored"]
    assert 0 < some < total
    assert sum(counts_of(project).values()) == total
    assert counts_of(project)["in_flight"] == 0
    servers.start("sglang", f"dies@{4 + 3 + 1}")
    again = extract(project, "sglang", *one_by_one, "--set", "extract.recheck=0")
    assert again.code == 13, again.err
    assert "stored samples come out the same" in again.err, "another engine is compared whatever recheck says"
    assert some < counts_of(project)["stored"] < total
    done = eyas("extract", "--project", project, "--set", "extract.recheck=0")
    assert done.code == 0, done.err
    assert "stored samples come out the same" in done.err
    assert require_true_states(project, target) == total
    noted = json.loads((project / "store/captured_by.json").read_text())["sources"]
    assert [entry["kind"] for entry in noted] == ["vllm", "sglang", "local"]


def test_other_layers_than_stored_are_refused(project: Path, servers: Servers) -> None:
    servers.start("vllm", right=False)
    done = extract(project, "vllm")
    assert done.code == 2, done.err
    assert "wrong_layers" in done.err
    assert counts_of(project)["stored"] == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_model_is_refused(engine: Engine, project: Path, servers: Servers) -> None:
    [server] = servers.start(engine, "wrong-model@1+")
    done = extract(project, engine)
    assert done.code == 2, done.err
    assert "wrong_model" in done.err or "other_token" in done.err or "wrong_states" in done.err
    assert counts_of(project)["stored"] == 0
    assert server.settings.served_name != "another-model"


def test_a_server_that_never_answers(project: Path, servers: Servers) -> None:
    [server] = servers.start("vllm")
    server.die()
    done = extract(project, "vllm", "--set", "serve.start_seconds=1")
    assert done.code == 13, done.err
    assert "unreachable" in done.err
    assert counts_of(project)["pending"] == num_samples(project)


@pytest.mark.parametrize("kind", ["nan", "500", "half", "no-echo", "wrong-layer"])
def test_a_server_that_turns_bad_stops_the_run_and_blames_no_sample(
    kind: str, project: Path, target: Path, servers: Servers
) -> None:
    [server] = servers.start("vllm", f"{kind}@4+")
    done = extract(project, "vllm", "--set", "serve.start_seconds=2")
    assert done.code in (2, 13), done.err
    assert server.caused[kind] >= 3
    counts = counts_of(project)
    assert counts["set_aside"] == counts["failed"] == counts["in_flight"] == 0
    assert sum(counts.values()) == num_samples(project)
    assert require_true_states(project, target) == counts["stored"] <= 2
    servers.start("vllm")
    healed = extract(project, "vllm")
    assert healed.code == 0, healed.err
    assert require_true_states(project, target) == num_samples(project)


def test_a_poison_sample_is_set_aside_with_its_code(
    project: Path, target: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sample's states are infinite each time; the others are stored, exit code 3 says so."""
    from eyas.store.samples import read_samples
    from eyas.targets.fake.dumps import TinyModel, spoiled

    samples = list(read_samples(Layout(project).samples))
    poison = max(samples, key=lambda sample: len(sample.tokens))
    real, hits = TinyModel.states, [0]

    def poisoned(self: TinyModel, tokens: Any, layers: Any = None) -> Any:
        states = real(self, tokens, layers)
        if list(tokens) == poison.tokens.tolist():
            hits[0] += 1
            return spoiled("infinite", states, self)
        return states

    monkeypatch.setattr(TinyModel, "states", poisoned)
    servers.start("sglang")
    done = extract(project, "sglang")
    assert done.code == 3, done.err
    assert hits[0] >= 3
    counts = counts_of(project)
    assert counts["set_aside"] == 1
    assert sum(counts.values()) == len(samples)
    with Ledger.open_read_only(Layout(project).ledger) as ledger:
        [failed] = ledger.failed_samples()
    assert (failed.id, failed.failures) == (poison.id, 3)
    assert failed.reason.startswith("infinite: layer 5")
    assert require_true_states(project, target) == len(samples) - 1


def test_a_sample_that_kills_the_server_is_found_and_set_aside(
    project: Path, target: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.store.samples import read_samples
    from eyas.targets.fake.dumps import TinyModel

    samples = list(read_samples(Layout(project).samples))
    poison = min(samples, key=lambda sample: (abs(len(sample.tokens) - 30), sample.id))
    [server] = servers.start("vllm")
    keeper = servers.keeper
    keeper.servers[0].ours = True
    keeper.on_alive = lambda: [server.listening]
    keeper.on_restart = lambda index: server.revive()
    real, deaths = TinyModel.states, [0]
    dead: list[threading.Thread] = []  # a request asks for states more than once, and dies once

    def deadly(self: TinyModel, tokens: Any, layers: Any = None) -> Any:
        asked_by = threading.current_thread()
        if list(tokens) == poison.tokens.tolist() and asked_by not in dead and server.listening:
            dead.append(asked_by)
            deaths[0] += 1
            server.die()
        return real(self, tokens, layers)

    monkeypatch.setattr(TinyModel, "states", deadly)
    done = extract(project, "vllm")
    assert done.code == 3, done.err
    assert deaths[0] == 3, "twice among others, once alone"
    assert len(keeper.restarts) == 3
    with Ledger.open_read_only(Layout(project).ledger) as ledger:
        [failed] = ledger.failed_samples()
    assert failed.id == poison.id
    assert failed.reason.startswith("died: 3 times")
    assert require_true_states(project, target) == len(samples) - 1


def test_replicas_share_the_work_and_one_may_go(project: Path, target: Path, servers: Servers) -> None:
    found = servers.start("vllm", "dies@4", replicas=3)
    done = extract(
        project, "vllm", "--set", "client.tokens_in_flight=120", "--set", "serve.start_seconds=600"
    )
    assert done.code == 0, done.err
    assert found[0].caused == {"dies": 1}
    assert all(server.requests > 1 for server in found), [server.requests for server in found]
    assert require_true_states(project, target) == num_samples(project)


def test_a_full_dump_folder_holds_requests_back(
    project: Path, target: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from eyas.targets.server import folder as folder_module

    [server] = servers.start("vllm")
    stranger = 2**30  # one big file, so that what dumps add is no whole percent
    (tmp_path / "dumps-0").mkdir(exist_ok=True)
    with open(tmp_path / "dumps-0" / "notes.txt", "wb") as file:
        file.truncate(stranger)
    frozen: list[int] = []
    real, tight = shutil.disk_usage, [False]

    def usage(path: Any) -> Any:
        if not str(path).startswith(str(tmp_path / "dumps-0")):
            return real(path)
        if server.requests >= 2 and not frozen:
            tight[0] = True
        if tight[0]:
            frozen.append(server.requests)
            tight[0] = len(frozen) <= 4  # room again, after some looks
        # a disk that others fill to 99% in both cases
        return Usage(10**15, 0, stranger * 15 // 85 if tight[0] else 10**13)

    monkeypatch.setattr(folder_module.shutil, "disk_usage", usage)
    done = extract(project, "vllm", "--set", "client.tokens_in_flight=60")
    assert done.code == 0, done.err
    assert "held back" in done.err
    assert "dumps take 85% of the room" in done.err
    assert len(frozen) == 5
    assert frozen[-1] - frozen[0] <= 2, "only what was sent before may still arrive"
    assert require_true_states(project, target) == num_samples(project)


def test_orphans_of_this_project_are_swept_and_others_stay(
    project: Path, servers: Servers, tmp_path: Path
) -> None:
    from eyas.targets.server.names import project_tag

    tag, dumps = project_tag(project), tmp_path / "dumps-0"
    servers.start("sglang")
    ours = [f"{tag}-deadbeef-1-abc.dump", f"{tag}-deadbeef-2-abc.err"]
    theirs = ["0badcafe-deadbeef-1-abc.dump", "notes.txt"]
    for name in (*ours, *theirs, f"{tag}-deadbeef-3-abc.tmp"):
        (dumps / name).write_bytes(b"left behind")
    done = extract(project, "sglang")
    assert done.code == 0, done.err
    left = {path.name for path in dumps.iterdir()}
    assert left == {*theirs, "eyas-owner.json", f"{tag}-deadbeef-3-abc.tmp"}, (
        "an unfinished one is given its time"
    )


def test_an_api_key_and_tls(
    project: Path, target: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch, make_certificate: Any
) -> None:
    certificate, key = make_certificate()
    servers.start("vllm", api_key="sesame", certificate=certificate, key=key)
    trusted = ("--set", f"serve.ca_file={certificate}")
    with_key = ("--set", "serve.api_key_env=EYAS_TEST_KEY", "--set", "serve.start_seconds=1")
    unset = extract(project, "vllm", *trusted, *with_key)
    assert unset.code == 2
    assert "EYAS_TEST_KEY is not set" in unset.err
    monkeypatch.setenv("EYAS_TEST_KEY", "wrong")
    wrong = extract(project, "vllm", *trusted, *with_key)
    assert wrong.code == 13
    assert "unauthorized" in wrong.err
    assert "wrong" not in wrong.err.replace("wrong or missing", ""), "the key itself is never shown"
    monkeypatch.setenv("EYAS_TEST_KEY", "sesame")
    untrusted = extract(project, "vllm", *with_key)
    assert untrusted.code == 13
    assert "certificate" in untrusted.err
    assert counts_of(project)["stored"] == 0
    done = extract(project, "vllm", *trusted, *with_key)
    assert done.code == 0, done.err
    assert require_true_states(project, target) == num_samples(project)


def test_a_prompt_longer_than_the_server_takes_is_said_first(project: Path, servers: Servers) -> None:
    servers.start("vllm", max_tokens=20)
    done = extract(project, "vllm")
    assert done.code == 2
    assert "20 tokens" in done.err


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_add_up_and_store_nothing_wrong(
    seed: int, project: Path, target: Path, servers: Servers
) -> None:
    """Several faults at once, on two servers; whatever happens, states are true and counts add up."""
    random = Random(seed)
    kinds = [
        "500",
        "busy",
        "reset",
        "garbage",
        "no-echo",
        "failed",
        "half",
        "flip",
        "stale",
        "swapped",
        "short",
        "tokens",
        "wrong-layer",
        "wrong-width",
        "wrong-dtype",
        "nan",
        "zero",
        "constant",
        "wrong-model",
        "returns",
    ]
    faults = []
    for kind in random.sample(kinds, 5):
        at = random.randrange(1, 6)  # early enough to come, whatever share the faulty server gets
        faults.append(f"{kind}@{at}" + (":0.3" if kind == "returns" else ""))
    print(f"seed {seed}: {faults}")
    engine = random.choice(ENGINES)
    found = servers.start(engine, *faults, replicas=2)
    total = num_samples(project)
    for _ in range(3):
        done = extract(project, engine, "--set", "client.tokens_in_flight=100")
        assert done.code in (0, 3), done.err
        counts = counts_of(project)
        assert sum(counts.values()) == total
        assert counts["in_flight"] == 0
        assert require_true_states(project, target) == counts["stored"]
        if done.code == 0:
            break
        assert eyas("extract", "--retry-failed", "--dry-run", "--project", project).code == 0
    assert counts_of(project)["stored"] == total
    print(f"seed {seed}: caused {dict(found[0].caused)}")
    assert sum(found[0].caused.values()) >= 1


def test_a_fake_server_of_the_command_line_killed_and_started_again(
    project: Path, target: Path, tmp_path: Path
) -> None:
    """The verb in a process of its own, found by serve.urls; it dies for real, and the next run goes on."""
    words = ("serve", "fake", target, "--dump-dir", tmp_path / "d", "--json", "--engine", "sglang")
    total = num_samples(project)

    def start(*more: str) -> tuple[Any, str]:
        process = eyas_process(*words, *more)
        lines = []
        while not lines or lines[-1].rstrip() != "}":
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()
        return process, str(json.loads("".join(lines))["url"])

    first, url = start("--fault", "dies@4")
    try:
        stopped = extract(
            project, "sglang", "--set", f'serve.urls=["{url}"]', "--set", "serve.start_seconds=2"
        )
        assert first.wait(60) == 9
    finally:
        first.kill()
    assert stopped.code == 13, stopped.err
    kept = counts_of(project)
    assert sum(kept.values()) == total
    assert kept["set_aside"] == kept["failed"] == kept["in_flight"] == 0
    second, url = start("--port", url.rpartition(":")[2], "--fault", "500@1", "--fault", "nan@3")
    try:
        done = extract(project, "sglang", "--set", f'serve.urls=["{url}"]')
        assert done.code == 0, done.err
        second.send_signal(signal.SIGTERM)
        _, err = second.communicate(timeout=60)
        assert second.returncode == 0
        assert "faults caused: 500 1, nan 1" in err
    finally:
        second.kill()
    assert require_true_states(project, target) == total
