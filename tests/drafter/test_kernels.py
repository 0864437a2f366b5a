"""The compiled passes beside their definitions in float64."""

from __future__ import annotations

import ctypes
import math
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.drafter.kernels import compiled
from eyas.drafter.loss import MIN_ACCEPTANCE, LossTask, draft_loss
from eyas.drafter.teacher import Teacher
from eyas.drafter.vocabulary import DraftVocabulary
from tests.drafter.naive import row_loss
from tests.drafter.passes import look_again

BUILT = {"_rows": True, "_rows_v3": "AVX2", "_rows_v4": "AVX512"}
NARROW = [torch.float32, torch.bfloat16]
STEP = {torch.float32: 2**-21, torch.bfloat16: 2**-8}
"""Relative size of a rounding to the type, four of them in float32 for what was summed up before."""


@pytest.fixture(params=BUILT)
def library(request):
    """Each build that this processor can run."""
    if (reason := compiled.why_not()) is not None:
        pytest.skip(f"no compiled passes: {reason}")
    path = Path(compiled.__file__).with_name(request.param + EXTENSION_SUFFIXES[0])
    order = ["DEFAULT", "AVX2", "AVX512"]
    needed = BUILT[request.param]
    found = torch.backends.cpu.get_cpu_capability()
    if needed is not True and (found not in order or order.index(found) < order.index(needed)):
        pytest.skip(f"this processor has no {needed}")
    return ctypes.CDLL(str(path))


@pytest.fixture(params=NARROW, ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture
def kernels(library, dtype):
    return compiled.Kernels(library, str(dtype).removeprefix("torch."))


def draw(*size, seed=0, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(dtype)


def close(found, wanted, dtype, *, times=1):
    step = STEP[dtype] * times
    torch.testing.assert_close(found.double(), wanted, rtol=step, atol=step)


@pytest.mark.parametrize("width", [1, 7, 16, 333])
@pytest.mark.parametrize("kind", ["soft_ce", "lk", "mixed"])
def test_losses_and_their_gradients(kernels, dtype, kind, width):
    logits = draw(5, width, scale=4.0, dtype=dtype)
    teacher = torch.softmax(draw(5, width, seed=1, scale=3.0), -1)
    mass = torch.rand(5, 1, generator=torch.Generator().manual_seed(2))
    exact = logits.double().requires_grad_()
    q, real = torch.softmax(exact, -1), teacher.double() * mass.double()
    cross = -(teacher.double() * torch.log_softmax(exact, -1)).sum(-1)
    miss = -torch.minimum(q, real).sum(-1).log()
    wanted = {"soft_ce": cross, "lk": miss, "mixed": cross + miss}[kind]
    [gradient] = torch.autograd.grad((0.3 * wanted).sum(), exact)
    plain = kernels.loss_rows(logits, teacher, mass, kind=kind, weight=None, least=MIN_ACCEPTANCE)
    assert (logits.double() == exact.detach()).all(), "without a weight nothing is changed"
    losses = kernels.loss_rows(logits, teacher, mass, kind=kind, weight=0.3, least=MIN_ACCEPTANCE)
    assert torch.equal(plain, losses)
    close(losses, wanted.detach(), torch.float32, times=4)
    close(logits, gradient, dtype, times=2)


def test_a_row_that_hardly_accepts_anything_has_no_lk_gradient(kernels, dtype):
    logits = torch.tensor([[0.0, 40.0], [0.0, 1.0]], dtype=dtype)
    teacher, mass = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.ones(2, 1)
    losses = kernels.loss_rows(logits, teacher, mass, kind="lk", weight=1.0, least=MIN_ACCEPTANCE)
    assert losses[0] == pytest.approx(-math.log(MIN_ACCEPTANCE), rel=1e-6)
    assert (logits[0] == 0).all()
    assert (logits[1] != 0).all()


@pytest.mark.parametrize("width", [1, 19, 512])
def test_softmax(kernels, dtype, width):
    logits = draw(4, width, scale=5.0, dtype=dtype)
    powers, normaliser, entropies = kernels.softmax_rows(logits, entropy=True)
    exact = torch.softmax(logits.double(), -1)
    close(powers, exact, torch.float32)
    close(normaliser.squeeze(-1), torch.logsumexp(logits.double(), -1), torch.float32, times=4)
    close(entropies, (exact * exact.log()).sum(-1), torch.float32, times=8)
    assert kernels.softmax_rows(logits, entropy=False)[2] is None


def test_exponentials_over_their_whole_range(library):
    """Of 20,001 numbers down to where float32 has no normal ones left, beside numpy's in float64."""
    kernels = compiled.Kernels(library, "float32")
    x = torch.linspace(-87.3, 0.0, 20_001)
    pairs = torch.stack([torch.zeros_like(x), x], dim=1)
    powers, _, _ = kernels.softmax_rows(pairs, entropy=False)
    wanted = np.exp(x.numpy().astype(np.float64))
    error = np.abs(powers[:, 1].numpy() / (wanted / (1 + wanted)) - 1)
    assert error.max() < 4 * 2**-23
    far, _, _ = kernels.softmax_rows(torch.tensor([[0.0, -100.0, -1e30, -math.inf]]), entropy=False)
    assert far.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_numbers_are_rounded_to_bfloat16_as_torch_rounds_them(library):
    """Turning (1, 0) by an angle gives its cosine: any float32, ties, tiny ones, every kind of NaN."""
    upper = torch.arange(0, 1 << 16, 37, dtype=torch.int64)
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = ((upper.unsqueeze(1) << 16) | lower).flatten()
    bits = torch.cat([bits, torch.tensor([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7F800000, 0x7F7FFFFF])])
    numbers = torch.from_numpy(bits.numpy().astype(np.uint32).view(np.float32))
    x = torch.tensor([1.0, 0.0], dtype=torch.bfloat16).expand(len(numbers), 1, 2).contiguous()
    column = numbers.unsqueeze(1)
    turned = compiled.Kernels(library, "bfloat16").turn(x, column, torch.zeros_like(column))[:, 0, 0]
    wanted = numbers.bfloat16()
    assert torch.equal(turned.isnan(), numbers.isnan())
    assert torch.equal(turned[~turned.isnan()], wanted[~wanted.isnan()])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(kernels, dtype, bad):
    logits, teacher = draw(2, 40, dtype=dtype), torch.softmax(draw(2, 40, seed=1), -1)
    logits[1, 17] = bad
    losses = kernels.loss_rows(logits, teacher, None, kind="soft_ce", weight=1.0, least=MIN_ACCEPTANCE)
    assert torch.isfinite(losses[0])
    assert not torch.isfinite(losses[1])
    assert torch.isfinite(logits[0]).all()
    assert not torch.isfinite(logits[1]).all()
    normed, _ = kernels.norm(torch.full((1, 8), bad, dtype=dtype), torch.ones(8), 1e-5)
    assert not torch.isfinite(normed).any()


@pytest.mark.parametrize(("rows", "width"), [(1, 5), (70, 48)])
def test_norm(kernels, dtype, rows, width):
    x, gradient = draw(rows, width, dtype=dtype), draw(rows, width, seed=1, dtype=dtype)
    weight = draw(width, seed=2)
    exact, wide = x.double().requires_grad_(), weight.double().requires_grad_()
    wanted = exact / (exact.square().mean(-1, keepdim=True) + 1e-3).sqrt() * wide
    wanted.backward(gradient.double())
    normed, scales = kernels.norm(x, weight, 1e-3)
    close(normed, wanted.detach(), dtype)
    d_x, d_weight = kernels.norm_gradient(gradient, x, weight, scales, of_x=True)
    close(d_x, exact.grad, dtype, times=2)
    close(d_weight, wide.grad, torch.float32, times=rows)
    nothing, same = kernels.norm_gradient(gradient, x, weight, scales, of_x=False)
    assert nothing is None
    assert torch.equal(same, d_weight)


@pytest.mark.parametrize("count", [3, 8_192, 20_000])
def test_gate(kernels, dtype, count):
    gate, up, gradient = (draw(count, seed=seed, scale=4.0, dtype=dtype) for seed in range(3))
    gate[0] = 200.0
    gate[1] = -200.0
    leaves = [gate.double().requires_grad_(), up.double().requires_grad_()]
    wanted = leaves[0] * torch.sigmoid(leaves[0]) * leaves[1]
    wanted.backward(gradient.double())
    close(kernels.gate(gate, up), wanted.detach(), dtype, times=2)
    for found, leaf in zip(kernels.gate_gradient(gradient, gate, up), leaves, strict=True):
        close(found, leaf.grad, dtype, times=4)


@pytest.mark.parametrize("back", [False, True])
def test_turn(kernels, dtype, back):
    """Pairs as complex numbers; rows that lie apart, as those of keys beside values do."""
    both = draw(6, 5, 8, dtype=dtype)
    x = both[:, 1:3]
    angles = draw(6, 4, seed=1, scale=3.0)
    found = kernels.turn(x, angles.cos(), angles.sin(), back=back)
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    factor = torch.complex(angles.cos().double(), angles.sin().double() * (-1 if back else 1))
    wanted = pairs * factor.unsqueeze(1)
    assert found.is_contiguous()
    close(found, torch.cat([wanted.real, wanted.imag], -1), dtype, times=2)


def test_softmax_of_scores_over_what_is_seen(kernels, dtype):
    groups, queries, group, keys = 2, 5, 3, 21
    scores = draw(groups, queries, group, keys, scale=3.0, dtype=dtype)
    d_weights = draw(groups, queries, group, keys, seed=1, dtype=dtype)
    mean = draw(groups, queries, group, seed=2)
    seen = torch.tensor([0, 1, 17, 30, -3])  # rows that are filled up may see fewer than none
    exact, gradient = scores.double(), d_weights.double()
    weights = scores.clone()
    normaliser = kernels.weights_of_scores(weights, seen)
    again = scores.clone()
    kernels.gradient_of_scores(again, d_weights, seen, normaliser, mean)
    for query, count in enumerate([0, 1, 17, 21, 0]):
        wanted = torch.zeros(groups, group, keys, dtype=torch.float64)
        wanted[..., :count] = torch.softmax(exact[:, query, :, :count], -1)
        close(weights[:, query], wanted, dtype)
        close(again[:, query], wanted, dtype, times=2)
        assert (weights[:, query, :, count:] == 0).all()
        d_scores = wanted * (gradient[:, query] - mean[:, query].double().unsqueeze(-1))
        close(d_weights[:, query], d_scores, dtype, times=4)
        if count:
            sums = torch.logsumexp(exact[:, query, :, :count], -1)
            close(normaliser[:, query], sums, torch.float32, times=4)


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("group", [1, 3])
def test_own_keys_and_values(kernels, dtype, steps, group):
    """One softmax over earlier keys and own ones, of which the earlier part is given with its normaliser."""
    rows, groups, width, earlier = 5, 2, 8, 4
    heads = groups * group
    query = draw(rows, heads, width, dtype=dtype)
    own = [draw(steps, rows, groups, width, seed=seed, dtype=dtype) for seed in (1, 2)]
    gradient = draw(rows, heads, width, seed=3, dtype=dtype)
    scores = draw(rows, heads, earlier, seed=4).double()
    values = draw(rows, heads, earlier, width, seed=5).double()
    output = (torch.softmax(scores, -1).unsqueeze(-2) @ values).squeeze(-2).to(dtype)
    normaliser = torch.logsumexp(scores, -1).float()

    exact_query, key, value = (x.double().requires_grad_() for x in (query, *own))
    by_head = [x.repeat_interleave(group, dim=2).permute(1, 2, 0, 3) for x in (key, value)]
    later = (by_head[0] @ exact_query.unsqueeze(-1)).squeeze(-1) / math.sqrt(width)
    weights = torch.softmax(torch.cat([normaliser.double().unsqueeze(-1), later], -1), -1)
    wanted = weights[..., :1] * output.double() + (weights[..., 1:].unsqueeze(-2) @ by_head[1]).squeeze(-2)
    total = torch.logaddexp(normaliser.double(), torch.logsumexp(later, -1)).detach()
    d_query = draw(rows, heads, width, seed=6, dtype=dtype)
    before = d_query.double()
    # of the earlier part only the output is known here, so its share is that of one key with that output
    expected = torch.autograd.grad((wanted * gradient.double()).sum(), (exact_query, key, value))

    kernels.merge_own(query, *own, output, normaliser)
    close(output, wanted.detach(), dtype, times=2)
    close(normaliser, total, torch.float32, times=4)
    found = kernels.merge_own_gradient(gradient, query, *own, output, normaliser, d_query)
    close(d_query, before + expected[0], dtype, times=4)
    for one, other in zip(found, expected[1:], strict=True):
        close(one, other, dtype, times=8)


def test_results_do_not_depend_on_the_number_of_threads(kernels, dtype):
    x, gradient, weight = draw(101, 64, dtype=dtype), draw(101, 64, seed=1, dtype=dtype), draw(64, seed=2)
    teacher = torch.softmax(draw(101, 64, seed=3), -1)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            logits = x.clone()
            losses = kernels.loss_rows(logits, teacher, None, kind="soft_ce", weight=0.5, least=1e-6)
            normed, scales = kernels.norm(x, weight, 1e-5)
            d_x, d_weight = kernels.norm_gradient(gradient, x, weight, scales, of_x=True)
            results.append([losses, logits, normed, d_x, d_weight, kernels.gate(x, gradient)])
            results[-1] += kernels.gate_gradient(x, gradient, x)
            results[-1] += kernels.softmax_rows(x, entropy=True)
            heads = x.view(101, 4, 16)
            results[-1].append(
                kernels.turn(heads, teacher[:, :8].contiguous(), teacher[:, 8:16].contiguous())
            )
            scores, d_scores = (
                x[:100].reshape(2, 25, 2, 64).clone(),
                gradient[:100].reshape(2, 25, 2, 64).clone(),
            )
            again, seen = scores.clone(), torch.arange(25)
            normaliser = kernels.weights_of_scores(scores, seen)
            kernels.gradient_of_scores(again, d_scores, seen, normaliser, normaliser.nan_to_num(neginf=0.0))
            results[-1] += [scores, normaliser, again, d_scores]
            own = [draw(3, 101, 2, 16, seed=seed, dtype=dtype) for seed in (5, 6)]
            output, sums, d_query = gradient.view(101, 4, 16).clone(), draw(101, 4, seed=7), heads.clone()
            kernels.merge_own(heads, *own, output, sums)
            results[-1] += kernels.merge_own_gradient(heads, heads, *own, output, sums, d_query)
            results[-1] += [output, sums, d_query]
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_either_way_is_taken_where_it_is_asked_for(passes):
    assert (compiled.kernels_for(torch.zeros(1)) is not None) == (passes == "compiled")


@pytest.mark.parametrize("kind", ["soft_ce", "kl", "lk", "mixed"])
def test_losses_of_a_vocabulary_equal_brute_force(passes, kind):
    """Chunks of logits and rows left out between steps, in float32, with and without the compiled passes."""
    vocabulary = DraftVocabulary(np.arange(0, 96, 2), 101)
    target_head, head = draw(101, 16, seed=1, scale=0.5), draw(48, 16, seed=2, scale=0.5).requires_grad_()
    teacher = Teacher(target_head, vocabulary, device=torch.device("cpu"), dtype=torch.float32)
    last = draw(30, 16, seed=3)
    kept = [np.arange(30), np.array([*range(12), *range(15, 28)])]
    states = [draw(len(places), 16, seed=4 + i).requires_grad_() for i, places in enumerate(kept)]
    normaliser = teacher.full_facts(last).log_normaliser
    loss, sums = draft_loss(
        states, head, LossTask(kind, kept, last, teacher.draft_head, normaliser, [0.3, 0.2])
    )
    found = torch.autograd.grad(loss, [head, *states])
    leaves = [x.detach().double().requires_grad_() for x in (head, *states)]
    ids = torch.from_numpy(vocabulary.target_ids)
    per_step = []
    for step, places in enumerate(kept):
        logits = leaves[1 + step] @ leaves[0].T
        targets = last.double() @ target_head.double().T
        rows = (row_loss(kind, logits[i], targets[place + step], ids) for i, place in enumerate(places))
        per_step.append(sum(rows))
    exact = 0.3 * per_step[0] + 0.2 * per_step[1]
    torch.testing.assert_close(sums.double(), torch.stack(per_step).detach(), rtol=1e-5, atol=1e-4)
    for one, other in zip(found, torch.autograd.grad(exact, leaves), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("capability", ["AVX512", "AVX2", "DEFAULT", "VSX"])
def test_the_latest_build_that_runs_and_is_there(capability, tmp_path, monkeypatch):
    """Of builds of which an older compiler made only some; none of another processor's."""
    order = ["_rows_v4", "_rows_v3", "_rows"]
    runs = order[{"AVX512": 0, "AVX2": 1}.get(capability, 2) :]
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    try:
        for there in [order, order[1:], order[2:], order[:1]]:
            for path in tmp_path.iterdir():
                path.unlink()
            for name in there:
                (tmp_path / f"{name}{EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
            look_again()
            found = compiled.why_not()
            wanted = next((name for name in runs if name in there), None)
            assert found is not None
            assert found.startswith(f"{wanted}." if wanted else "they were not built"), (found, wanted)
    finally:
        look_again()


def test_functions_of_another_revision_are_not_called(monkeypatch):
    if (reason := compiled.why_not()) is not None:
        pytest.skip(f"no compiled passes: {reason}")
    x = torch.ones(2, 3)
    assert compiled.kernels_for(x) is not None
    assert compiled.kernels_for(x.double()) is None
    look_again()
    try:
        monkeypatch.setattr(compiled, "REVISION", compiled.REVISION + 1)
        assert "other source" in (compiled.why_not() or "")
        assert compiled.kernels_for(x) is None
        monkeypatch.undo()
        look_again()
        monkeypatch.setattr(compiled, "__file__", "/nowhere/compiled.py")
        assert "compiler" in (compiled.why_not() or "")
    finally:
        look_again()


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_rows_are_copied_and_nothing_beside_them(dtype):
    """At every offset from a line of the cache, of every length around it, from rows that lie apart."""
    source = torch.randint(-100, 100, (3, 300), generator=torch.Generator().manual_seed(0)).to(dtype)
    for first in range(40):
        for width in [*range(5), 31, 32, 33, 63, 64, 65, 200]:
            wide = torch.full((3, 300), 7, dtype=dtype)
            compiled.copy_rows(wide[:, first : first + width], source[:, 11 : 11 + width])
            wanted = torch.full((3, 300), 7, dtype=dtype)
            wanted[:, first : first + width] = source[:, 11 : 11 + width]
            assert torch.equal(wide, wanted), (first, width)


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_large_copy_is_whole_however_many_threads_share_it(threads):
    source = torch.randint(0, 1 << 30, (701, 1001), generator=torch.Generator().manual_seed(1))
    assert source.nbytes > compiled._LARGE_COPY
    place = torch.zeros(701, 1100, dtype=torch.int64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compiled.copy_rows(place[:, 50:1051], source)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(place[:, 50:1051], source)
    assert (place[:, :50] == 0).all()
    assert (place[:, 1051:] == 0).all()


@pytest.mark.usefixtures("passes")
def test_rows_of_another_type_are_converted_and_of_another_shape_refused():
    place = torch.zeros(2, 3)
    compiled.copy_rows(place, torch.ones(2, 3, dtype=torch.bfloat16))
    assert (place == 1).all()
    compiled.copy_rows(place.T, torch.arange(6.0).view(3, 2))
    assert place.tolist() == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(RuntimeError, match="size"):
        compiled.copy_rows(place, torch.ones(3, 4))
