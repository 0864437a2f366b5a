from __future__ import annotations

import numpy as np
import pytest
import torch

from eyas.drafter.loss import LossTask, draft_loss, row_facts
from eyas.drafter.teacher import Teacher
from eyas.drafter.vocabulary import DraftVocabulary
from tests.drafter.cases import make_head, make_vocabulary
from tests.drafter.naive import row_loss

CPU = torch.device("cpu")
KINDS = ["soft_ce", "kl", "lk", "mixed"]


def task_for(kind, teacher, last, kept, weights):
    return LossTask(kind, kept, last, teacher.draft_head, teacher.full_facts(last).log_normaliser, weights)


@pytest.fixture
def setting():
    generator = torch.Generator().manual_seed(1)
    teacher = Teacher(make_head(), make_vocabulary(), device=CPU, dtype=torch.float64)
    last = torch.randn(6, 12, generator=generator, dtype=torch.float64)
    kept = [np.arange(6), np.array([0, 1, 3, 4])]
    states = [torch.randn(len(k), 12, generator=generator, dtype=torch.float64) for k in kept]
    head = torch.randn(11, 12, generator=generator, dtype=torch.float64)
    return teacher, last, kept, states, head


@pytest.mark.parametrize("kind", KINDS)
def test_row_losses_equal_brute_force(kind, setting):
    teacher, last, kept, states, head = setting
    ids = torch.from_numpy(teacher.vocabulary.target_ids)
    facts = row_facts(states, head, task_for(kind, teacher, last, kept, [1.0, 1.0]))
    for step, places in enumerate(kept):
        for row, place in enumerate(places):
            logits, target = head @ states[step][row], make_head() @ last[place + step]
            assert abs(facts.losses[step][row] - row_loss(kind, logits, target, ids)) < 1e-12
            q, p = torch.softmax(logits, 0), torch.softmax(target, 0)[ids]
            assert abs(facts.acceptance[step][row] - torch.minimum(q, p).sum()) < 1e-12
            assert facts.drafts[step][row] == logits.argmax()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_finite_differences(kind, setting):
    teacher, last, kept, states, head = setting
    task = task_for(kind, teacher, last, kept, [0.3, 0.2])
    inputs = [head.requires_grad_(), *(state.requires_grad_() for state in states)]

    class Anew(torch.autograd.Function):
        """The loss gives its gradients away, and the check asks more than once."""

        @staticmethod
        def forward(ctx, *inputs):
            fresh = [x.detach().requires_grad_() for x in inputs]
            with torch.enable_grad():
                loss, _ = draft_loss(fresh[1:], fresh[0], task)
            ctx.save_for_backward(*torch.autograd.grad(loss, fresh, torch.tensor(7.0).to(loss)))
            return loss.detach()

        @staticmethod
        def backward(ctx, gradient):
            return tuple(made * gradient / 7 for made in ctx.saved_tensors)

    assert torch.autograd.gradcheck(Anew.apply, inputs)


def test_gradients_are_given_away_once(setting):
    teacher, last, kept, states, head = setting
    task = task_for("soft_ce", teacher, last, kept, [0.3, 0.2])
    inputs = [head.requires_grad_(), *(state.requires_grad_() for state in states)]
    once = torch.autograd.grad(draft_loss(states, head, task)[0], inputs)
    scaled = torch.autograd.grad(3 * draft_loss(states, head, task)[0], inputs)
    for a, b in zip(once, scaled, strict=True):
        torch.testing.assert_close(3 * a, b)
    loss, _ = draft_loss(states, head, task)
    kept_ones = torch.autograd.grad(loss, inputs, retain_graph=True)
    with pytest.raises(RuntimeError, match="make the loss again"):
        torch.autograd.grad(loss, inputs)
    for a, b in zip(once, kept_ones, strict=True):
        assert torch.equal(a, b)


def test_sums_are_of_plain_rows(setting):
    teacher, last, kept, states, head = setting
    task = task_for("soft_ce", teacher, last, kept, [0.5, 0.25])
    total, sums = draft_loss(states, head, task)
    rows = row_facts(states, head, task).losses
    torch.testing.assert_close(sums, torch.stack([r.sum() for r in rows]))
    torch.testing.assert_close(total, 0.5 * sums[0] + 0.25 * sums[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_target_mass_in_the_draft_vocabulary_is_finite(kind, dtype):
    """Row 1 of the target gives all its mass to token 0, which cannot be drafted."""
    target_head = torch.zeros(5, 4, dtype=dtype)
    target_head[0, 0] = 300.0
    target_head[1:, 1:] = torch.eye(4, 3, dtype=dtype)
    teacher = Teacher(target_head, DraftVocabulary(np.array([2, 3, 4]), 5), device=CPU, dtype=dtype)
    last = torch.tensor([[0.0, 1, 2, 3], [9.0, 1, 2, 3]], dtype=dtype)
    state = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    head = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    task = task_for(kind, teacher, last, [np.arange(2)], [1.0])
    loss, _ = draft_loss([state], head, task)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(state.grad).all()
    assert torch.isfinite(head.grad).all()
    assert state.grad[0].abs().max() > 0
    if kind == "lk":
        assert state.grad[1].abs().max() == 0
    facts = row_facts([state.detach()], head.detach(), task)
    assert facts.acceptance[0][1] < 1e-6
    assert facts.acceptance[0][0] > 0.01


def test_kl_is_zero_where_the_drafter_equals_the_target():
    teacher = Teacher(make_head(), make_vocabulary(), device=CPU, dtype=torch.float64)
    last = torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    task = task_for("kl", teacher, last, [np.arange(3)], [1.0])
    loss, _ = draft_loss([last.clone().requires_grad_()], teacher.draft_head, task)
    assert abs(loss.item()) < 1e-12


def test_full_facts_in_chunks(monkeypatch):
    teacher = Teacher(make_head(), make_vocabulary(), device=CPU, dtype=torch.float64)
    last = torch.randn(7, 12, dtype=torch.float64)
    monkeypatch.setattr("eyas.drafter.teacher.CHUNK_ELEMENTS", 2 * 23)
    facts = teacher.full_facts(last)
    logits = last @ make_head().T
    torch.testing.assert_close(facts.log_normaliser, torch.logsumexp(logits, 1))
    assert facts.top_tokens.tolist() == logits.argmax(1).tolist()
    assert len(teacher.full_facts(last[:0]).log_normaliser) == 0
