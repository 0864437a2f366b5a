"""Extract and regenerate through fake servers: complete or stopped with the right code, and never wrong."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers

from eyas.base.layout import Layout
from eyas.stages import served_target
from eyas.stages.stored_states import to_torch
from eyas.store.ledger import Ledger
from eyas.store.reader import StoreReader
from eyas.store.samples import last_rows
from eyas.targets.compare import relative_error
from eyas.targets.fake.server import FakeServer
from eyas.targets.local.model import LocalTarget
from tests.cli.command import Finished, eyas, eyas_process
from tests.projects import make_project, tiny_target
from tests.targets.server.fakes import ENGINES, Engine, FixedKeeper, fake_server, keeper_of, tiny_server_model

Usage = namedtuple("Usage", "total used free")
LAYERS = (1, 3, 5)
"""What ``auto`` gives for the six layers of the tiny target."""
PATIENT = ("--set", "client.first_byte_seconds=60", "--set", "client.dump_seconds=30")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def model(target: Path) -> LocalTarget:
    return LocalTarget.load(target)


@pytest.fixture(scope="module")
def answered(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose samples are ready to be captured."""
    root = make_project(tmp_path_factory.mktemp("answered") / "p", target)
    assert eyas("run", "--project", root, "--until", "regenerate").code == 0
    return root


@pytest.fixture
def project(answered: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(answered, tmp_path / "p", symlinks=True))


class Servers:
    """Fake servers that take the place of those that eyas would start or find."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: LocalTarget, folder: Path, tmp: Path) -> None:
        self._model, self._folder, self._tmp = model, folder, tmp
        self._stack = ExitStack()
        self.keeper = FixedKeeper([])
        self.modes: list[str] = []

        @contextmanager
        def kept(project: Any, context: Any, mode: str) -> Iterator[FixedKeeper]:
            self.modes.append(mode)
            yield self.keeper

        monkeypatch.setattr(served_target, "open_keeper", kept)

    def start(
        self, engine: Engine, *faults: str, dumping: bool = True, replicas: int = 1, **more: Any
    ) -> list[FakeServer]:
        """New servers; earlier ones are ended."""
        self._stack.close()
        tiny = tiny_server_model(self._model, engine, LAYERS if more.pop("right", True) else (1, 2, 4))
        found = []
        for number in range(replicas):
            dumps = self._tmp / f"dumps-{number}" if dumping else None
            server = fake_server(tiny, self._folder, engine, dumps, faults if number == 0 else (), **more)
            found.append(self._stack.enter_context(server))
        self.keeper = keeper_of(*found)
        return found

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def servers(
    monkeypatch: pytest.MonkeyPatch, model: LocalTarget, target: Path, tmp_path: Path
) -> Iterator[Servers]:
    found = Servers(monkeypatch, model, target, tmp_path)
    yield found
    found.close()


def extract(root: Path, engine: str, *more: str) -> Finished:
    return eyas("extract", "--project", root, "--set", f"target.kind={engine}", *PATIENT, *more)


def counts_of(root: Path) -> dict[str, int]:
    with Ledger.open_read_only(Layout(root).ledger) as ledger:
        return {state: samples for state, (samples, _) in ledger.counts().items()}


def num_samples(root: Path) -> int:
    return int(json.loads((root / "data/samples/seal.json").read_text())["about"]["num_samples"])


def require_true_states(root: Path, folder: Path) -> int:
    """Compare every stored sample with transformers' own hidden states; returns how many there are."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layout = Layout(root)
    with Ledger.open_read_only(layout.ledger) as ledger:
        reader = StoreReader(layout.segments, ledger)
        for name in reader.ids():
            sample = reader.sample(name, check=True)
            with torch.no_grad():
                ids = torch.tensor([sample.tokens.tolist()])
                hidden = reference(input_ids=ids, output_hidden_states=True).hidden_states
            for slot, layer in enumerate(LAYERS):
                error = relative_error(to_torch(sample.aux)[:, slot], hidden[layer][0])
                assert error < 1e-4, (name, layer, error)
            rows = last_rows(sample.spans, len(sample.tokens))
            torch.testing.assert_close(to_torch(sample.last), hidden[-1][0][rows], rtol=1e-4, atol=1e-4)
        return len(reader.ids())


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
    assert counts_of(project) == {"stored": total, "pending": 0, "in_flight": 0, "failed": 0, "set_aside": 0}
    assert require_true_states(project, target) == total
    assert [p.name for p in (tmp_path / "dumps-0").iterdir()] == ["eyas-owner.json"], "dumps stay behind"
    assert eyas("verify", "--deep", "--project", project).code == 0


def test_engines_may_be_changed_when_their_states_agree(
    project: Path, target: Path, servers: Servers
) -> None:
    """vLLM gives half, SGLang goes on, the local target ends it; each proves stored samples first."""
    total = num_samples(project)
    servers.start("vllm", "dies@5")
    stopped = extract(project, "vllm", "--set", "serve.start_seconds=1", "--set", "extract.recheck=0")
    assert stopped.code == 13, stopped.err
    some = counts_of(project)["stored"]
    assert 0 < some < total
    assert sum(counts_of(project).values()) == total
    assert counts_of(project)["in_flight"] == 0
    servers.start("sglang", f"dies@{4 + 3 + 1}")
    again = extract(project, "sglang", "--set", "serve.start_seconds=1", "--set", "extract.recheck=0")
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

    def deadly(self: TinyModel, tokens: Any, layers: Any = None) -> Any:
        if list(tokens) == poison.tokens.tolist() and server.listening:
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
    real, used = shutil.disk_usage, [10]

    def usage(path: Any) -> Any:
        if str(path).startswith(str(tmp_path / "dumps-0")):
            if server.requests >= 2 and used[0] == 10:
                used[0] = 85
                threading.Timer(1.0, lambda: used.__setitem__(0, 11)).start()
                frozen.append(server.requests)
            elif used[0] == 85:
                frozen.append(server.requests)
            return Usage(100, used[0], 100 - used[0])
        return real(path)

    frozen: list[int] = []
    monkeypatch.setattr(folder_module.shutil, "disk_usage", usage)
    done = extract(project, "vllm", "--set", "client.tokens_in_flight=60")
    assert done.code == 0, done.err
    assert "held back" in done.err
    assert "85% full" in done.err
    assert len(frozen) > 2
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
    kinds = ["500", "busy", "reset", "garbage", "no-echo", "failed", "half", "flip", "stale", "swapped", "short",
             "tokens", "wrong-layer", "wrong-width", "wrong-dtype", "nan", "zero", "constant", "wrong-model",
             "returns"]  # fmt: skip
    faults = []
    for kind in random.sample(kinds, 5):
        at = random.randrange(1, num_samples(project) + 2)
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
        assert "'500': 1" in err
    finally:
        second.kill()
    assert require_true_states(project, target) == total


@pytest.fixture
def unanswered(target: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        root = make_project(tmp_path / name, target)
        assert eyas("prepare", "--project", root).code == 0
        return root

    return make


def samples_of(root: Path) -> set[str]:
    from eyas.store.samples import read_samples

    return {sample.id for sample in read_samples(Layout(root).samples)}


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_answers_equal_the_local_ones(
    engine: Engine, answered: Path, unanswered: Callable[[str], Path], servers: Servers
) -> None:
    root = unanswered("served")
    servers.start(engine, dumping=False)
    done = eyas("regenerate", "--project", root, "--set", f"target.kind={engine}", *PATIENT)
    assert done.code == 0, done.err
    assert servers.modes == ["generate"]
    assert samples_of(root) == samples_of(answered)


@pytest.mark.parametrize("engine", ENGINES)
def test_sampled_answers_have_streams_of_their_own(
    engine: Engine, unanswered: Callable[[str], Path], servers: Servers
) -> None:
    warm = ("--set", "regenerate.temperature=0.8", "--set", "regenerate.top_p=0.9")
    found = {}
    for name, more in (
        ("a", ()),
        ("b", ("--set", "regenerate.batch_size=1")),
        ("c", ("--set", "regenerate.seed=5")),
    ):
        root = unanswered(name)
        servers.start(engine, dumping=False)
        done = eyas("regenerate", "--project", root, "--set", f"target.kind={engine}", *warm, *more)
        assert done.code == 0, done.err
        found[name] = samples_of(root)
    assert found["a"] == found["b"], "order and concurrency change nothing"
    assert found["a"] != found["c"]


@pytest.mark.parametrize(
    "kind", ["500", "reset", "busy", "garbage", "endless", "cut", "wrong-model", "returns"]
)
def test_faults_of_answers_at_every_request(
    kind: str, answered: Path, unanswered: Callable[[str], Path], servers: Servers
) -> None:
    codes = {
        "500": "server_error", "reset": "reset", "busy": "busy", "garbage": "bad_reply",
        "endless": "bad_answer", "cut": "bad_answer", "wrong-model": "wrong_model", "returns": "reset",
    }  # fmt: skip
    for position in range(1, 7):
        root = unanswered(f"at-{position}")
        [server] = servers.start(
            "vllm", f"{kind}@{position}" + (":0.3" if kind == "returns" else ""), dumping=False
        )
        done = eyas("regenerate", "--project", root, "--json", "--set", "target.kind=vllm", *PATIENT)
        assert done.code == 0, done.err
        if server.caused[kind] == 0:  # the probe asks for no end tokens: nothing to cut there
            assert (kind, position) in (("endless", 1), ("cut", 1)), position
            continue
        faults = done.json["numbers"]["regenerate"].get("faults", {})
        if position > 1 or kind not in ("endless", "cut"):
            assert codes[kind] in faults or "unreachable" in faults, (position, faults)
        assert samples_of(root) == samples_of(answered), position


def test_a_server_set_up_for_extraction_writes_no_answers(
    unanswered: Callable[[str], Path], servers: Servers
) -> None:
    for engine in ENGINES:
        root = unanswered(engine)
        servers.start(engine)
        done = eyas("regenerate", "--project", root, "--set", f"target.kind={engine}")
        assert done.code == 2, done.err
        assert "for_extraction" in done.err
        assert not list((root / "data" / "answers").glob("turn-*"))


def test_a_kill_in_the_middle_of_answers_loses_only_what_was_in_flight(
    answered: Path, unanswered: Callable[[str], Path], servers: Servers
) -> None:
    root = unanswered("killed")
    servers.start("sglang", "dies@6", dumping=False)
    small = ("--set", "regenerate.batch_size=2", "--set", "target.kind=sglang")
    stopped = eyas("regenerate", "--project", root, *small, "--set", "serve.start_seconds=1")
    assert stopped.code == 13, stopped.err
    kept = {path.name for path in (root / "data" / "answers").glob("turn-*")}
    assert kept
    servers.start("vllm", dumping=False)
    done = eyas(
        "regenerate", "--project", root, "--set", "regenerate.batch_size=2", "--set", "target.kind=vllm"
    )
    assert done.code == 0, done.err
    assert kept <= {path.name for path in (root / "data" / "answers").glob("turn-*")}
    assert samples_of(root) == samples_of(answered)
