"""Every fault of the fake server at every request of a short run: nothing wrong is taken, each has a code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.base.errors import TargetError
from eyas.targets.fake.dumps import States, TinyModel
from eyas.targets.fake.faults import KINDS
from eyas.targets.server.capturing import Prompt, Taken
from eyas.targets.server.faults import FAULTS
from eyas.targets.server.settings import ClientSettings
from eyas.targets.server.target import Failed, ServedTarget
from tests.faults.small import LONG
from tests.targets.server.conftest import NUM_SAMPLES, Tiny
from tests.targets.server.fakes import ENGINES, Engine, FixedKeeper, fake_server, keeper_of, tiny_server_model

PATIENT = ClientSettings(first_byte_seconds=60, dump_seconds=30, away_seconds=60, connect_seconds=30)
LAST = NUM_SAMPLES + 1
"""The canary is the first request; every sample is one more."""
ROWS = list(range(5, 20))
EVERY = range(1, LAST + 1)
SOME = EVERY if LONG else (1, 4, LAST)
"""Positions where every one takes long or differs in little; the long form takes all."""

CODES: dict[str, set[str]] = {
    "500": {"server_error"},
    "busy": {"busy"},
    "full": {"full"},
    "refused": {"refused"},
    "reset": {"reset"},
    "garbage": {"bad_reply"},
    "no-echo": {"no_echo"},
    "failed": {"dump_failed"},
    "half": {"torn"},
    "flip": {"damaged"},
    "stale": {"stale", "swapped"},  # swapped while the earlier request is still in flight
    "swapped": {"swapped", "stale", "foreign"},  # stale or foreign when nothing else is in flight
    "short": {"rows"},
    "tokens": {"other_tokens"},
    "wrong-layer": {"wrong_layers"},
    "wrong-width": {"wrong_width"},
    "wrong-dtype": {"wrong_dtype"},
    "nan": {"not_a_number"},
    "infinite": {"infinite"},
    "zero": {"all_zero"},
    "constant": {"constant"},
    "wrong-model": {"wrong_model", "other_token"},  # SGLang's reply names no model: the head notices
    "returns": {"reset", "unreachable"},
}


def one_run(
    tiny: Tiny,
    tmp_path: Path,
    engine: Engine,
    faults: list[str],
    settings: ClientSettings = PATIENT,
    rounds: int = 3,
) -> tuple[dict[str, Taken], dict[str, list[str]], dict[str, int], Counter[str]]:
    """What was taken, the codes of each sample's failures, all faults by code, and those that were caused."""
    model = tiny_server_model(tiny.target, engine, tiny.rules.layers)
    taken: dict[str, Taken] = {}
    failed: dict[str, list[str]] = {}
    dumps = tmp_path / "dumps"
    with fake_server(model, tiny.folder, engine, dumps, faults) as server:
        target = ServedTarget(
            keeper_of(server),
            tiny.rules,
            tiny.canary,
            tiny.heads,
            tiny.folder,
            settings,
            100,
            tmp_path,
            print,
        )
        with target:
            target.open()
            for _ in range(rounds):
                left = [Prompt(k, t, ROWS) for k, t in tiny.prompts.items() if k not in taken]
                for one in target.stream(left):
                    if isinstance(one, Failed):
                        failed.setdefault(one.key, []).append(one.code)
                    else:
                        assert one.prompt.sample not in taken, "a sample was given twice"
                        taken[one.prompt.sample] = one
            counted = target.faults
            assert all(t.folder.file(t.name).exists() for t in taken.values()), (
                "a dump went before its commit"
            )
            target.release(list(taken))
        caused = Counter(server.caused)
    assert [path.name for path in dumps.iterdir() if path.name != "eyas-owner.json"] == [], "dumps were left"
    for name, one in taken.items():
        aux, last = tiny.states_of(tiny.prompts[name])
        torch.testing.assert_close(one.states.aux, aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.states.last, last[ROWS], rtol=1e-4, atol=1e-4)
    return taken, failed, counted, caused


def test_every_fault_of_a_capture_is_caused_here() -> None:
    elsewhere = {"endless", "cut"}  # faults of answers: tests/stages/served/test_answers_served.py
    apart = {"hang", "no-dump", "late", "slow", "dies"}
    assert {*CODES, *apart, *elsewhere} == set(KINDS)
    assert {code for codes in CODES.values() for code in codes} <= set(FAULTS)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_stand_in_computes_each_prompt_once(
    engine: Engine, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []
    states = TinyModel.states

    def counted(self: TinyModel, tokens: Sequence[int], layers: Sequence[int] | None = None) -> States:
        asked.append(tuple(tokens))
        return states(self, tokens, layers)

    monkeypatch.setattr(TinyModel, "states", counted)
    taken, failed, _, _ = one_run(tiny, tmp_path, engine, [], rounds=1)
    assert (len(taken), failed) == (NUM_SAMPLES, {})
    assert len(asked) == NUM_SAMPLES + 1  # and the canary


def test_a_dump_of_a_request_still_in_flight_is_swapped(tiny: Tiny, tmp_path: Path) -> None:
    slow = [f"slow@{position}:1" for position in EVERY if position != 3]  # all others are in flight meanwhile
    taken, failed, counted, caused = one_run(tiny, tmp_path, "vllm", ["swapped@3", *slow])
    assert set(taken) == set(tiny.prompts), failed
    assert (caused["swapped"], counted["swapped"]) == (1, 1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", sorted(CODES))
def test_a_fault_at_every_request(kind: str, engine: Engine, tiny: Tiny, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    positions = EVERY if engine == "vllm" else SOME  # what differs is the reply's form
    for position in positions:
        fault = f"{kind}@{position}" + (":0.3" if kind == "returns" else "")
        place = tmp_path / str(position)
        taken, failed, counted, caused = one_run(tiny, place, engine, [fault])
        assert caused == {kind: 1}, f"{fault} was not caused"
        assert set(taken) == set(tiny.prompts), f"{fault}: {failed}"
        told = Counter({code: n for code, n in counted.items() if code not in ("swept", "late")})
        assert set(told) & CODES[kind], f"{fault} was counted as {dict(told)}"
        blamed = {code for codes in failed.values() for code in codes}
        assert blamed <= CODES[kind], f"{fault}: samples were told {blamed}"
        seen += told
    assert sum(seen[code] for code in CODES[kind]) >= len(positions)
    if kind == "stale" and engine == "vllm":
        assert seen[kind] >= 1
    print(f"{kind} on {engine}: caused {len(positions)}, counted {dict(seen)}")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_hang_at_some_requests(engine: Engine, tiny: Tiny, tmp_path: Path) -> None:
    settings = ClientSettings(first_byte_seconds=3, dump_seconds=30, away_seconds=60)
    for position in SOME:
        taken, _, counted, caused = one_run(
            tiny, tmp_path / str(position), engine, [f"hang@{position}"], settings
        )
        assert caused == {"hang": 1}
        assert set(taken) == set(tiny.prompts)
        assert counted["hang"] >= 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_dump_that_never_comes(engine: Engine, tiny: Tiny, tmp_path: Path) -> None:
    settings = ClientSettings(first_byte_seconds=60, dump_seconds=0.75, away_seconds=60)
    for position in EVERY:
        place = tmp_path / str(position)
        taken, _, counted, caused = one_run(tiny, place, engine, [f"no-dump@{position}"], settings)
        assert caused == {"no-dump": 1}
        assert set(taken) == set(tiny.prompts)
        assert counted["no_dump"] >= 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_late_dump_counts_and_is_counted(engine: Engine, tiny: Tiny, tmp_path: Path) -> None:
    settings = ClientSettings(first_byte_seconds=60, dump_seconds=1.5, away_seconds=60)
    for position in SOME:
        place = tmp_path / str(position)
        taken, failed, counted, caused = one_run(tiny, place, engine, [f"late@{position}:2"], settings)
        assert caused == {"late": 1}
        assert set(taken) == set(tiny.prompts)
        assert counted.get("late", 0) + counted.get("no_dump", 0) >= 1, failed


@pytest.mark.parametrize("engine", ENGINES)
def test_a_slow_reply_is_no_fault(engine: Engine, tiny: Tiny, tmp_path: Path) -> None:
    for position in SOME:
        place = tmp_path / str(position)
        taken, failed, counted, caused = one_run(tiny, place, engine, [f"slow@{position}:0.5"], rounds=1)
        assert caused == {"slow": 1}
        assert set(taken) == set(tiny.prompts)
        assert failed == {}
        assert set(counted) <= {"swept"}


def test_a_server_that_dies_is_started_again_by_its_keeper(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny_server_model(tiny.target, "vllm", tiny.rules.layers)
    for position in EVERY:
        place = tmp_path / str(position)
        with fake_server(model, tiny.folder, "vllm", place / "dumps", [f"dies@{position}"]) as server:
            keeper: FixedKeeper = keeper_of(server)
            keeper.servers[0].ours = True
            keeper.on_alive = lambda server=server: [server.listening]  # type: ignore[misc]
            keeper.on_restart = lambda index, server=server: server.revive()  # type: ignore[misc]
            taken: list[str] = []
            with ServedTarget(
                keeper, tiny.rules, tiny.canary, tiny.heads, tiny.folder, PATIENT, 100, place, print
            ) as target:
                target.open()
                for one in target.stream([Prompt(k, t, ROWS) for k, t in tiny.prompts.items()]):
                    assert isinstance(one, Taken), one
                    taken.append(one.prompt.sample)
                assert target.faults["restarted"] == 1
            assert server.caused == {"dies": 1}
            assert keeper.restarts == [0]
        assert sorted(taken) == sorted(tiny.prompts)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_that_lies_about_its_layers_is_unmasked_by_the_canary(
    engine: Engine, tiny: Tiny, tmp_path: Path
) -> None:
    """Every dump claims the right layers and holds those below; only numbers can tell."""

    class Liar(TinyModel):
        def states(self, tokens: Sequence[int], layers: Sequence[int] | None = None) -> States:
            below = super().states(tokens, [layer - 1 for layer in self.layers])
            return replace(below, layers=self.layers)

    model = Liar(tiny.target, tiny.rules.layers, before_norm=engine == "vllm")
    with fake_server(model, tiny.folder, engine, tmp_path / "dumps") as server:
        target = ServedTarget(
            keeper_of(server), tiny.rules, tiny.canary, tiny.heads, tiny.folder, PATIENT, 100, tmp_path, print
        )
        with target, pytest.raises(TargetError, match="does not give what the target would") as error:
            target.open()
    assert "layer 0 fits best" in str(error.value.why)
    assert server.requests == 3, "a proof is tried three times"
