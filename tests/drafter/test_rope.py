from __future__ import annotations

import pytest
import torch

from eyas.base.errors import ConfigError
from eyas.drafter.rope import RotaryPositions, inverse_frequencies, rotate
from tests.drafter.naive import turn

SCALINGS = [
    None,
    {"rope_type": "default"},
    {"type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
    {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "truncate": False,
     "original_max_position_embeddings": 2048},
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_equal_those_of_transformers(scaling):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    config_class = pytest.importorskip("transformers").LlamaConfig
    given = {"rope_type": "default", **(scaling or {})}
    given["rope_type"] = given.pop("type", given["rope_type"])
    config = config_class(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=65536,
        rope_parameters={"rope_theta": 50000.0, **given},
    )
    theirs = modeling.LlamaRotaryEmbedding(config)
    ours, factor = inverse_frequencies(64, 50000.0, scaling, 65536)
    torch.testing.assert_close(ours.float(), theirs.inv_freq, rtol=1e-5, atol=1e-9)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_turning_equals_complex_multiplication():
    x = torch.randn(5, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 2, 700, 100_003])
    rope = RotaryPositions(6, 100.0, None, 10)
    turned = rotate(x, *rope.angles(positions, torch.float64))
    for row, position in enumerate(positions.tolist()):
        for head in range(2):
            torch.testing.assert_close(
                turned[row, head], turn(x[row, head], position, 100.0), atol=1e-9, rtol=0
            )


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("by_head", [False, True])
def test_keys_that_lie_beside_values_are_turned_and_so_is_their_gradient(dtype, step, by_head):
    """As complex numbers, whose gradient is the product with the conjugate factor."""
    generator = torch.Generator().manual_seed(5)
    both = torch.randn(*((4, 7) if by_head else (7, 4)), 6, generator=generator).to(dtype)
    both = (both.transpose(0, 1) if by_head else both).requires_grad_()
    gradient = torch.randn(7, 2, 6, generator=generator).to(dtype)
    cosine, sine = RotaryPositions(6, 100.0, None, 10).angles(torch.arange(3, 10), torch.float32)
    found = rotate(both.chunk(2, dim=-2)[0], cosine, sine)
    found.backward(gradient)
    factor = torch.complex(cosine.double(), sine.double()).unsqueeze(1)

    def times(x, factor):
        product = torch.complex(x[..., :3].double(), x[..., 3:].double()) * factor
        return torch.cat([product.real, product.imag], -1)

    torch.testing.assert_close(found.double(), times(both.detach()[:, :2], factor), rtol=step, atol=4 * step)
    torch.testing.assert_close(
        both.grad[:, :2].double(), times(gradient, factor.conj()), rtol=step, atol=4 * step
    )
    assert (both.grad[:, 2:] == 0).all()


def test_far_positions_are_exact_in_float32():
    rope = RotaryPositions(64, 10000.0, None, 10)
    cosine, _ = rope.angles(torch.tensor([1_000_003]), torch.float32)
    exact, _ = rope.angles(torch.tensor([1_000_003]), torch.float64)
    assert (cosine.double() - exact).abs().max() < 1e-7


@pytest.mark.parametrize(
    ("scaling", "message"),
    [({"rope_type": "longrope"}, "none of"), ({"rope_type": "llama3", "factor": 8.0}, "does not say")],
)
def test_unknown_scalings_are_refused(scaling, message):
    with pytest.raises(ConfigError, match=message):
        inverse_frequencies(8, 10000.0, scaling, 100)
