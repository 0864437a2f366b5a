"""Products of few shapes: rows of zeros change no result, and new lengths bring few new shapes."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.drafter.batch import pack
from eyas.drafter.few_shapes import common_rows, filled, joined, linear
from eyas.drafter.passes import BatchPasses
from eyas.drafter.settings import TrainSettings
from eyas.drafter.teacher import Teacher
from tests.drafter.cases import MemorySource, make_drafter, make_head, make_sample, make_vocabulary

pytestmark = pytest.mark.usefixtures("passes")

CPU = torch.device("cpu")
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


def test_numbers_of_rows_that_come_again():
    assert [common_rows(n) for n in (1, 16, 17, 200, 256, 257, 512, 513, 4000)] == [
        16, 16, 32, 208, 256, 272, 512, 544, 4096
    ]  # fmt: skip
    for n in range(1, 5000):
        assert n <= common_rows(n) < n + max(16, n / 16 + 1)
    for power in range(8, 13):
        assert len({common_rows(n) for n in range(2**power + 1, 2 ** (power + 1) + 1)}) == 16


def test_rows_of_zeros_change_no_result():
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, 40, generator=generator).bfloat16() for n in (37, 24))
    assert filled(x).shape == (48, 40)
    assert torch.equal(filled(x)[:37], x)
    assert filled(x)[37:].count_nonzero() == 0
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(linear(x, weight).double(), exact, rtol=2**-7, atol=2**-7)
    both = joined([x, x[:5]])
    assert both.shape == (48, 40)
    assert torch.equal(both[:42], torch.cat([x, x[:5]]))
    assert both[42:].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_a_shape_costs_nothing_no_row_is_added(dtype):
    x = torch.ones(37, 40, dtype=dtype)
    assert filled(x) is x
    assert len(joined([x, x])) == 74


class Shapes(TorchDispatchMode):
    """Shapes that products were given in bfloat16."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function._schema.name.rstrip("_") in PRODUCTS and arguments[0].dtype == torch.bfloat16:
            shapes = tuple(tuple(x.shape) for x in arguments if isinstance(x, torch.Tensor))
            self.found.add((function._schema.name.rstrip("_"), shapes))
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
def test_lengths_that_never_came_before_bring_few_shapes(norms):
    rng = random.Random(5)
    lengths = rng.sample(range(130, 250), 80)
    samples = [make_sample(f"{n}", n, [(rng.randrange(2, 40), n)], n)[0] for n in lengths]
    settings = TrainSettings(steps=3, dtype="bfloat16")
    teacher = Teacher(make_head(), make_vocabulary(), device=CPU, dtype=torch.bfloat16)
    passes = BatchPasses(make_drafter(norms, torch.float32), teacher, settings)
    source = MemorySource(samples)

    def shapes(names):
        with Shapes() as seen:
            for name in names:
                batch = passes.prepare(source, [name])
                passes.train(batch, batch.num_supervised)
        return seen.found

    names = [sample.id for sample in samples]
    first, later = shapes(names[:60]), shapes(names[60:])
    assert {name for name, _ in first} >= {"aten::mm", "aten::bmm", "aten::baddbmm"}
    assert len(later) > 20
    assert len(later - first) <= len(later) / 20, sorted(later - first)


@pytest.mark.parametrize("flash", [True, False])
def test_a_batch_of_several_samples_has_the_gradients_of_each(flash, monkeypatch):
    """Filled up or not, in float64: the same attention with rows of zeros behind each sample."""
    monkeypatch.setattr("eyas.drafter.attention.USE_FLASH", {"forward": flash, "backward": flash})
    samples = [make_sample(f"s{i}", n, [(3, n)], i)[0] for i, n in enumerate((19, 33, 7))]
    batch = pack(samples, device=CPU, dtype=torch.float64, steps=3)

    def gradients():
        drafter = make_drafter("eagle3.1")
        weights = [torch.linspace(-1, 1, 12, dtype=torch.float64) * (step + 1) for step in range(3)]
        sum((s @ w).sin().sum() for s, w in zip(drafter.unroll(batch, 3), weights, strict=True)).backward()
        return [p.grad for p in drafter.parameters() if p.grad is not None]

    plain = gradients()
    seen = []

    def missing(x, rows):
        seen.append(common_rows(rows) - rows)
        return seen[-1]

    monkeypatch.setattr("eyas.drafter.few_shapes.missing", missing)
    monkeypatch.setattr("eyas.drafter.attention_flash.missing", missing)
    monkeypatch.setattr("eyas.drafter.attention_blocks.missing", missing)
    for found, expected in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    assert max(seen) > 0
