"""Regenerate through fake servers: token ids in, token ids out, and no answer that is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import eyas
from tests.stages.served.helping import (
    PATIENT,
    Servers,
    samples_of,
)
from tests.targets.server.fakes import ENGINES, Engine


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
    for position in (1, 2, 4, 6):
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
