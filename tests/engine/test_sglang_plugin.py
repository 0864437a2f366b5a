"""The SGLang plugin on batches as the engine makes them: chunks, shared batches, cache hits, set-backs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas_engine import sglang_plugin
from eyas_engine.settings import EngineSettings
from eyas_engine.sglang_plugin import _OnDevice, _Plugin

WIDTH = 5


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Plugin:
    monkeypatch.setattr(sglang_plugin, "_engine", lambda: "sglang 0")
    return _Plugin(EngineSettings(tmp_path, (2, 15, 27), 30, "1.5"))


def request(name: str | None, num_tokens: int) -> SimpleNamespace:
    custom = None if name is None else {"eyas_name": name}
    return SimpleNamespace(
        rid=name or "plain",
        origin_input_ids=[7 * i % 50 for i in range(num_tokens)],
        sampling_params=SimpleNamespace(custom_params=custom),
        customized_info=None,
    )


def states_of(seed: int, first: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States that say whose they are: request, position, column."""
    positions = torch.arange(first, first + num_rows, dtype=torch.float32)
    packed = torch.stack([positions + 1000 * seed + 0.01 * c for c in range(3 * WIDTH)], dim=1)
    last = torch.stack([-positions - 1000 * seed - 0.01 * c for c in range(WIDTH)], dim=1)
    return packed, last


def step(
    plugin: _Plugin,
    parts: list[tuple[Any, int, int, int]],
    decoding: list[Any] | None = None,
    graph: bool = False,
) -> None:
    """One forward pass over (request, seed, rows before, rows now), through the engine's protocol."""
    batch = SimpleNamespace(
        reqs=[part[0] for part in parts],
        extend_lens=[part[3] for part in parts],
        prefix_lens=[part[2] for part in parts],
        decoding_reqs=decoding,
    )
    made = [states_of(seed, before, now) for _, seed, before, now in parts]
    output = SimpleNamespace(
        hidden_states=torch.cat([m[0] for m in made]),
        last_hidden_states=torch.cat([m[1] for m in made]),
        hidden_states_token_indices=None,
    )
    result = SimpleNamespace(logits_output=output, can_run_cuda_graph=graph)
    taken = plugin._take(batch, result)
    if graph:
        output.hidden_states.fill_(9e9)  # the graph's next replay
        output.last_hidden_states.fill_(9e9)
    _OnDevice(plugin, taken).copy_to_host(lambda tensor: tensor).consume(batch, [None] * len(parts))


def said(asked: SimpleNamespace) -> dict[str, Any]:
    return dict(json.loads(asked.customized_info["eyas"][0]))


def check(folder: Path, name: str, seed: int, num_tokens: int) -> None:
    tensors = load_file(folder / f"{name}.dump")
    packed, last = states_of(seed, 0, num_tokens)
    assert torch.equal(tensors["aux"], packed.reshape(num_tokens, 3, WIDTH))
    assert torch.equal(tensors["last"], last)
    assert tensors["tokens"].tolist() == [7 * i % 50 for i in range(num_tokens)]


@pytest.mark.parametrize("seed", range(8))
def test_any_cut_into_chunks_and_batches_gives_each_request_its_rows(
    plugin: _Plugin, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    lengths = [draw.randrange(1, 40) for _ in range(6)]
    named = {i: draw.random() < 0.7 for i in range(6)}
    asked = [request(f"dump-{seed}-{i}" if named[i] else None, length) for i, length in enumerate(lengths)]
    done = [0] * 6
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        open_ones = [i for i in range(6) if done[i] < lengths[i]]
        picked = draw.sample(open_ones, draw.randrange(1, len(open_ones) + 1))
        parts = []
        for i in picked:
            now = draw.randrange(1, lengths[i] - done[i] + 1)
            parts.append((asked[i], i, done[i], now))
            done[i] += now
        idle = request("decodes-already", 3)
        parts.append((idle, 99, 3, 1))  # a request in its decoding rides along at the end
        step(plugin, parts, decoding=[idle], graph=draw.random() < 0.5)
        assert idle.customized_info is None
    plugin.writer.close()
    for i, length in enumerate(lengths):
        if named[i]:
            told = said(asked[i])
            assert (told["rows"], told["name"], told["layers"]) == (length, f"dump-{seed}-{i}", [2, 15, 27])
            assert "error" not in told
            check(tmp_path, f"dump-{seed}-{i}", i, length)
        else:
            assert asked[i].customized_info is None
    assert len(list(tmp_path.iterdir())) == sum(named.values())


def test_rows_out_of_a_prefix_cache_are_missed(plugin: _Plugin, tmp_path: Path) -> None:
    asked = request("dump-with-hit", 20)
    step(plugin, [(asked, 1, 8, 12)])
    assert said(asked)["error"].startswith("rows: 8 tokens")
    later = request("dump-hit-later", 20)
    step(plugin, [(later, 1, 0, 5)])
    step(plugin, [(later, 1, 9, 11)])
    assert said(later)["error"].startswith("rows: 9 tokens")
    plugin.writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_request_that_is_set_back_begins_anew(plugin: _Plugin, tmp_path: Path) -> None:
    asked = request("dump-set-back", 20)
    step(plugin, [(asked, 5, 0, 12)])
    step(plugin, [(asked, 1, 0, 9)])
    step(plugin, [(asked, 1, 9, 11)])
    plugin.writer.close()
    assert "error" not in said(asked)
    check(tmp_path, "dump-set-back", 1, 20)


def test_states_that_are_not_there_or_of_another_width(plugin: _Plugin, tmp_path: Path) -> None:
    for change in (
        {"hidden_states": None},
        {"last_hidden_states": None},
        {"hidden_states_token_indices": [1]},
    ):
        asked = request("dump-without", 4)
        packed, last = states_of(1, 0, 4)
        output = {"hidden_states": packed, "last_hidden_states": last, "hidden_states_token_indices": None}
        result = SimpleNamespace(logits_output=SimpleNamespace(**output | change), can_run_cuda_graph=False)
        batch = SimpleNamespace(reqs=[asked], extend_lens=[4], prefix_lens=[0], decoding_reqs=None)
        _OnDevice(plugin, plugin._take(batch, result)).copy_to_host(lambda t: t).consume(batch, [None])
        assert said(asked)["error"].startswith("bad-request: the engine captured")
    asked = request("dump-narrow", 4)
    output = {"hidden_states": packed[:, :WIDTH], "last_hidden_states": last}
    result = SimpleNamespace(logits_output=SimpleNamespace(**output), can_run_cuda_graph=False)
    batch = SimpleNamespace(reqs=[asked], extend_lens=[4], prefix_lens=[0], decoding_reqs=None)
    _OnDevice(plugin, plugin._take(batch, result)).copy_to_host(lambda t: t).consume(batch, [None])
    assert "are no 3 layers of 5" in said(asked)["error"]
    plugin.writer.close()
    assert list(tmp_path.iterdir()) == []


def test_refusals_stand_in_the_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_plugin, "_engine", lambda: "sglang 0")
    plugin = _Plugin(EngineSettings(tmp_path, (2, 15, 27), 30, "1.5", limit_bytes=1000))
    for name, code in (("../outside-x", "bad-name"), ("dump-in-use", "bad-name"), ("dump-too-large", "full")):
        (tmp_path / "dump-in-use.dump").write_bytes(b"x")
        asked = request(name, 20)
        step(plugin, [(asked, 1, 0, 20)])
        assert said(asked)["error"].startswith(f"{code}: ")
    assert [p.name for p in tmp_path.iterdir()] == ["dump-in-use.dump"]


def test_nothing_that_fails_here_reaches_the_engine(
    plugin: _Plugin, caplog: pytest.LogCaptureFixture
) -> None:
    result = SimpleNamespace()

    def forward(worker: object, batch: object) -> object:
        return result

    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: True))
    assert plugin.around_forward(forward, None, batch) is result  # no SGLang is installed here
    assert "could not be taken" in caplog.text
    on_host = _OnDevice(plugin, [SimpleNamespace(index=0, aux=None)]).copy_to_host(lambda t: t)  # type: ignore[list-item]
    on_host.consume(SimpleNamespace(reqs=[]), [])
    assert "could not be gathered" in caplog.text
