"""Training steps side by side, on something tiny: the referee is right, and all agree with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.training.arithmetic import needed
from benchmarks.training.case import EPS, THETA, Case, make_parts
from benchmarks.training.child import PEERS
from benchmarks.training.contestant import Optimizer
from benchmarks.training.plain import reference_sums

from eyas.drafter.rows import supervised_rows
from tests.benchmarks.test_run import call
from tests.drafter.cases import make_shape
from tests.drafter.naive import NaiveDrafter, row_loss

SIZES = {
    "hidden": 16, "intermediate": 24, "heads": 4, "kv_heads": 2, "head_dim": 6, "vocab": 60, "drafts": 20,
    "length": 14, "steps": 3,
}  # fmt: skip
TINY = Case(**SIZES, start=5)
SIZE_WORDS = [word for key, value in SIZES.items() for word in (f"--{key.replace('_', '-')}", str(value))]
# compared more closely than bfloat16 allows, which "auto" is on some processors
WORDS = ["--rounds", "1", "--threads", "1", "--dtype", "float32", *SIZE_WORDS]


def test_the_referee_agrees_with_the_row_by_row_drafter() -> None:
    parts = make_parts(TINY)
    shape = make_shape(
        hidden_size=16, target_hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=6,
        draft_vocab_size=20, target_vocab_size=60, rms_norm_eps=EPS, rope_theta=THETA,
    )  # fmt: skip
    weights = {name: tensor.double() for name, tensor in parts.weights.items()}
    naive = NaiveDrafter(weights, shape, parts.embedding.double())
    everything = [(0, TINY.length)]
    logits = naive.logits(parts.tokens.tolist(), everything, parts.aux.double(), TINY.steps)
    found = reference_sums(TINY)
    wanted = parts.last.double() @ parts.head.double().T
    for step in range(TINY.steps):
        for shifted in (False, True):
            name = "shifted" if shifted else "span"
            for kind in ("soft_ce", "kl"):
                total = sum(
                    float(row_loss(kind, logits[row, step], wanted[row + 1 + step], parts.draft_ids))
                    for row in TINY.rows(step, shifted=shifted)
                )
                assert found[kind][name][step] == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("start", [0, 1, 5])
def test_the_rows_are_those_of_the_definition(start: int) -> None:
    case = replace(TINY, start=start)
    for step in range(case.steps):
        expected = supervised_rows([(start, case.length)], case.length, step)
        assert [*case.rows(step, shifted=False)] == expected.tolist()


def test_half_of_the_rows_against_the_plain_step() -> None:
    result = json.loads(call("train-half", *WORDS, "--against", "plain")[-1])
    details = result["details"]
    assert details["equal_loss"] is True
    assert details["baseline_is"].startswith("plain")
    rows = details["by_threads"]["1"]["of"]
    assert rows["eyas"]["apart_from_float64"] < 1e-5
    expected = rows["plain"]["cpu_seconds"] / rows["eyas"]["cpu_seconds"]
    assert result["ratio"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.skipif(not PEERS.is_dir(), reason="make peers has not been run")
def test_a_real_peer_reaches_the_same_loss_after_the_same_steps() -> None:
    details = json.loads(call("train-step", *WORDS, "--against", "speculators")[-1])["details"]
    assert details["not_run"] == {}
    rows = details["by_threads"]["1"]["of"]
    assert rows["speculators"]["equal"] is True
    first, last = rows["eyas"]["loss_first_and_last"]
    assert [first, last] == pytest.approx(rows["speculators"]["loss_first_and_last"], rel=1e-5)
    assert last < first


def test_arithmetic_is_counted_as_the_definition_multiplies() -> None:
    """By hand, for one sample of 4 tokens of which all are supervised, 2 steps, all sizes tiny."""
    case = Case(
        hidden=2, intermediate=3, heads=2, kv_heads=1, head_dim=5, vocab=9, drafts=7, length=4, steps=2
    )  # fmt: skip
    # step 0 has rows 0 and 1, step 1 has row 0; nothing looks at rows behind row 1
    counted = needed(case)
    once, thrice = 2, 6
    assert counted["fc (aux states need no gradient)"] == 2 * once * 2 * (6 * 2)
    assert counted["query, key, value of the token, once"] == thrice * 2 * (2 * 10 + 2 * 10)
    # keys and values of two rows at step 0 and one at step 1; three queries
    assert counted["query, key, value of the feature"] == thrice * 2 * (3 * 10 + 3 * 10)
    # row 0 sees 1 key, row 1 sees 2; at step 1 row 0 sees 1 and 1 of its own; scores and values
    assert counted["attention"] == thrice * 2 * (1 + 2 + 2) * 10
    assert counted["output projection"] == thrice * 3 * 10 * 2
    assert counted["MLP"] == thrice * 3 * 3 * 2 * 3
    assert counted["head"] == thrice * 3 * 2 * 7
    assert counted["teacher, forward only, once"] == once * 2 * 2 * 7


def test_matrix_rate_says_what_it_counted() -> None:
    result = json.loads(call("matrix-rate", *SIZE_WORDS, "--rounds", "1")[-1])
    details = result["details"]
    assert details["needed_gflop"] == pytest.approx(
        sum(needed(replace(TINY, start=0)).values()) / 1e9, abs=0.005
    )
    assert 0 < result["ratio"] < 1


def test_data_wait_trains_from_a_real_store(tmp_path: Path) -> None:
    words = ("--samples", "6", "--threads", "1", "--folder", str(tmp_path))
    result = json.loads(call("data-wait", *SIZE_WORDS, *words)[-1])
    assert result["details"]["steps"] > 0
    assert 0 <= result["value"] < 1
    assert 0 < result["baseline"] < 1
    assert list(tmp_path.iterdir()) == []


def test_steps_that_a_narrow_weight_cannot_hold_add_up() -> None:
    """As SpecForge's own optimizer has it; AdamW on bfloat16 itself would leave the weight where it is."""
    case = replace(TINY, lr=1e-4)
    narrow = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    wide = torch.nn.Parameter(torch.ones(3))
    alone = torch.optim.AdamW([wide], case.lr, (0.9, 0.95), weight_decay=0.0)
    optimizer = Optimizer(case, [narrow])
    for _ in range(100):
        narrow.grad, wide.grad = torch.ones_like(narrow), torch.full_like(wide, 3**-0.5)  # clipped to one
        optimizer.step()
        alone.step()
        assert narrow.grad is None
    assert wide[0].item() == pytest.approx(0.99, abs=1e-4)
    assert torch.equal(narrow.detach(), wide.detach().bfloat16())


def test_two_ranks_train_what_one_trains(tmp_path: Path) -> None:
    words = ("--samples", "12", "--batch-tokens", "256", "--rounds", "1", "--dtype", "float32")
    result = json.loads(call("ranks", *SIZE_WORDS, *words, "--folder", str(tmp_path))[-1])
    details = result["details"]
    assert details["losses_apart"] < 1e-5
    assert details["steps"] > 4
    (everything,), both = details["tokens_of_each"]["one"], details["tokens_of_each"]["two together"]
    assert sum(both) == everything  # dealt out, not done twice
    assert min(both) > everything / 4
    assert details["tokens_of_each"]["two apart"] == [everything, everything]
    assert result["ratio"] == pytest.approx(result["value"] / result["baseline"], abs=0.01)
    assert list(tmp_path.iterdir()) == []
