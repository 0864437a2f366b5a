"""States as JSON from a pair of SGLang servers without eyas' plugin."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.base.errors import TargetError
from eyas.targets.fake.as_json import JSON_KINDS
from eyas.targets.fake.server import FakeServer
from eyas.targets.server.as_json import join
from eyas.targets.server.capturing import Prompt
from eyas.targets.server.dump import Expected
from eyas.targets.server.faults import ServerFault
from eyas.targets.server.settings import ClientSettings
from eyas.targets.server.target import Failed, ServedTarget
from tests.targets.server.conftest import LAYERS, NUM_SAMPLES, Tiny
from tests.targets.server.fakes import FixedKeeper, Known, fake_server, tiny_server_model

PATIENT = ClientSettings(first_byte_seconds=60, away_seconds=60, connect_seconds=30)
ROWS = list(range(5, 20))
CODES = {
    "no-echo": {"bad_reply"},
    "swapped": {"swapped"},
    "short": {"rows"},
    "wrong-width": {"wrong_width"},
    "wrong-dtype": {"wrong_dtype"},
    "nan": {"not_a_number"},
    "infinite": {"not_a_number"},  # JSON has no infinity: SGLang writes null for either
    "zero": {"all_zero"},
    "constant": {"constant"},
    "wrong-model": {"other_token"},
    "500": {"server_error"},
    "busy": {"busy"},
    "reset": {"reset"},
    "garbage": {"bad_reply"},
}


@contextmanager
def pair(
    tiny: Tiny, *, aux: tuple[str, ...] = (), last: tuple[str, ...] = (), layers: tuple[int, ...] = LAYERS
) -> Iterator[tuple[FakeServer, FakeServer]]:
    """A server of aux states and one of last states, each with its own faults."""
    model = tiny_server_model(tiny.target, "sglang", layers)
    with (
        fake_server(model, tiny.folder, "sglang", None, aux, returns="aux") as first,
        fake_server(model, tiny.folder, "sglang", None, last, returns="last") as second,
    ):
        yield first, second


def served(tiny: Tiny, root: Path, first: FakeServer, second: FakeServer) -> ServedTarget:
    keeper = FixedKeeper([Known("sglang", first.url, None, last_url=second.url)])
    return ServedTarget(keeper, tiny.rules, tiny.canary, tiny.heads, tiny.folder, PATIENT, 100, root, print)


@pytest.mark.parametrize("side", ["aux", "last"])
@pytest.mark.parametrize("kind", sorted(CODES))
def test_a_fault_at_every_request_of_either_server(kind: str, side: str, tiny: Tiny, tmp_path: Path) -> None:
    """The canary is each server's first request; every sample is one more."""
    seen: Counter[str] = Counter()
    for position in (1, 4, NUM_SAMPLES + 1):
        faults: dict[str, Any] = {side: (f"{kind}@{position}",)}
        with pair(tiny, **faults) as servers, served(tiny, tmp_path, *servers) as target:
            target.open()
            taken: dict[str, Any] = {}
            for _ in range(3):
                left = [
                    Prompt(name, tokens, ROWS) for name, tokens in tiny.prompts.items() if name not in taken
                ]
                for one in target.stream(left):
                    if isinstance(one, Failed):
                        assert one.code in CODES[kind]
                    else:
                        taken[one.prompt.sample] = one.states
            seen += Counter(target.faults)
            caused = servers[side == "last"].caused
        assert caused == {kind: 1}
        assert set(taken) == set(tiny.prompts)
        for name, states in taken.items():
            aux, last = tiny.states_of(tiny.prompts[name])
            torch.testing.assert_close(states.aux, aux, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(states.last, last[ROWS], rtol=1e-4, atol=1e-4)
    assert sum(seen[code] for code in CODES[kind]) >= 3, dict(seen)


def test_every_fault_of_json_states_is_caused_here() -> None:
    assert set(CODES) >= JSON_KINDS


def test_engine_and_start_are_noted(tiny: Tiny, tmp_path: Path) -> None:
    with pair(tiny) as servers, served(tiny, tmp_path, *servers) as target:
        target.open()
        assert target.engines == {servers[0].url: "sglang 0.5.23 (fake) (JSON)"}


def refused(tiny: Tiny, root: Path, first: FakeServer, second: FakeServer) -> str:
    with served(tiny, root, first, second) as target, pytest.raises(TargetError) as caught:
        target.open()
    return str(caught.value.why)


def test_servers_that_are_not_the_right_pair(tiny: Tiny, tmp_path: Path) -> None:
    with pair(tiny) as (first, second):
        assert "has to return aux states" in refused(tiny, tmp_path, second, first)
        assert "has to return aux states" in refused(tiny, tmp_path, first, first)
    with pair(tiny, layers=(1, 2, 4)) as (first, second):
        why = refused(tiny, tmp_path, first, second)
        assert "captures layers [1, 2, 4], asked for [1, 3, 5]" in why


def test_layers_that_are_not_what_the_server_says(tiny: Tiny, tmp_path: Path) -> None:
    """It says the right layers and returns those below; only numbers can tell."""
    with pair(tiny) as (first, second):
        below = tiny_server_model(tiny.target, "sglang", tuple(layer - 1 for layer in LAYERS))
        below.layers = LAYERS
        real = below.states
        below.states = lambda tokens, layers=None: real(tokens, [k - 1 for k in LAYERS])  # type: ignore[method-assign]
        first._model = below
        assert "layer 0 fits best" in refused(tiny, tmp_path, first, second)


def reply(rows: list[list[float | None]], *, name: str = "n", prompt: int = 2) -> bytes:
    meta = {"id": name, "prompt_tokens": prompt, "hidden_states": [rows, [9.0]]}
    return json.dumps({"output_ids": [4], "meta_info": meta}).encode()


def expected(dtype: torch.dtype) -> Expected:
    return Expected("n", [5, 6], (1, 2), 2, dtype, 0.0)


def test_both_replies_make_one_dump() -> None:
    aux = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]
    dump, tokens = join(reply(aux), reply([[0.5, -0.5], [1.5, 2.5]]), expected(torch.bfloat16), "e", "i")
    assert dump.aux.tolist() == [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]
    assert dump.last.tolist() == [[0.5, -0.5], [1.5, 2.5]]
    assert (dump.before_norm, dump.aux.dtype, tokens) == (False, torch.bfloat16, [4, 4])


@pytest.mark.parametrize(
    ("last", "dtype", "code"),
    [
        (reply([[0.5, 1.0]]), torch.bfloat16, "rows"),  # SGLang's last chunk
        (reply([[0.5], [1.0]]), torch.bfloat16, "wrong_width"),
        (reply([[0.1, 1.0], [0.5, 1.0]]), torch.bfloat16, "wrong_dtype"),  # 0.1 is no bfloat16
        (reply([[0.5, 1.0], [0.5, 1.0]]), torch.float32, "wrong_dtype"),  # only bfloat16 is this round
        (reply([[0.5, 1.0], [0.5]]), torch.bfloat16, "bad_reply"),
        (reply([[0.5, 1.0], [0.5, 1.0]], name="m"), torch.bfloat16, "swapped"),
        (reply([[0.5, 1.0], [0.5, 1.0]], prompt=3), torch.bfloat16, "other_tokens"),
        (b"[]", torch.bfloat16, "bad_reply"),
        (b"{", torch.bfloat16, "bad_reply"),
    ],
)
def test_what_a_reply_may_not_be(last: bytes, dtype: torch.dtype, code: str) -> None:
    third = 1 / 3 if dtype == torch.float32 else 0.25
    aux = reply([[third, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    if dtype == torch.float32:
        third32 = torch.tensor(third).item()
        aux = reply([[third32, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    with pytest.raises(ServerFault) as caught:
        join(aux, last, expected(dtype), "e", "i")
    assert caught.value.code == code


def test_null_is_no_number() -> None:
    last = reply([[0.5, None], [0.5, 1.0]])
    aux = reply([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    dump, _ = join(aux, last, expected(torch.bfloat16), "e", "i")
    assert dump.last.isnan().tolist() == [[False, True], [False, False]]
