"""Decoding sessions against whole forward passes, in float64."""

from __future__ import annotations

import random

import pytest
import torch

import eyas.targets.local.session as session_module
from eyas.base.errors import TargetError
from eyas.targets.local.model import LocalTarget
from eyas.targets.local.session import DecodeSession, RaggedSession, RecomputeSession
from tests.tiny import NUM_LAYERS, VOCAB_SIZE, save_tiny_target

KINDS = ("llama", "qwen3", "deepseek_v3", "nested", "sliding", "recurrent")
EXACT = {"rtol": 1e-10, "atol": 1e-10}
SINGLE = {"rtol": 1e-5, "atol": 1e-5}
"""For models with parts in float32 whatever their dtype: deepseek_v3's router, qwen3_next's norms and delta
rule. With AVX-512, transformers' qwen3_next in float64 gives one prompt alone and the same prompt twice in a
batch logits that differ by 9e-7."""


def bounds(target: LocalTarget) -> dict[str, float]:
    return SINGLE if target.facts.model_type in ("deepseek_v3", "qwen3_next") else EXACT


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalTarget:
    folder = save_tiny_target(tmp_path_factory.mktemp("model"), request.param, dtype="float64")
    return LocalTarget.load(folder, dtype="float64")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LocalTarget:
    folder = save_tiny_target(tmp_path_factory.mktemp("model"), dtype="float64")
    return LocalTarget.load(folder, dtype="float64")


def tokens_of(row: int, length: int) -> list[int]:
    return [random.Random(1000 * row + i).randrange(VOCAB_SIZE) for i in range(length)]


def whole(target: LocalTarget, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] by transformers, without any code of ours."""
    with torch.no_grad():
        logits: torch.Tensor = target.model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def feed(session: DecodeSession, new: list[list[int]], logits: session_module.Wanted = "all") -> torch.Tensor:
    longest = max(map(len, new))
    padded = torch.tensor([row + [7] * (longest - len(row)) for row in new])
    return session.forward(padded, torch.tensor([len(row) for row in new]), logits=logits).logits


def compare(target: LocalTarget, rows: list[list[int]], new: list[list[int]], found: torch.Tensor) -> None:
    for row, (tokens, added) in enumerate(zip(rows, new, strict=True)):
        expected = whole(target, tokens)[-len(added) :]
        torch.testing.assert_close(found[row, : len(added)], expected, **bounds(target))


def test_kind_of_session(target: LocalTarget) -> None:
    recurrent = target.facts.model_type == "qwen3_next"
    assert isinstance(target.session(1), RecomputeSession if recurrent else RaggedSession)
    assert (target.ragged_fault is None) != recurrent


def test_rows_of_any_lengths_grow_shrink_and_leave(target: LocalTarget) -> None:
    """A walk of random steps; after each, every row equals a whole forward pass over its tokens."""
    draw = random.Random(4)
    rows = [tokens_of(row, n) for row, n in enumerate((5, 1, 19, 8))]
    session = target.session(4)
    first = session.prefill(rows, budget_tokens=20)
    for row, tokens in enumerate(rows):
        torch.testing.assert_close(first[row], whole(target, tokens)[-1], **bounds(target))
    for step in range(14):
        new = [[draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 9))] for _ in rows]
        rows = [tokens + added for tokens, added in zip(rows, new, strict=True)]
        compare(target, rows, new, feed(session, new))
        assert session.lengths.tolist() == [len(tokens) for tokens in rows]
        if step % 2 == 0:
            kept = [draw.randint(max(0, len(tokens) - 8), len(tokens)) for tokens in rows]
            session.rollback(torch.tensor(kept))
            rows = [tokens[:n] for tokens, n in zip(rows, kept, strict=True)]
        if step in (4, 9):
            order = draw.sample(range(len(rows)), len(rows) - 1)
            session.keep(torch.tensor(order))
            rows = [rows[i] for i in order]
    assert max(map(len, rows)) > 64 or len(rows) == 2  # storage has grown


def test_drafts_of_three_with_rollback(target: LocalTarget) -> None:
    """The shape of speculative decoding: q = 4 each time, some of them taken back."""
    rows = [tokens_of(row, n) for row, n in enumerate((6, 11, 3))]
    session = target.session(3)
    session.prefill(rows)
    draw = random.Random(9)
    for _ in range(6):
        new = [[draw.randrange(VOCAB_SIZE) for _ in range(4)] for _ in rows]
        found = feed(session, new)
        rows = [tokens + added for tokens, added in zip(rows, new, strict=True)]
        compare(target, rows, new, found)
        rows = [tokens[: len(tokens) - draw.randint(0, 3)] for tokens in rows]
        session.rollback(torch.tensor([len(tokens) for tokens in rows]))


def test_aux_and_last_states_equal_capture(target: LocalTarget) -> None:
    rows = [tokens_of(row, n) for row, n in enumerate((9, 4))]
    session = target.session(2)
    heads = [[*rows[0][:5]], [*rows[1][:2]]]
    feed(session, heads)
    tails = [rows[0][5:], [*rows[1][2:], 0, 0]]
    output = session.forward(
        torch.tensor(tails), torch.tensor([4, 2]), logits="all", aux_layers=[0, 2, NUM_LAYERS]
    )
    captured = target.capture(rows, [0, 2, NUM_LAYERS])
    assert output.aux is not None
    for row, (start, length) in enumerate(((5, 9), (2, 4))):
        count = length - start
        torch.testing.assert_close(output.aux[row, :count], captured[row].aux[start:], **bounds(target))
        torch.testing.assert_close(output.last[row, :count], captured[row].last[start:], **bounds(target))


def test_logits_of_the_last_token_only(target: LocalTarget) -> None:
    new = [[4, 5, 6], [9]]
    every, last = target.session(2), target.session(2)
    full = feed(every, new, "all")
    picked = feed(last, new, "last")
    torch.testing.assert_close(picked, torch.stack([full[0, 2], full[1, 0]]), **bounds(target))


def test_the_head_takes_only_the_rows_asked_for(llama: LocalTarget) -> None:
    session = llama.session(2)
    shapes: list[tuple[int, ...]] = []
    handle = llama.structure.head.register_forward_hook(lambda m, a, o: shapes.append(tuple(o.shape)))
    session.prefill([[1, 2, 3], [4]])
    feed(session, [[1, 2], [3]], "last")
    feed(session, [[1, 2], [3]], "all")
    handle.remove()
    assert shapes == [(2, VOCAB_SIZE), (2, VOCAB_SIZE), (2, 2, VOCAB_SIZE)]


def test_a_wrong_mask_is_found_before_use(llama: LocalTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of the ragged machinery that is broken makes sessions fall back, with a reason."""
    honest = session_module.RaggedCache.begin

    def shifted(self: object, starts: list[int], *others: object) -> object:
        rows = honest(self, starts, *others)  # type: ignore[arg-type]
        if max(starts) > 0:
            rows.positions = rows.positions + 1
        return rows

    assert session_module.ragged_fault(llama) is None
    monkeypatch.setattr(session_module.RaggedCache, "begin", shifted)
    assert "states differ" in str(session_module.ragged_fault(llama))


def test_what_is_refused(target: LocalTarget) -> None:
    session = target.session(2)
    feed(session, [[1, 2], [3]])
    with pytest.raises(TargetError, match="only be shortened"):
        session.rollback(torch.tensor([3, 1]))
    with pytest.raises(TargetError, match="only be shortened"):
        session.rollback(torch.tensor([-1, 1]))
    with pytest.raises(TargetError, match="only be shortened"):
        session.rollback(torch.tensor([1]))
    with pytest.raises(TargetError, match="do not fit"):
        session.forward(torch.tensor([[1]]))
    with pytest.raises(TargetError, match="num_new"):
        session.forward(torch.tensor([[1], [2]]), torch.tensor([1, 2]))
    with pytest.raises(TargetError, match="num_new"):
        session.forward(torch.tensor([[1], [2]]), torch.tensor([1, 0]))
    with pytest.raises(TargetError, match="empty rows"):
        session.prefill([[1], [2]])
    assert session.lengths.tolist() == [2, 1]
