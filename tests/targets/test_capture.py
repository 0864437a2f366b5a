"""Captured states against transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.base.errors import TargetError
from eyas.config.target_facts import TargetFacts, read_target_facts
from eyas.targets.local.model import LocalTarget
from tests.tiny import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, save_tiny_target, tiny_model

KINDS = ("llama", "qwen3", "deepseek_v3", "nested", "sliding", "recurrent", "gpt2")
BATCH = [[(17 * i + 5 * n) % VOCAB_SIZE for i in range(n)] for n in (23, 9, 40, 1, 23)]
ALL_LAYERS = list(range(NUM_LAYERS + 1))


def gpt2_facts() -> TargetFacts:
    return TargetFacts(
        "gpt2", "GPT2LMHeadModel", HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, 4, 4, 16, 256, 1e-5, 512, 1e4, None,
        True, (2,), "float32",
    )  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalTarget:
    if request.param == "gpt2":
        return LocalTarget(tiny_model("gpt2"), gpt2_facts())
    return LocalTarget.load(save_tiny_target(tmp_path_factory.mktemp("model"), request.param))


def reference(
    target: LocalTarget, tokens: list[int]
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Residual streams 0..n-1, post-norm states and logits by transformers' own recording."""
    with torch.no_grad():
        out = target.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    assert len(out.hidden_states) == NUM_LAYERS + 1
    return [h[0] for h in out.hidden_states[:-1]], out.hidden_states[-1][0], out.logits[0]


def test_every_layer_equals_transformers(target: LocalTarget) -> None:
    for tokens in BATCH:
        streams, normed, logits = reference(target, tokens)
        (found,) = target.capture([tokens], ALL_LAYERS)
        assert found.aux.shape == (len(tokens), NUM_LAYERS + 1, HIDDEN_SIZE)
        for layer in range(NUM_LAYERS):
            torch.testing.assert_close(found.aux[:, layer], streams[layer], rtol=1e-5, atol=1e-5)
        # transformers' last entry is after the final norm
        torch.testing.assert_close(found.last, normed, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(target.logits(found.last), logits, rtol=1e-5, atol=1e-5)
        if len(tokens) > 1:  # what passes at its layer fails at a neighbour
            for layer in range(1, NUM_LAYERS):
                assert relative_error(found.aux[:, layer], streams[layer]) < 1e-5
                assert relative_error(found.aux[:, layer], streams[layer - 1]) > 1e-2


def test_the_deepest_layer_is_before_the_final_norm(target: LocalTarget) -> None:
    kept: list[torch.Tensor] = []
    layer = target.structure.layers[-1]
    handle = layer.register_forward_hook(lambda m, a, o: kept.append(o[0] if isinstance(o, tuple) else o))
    with torch.no_grad():
        target.model(torch.tensor([BATCH[0]]), use_cache=False)
    handle.remove()
    (found,) = target.capture([BATCH[0]], [NUM_LAYERS])
    torch.testing.assert_close(found.aux[:, 0], kept[0][0], rtol=1e-5, atol=1e-5)
    assert (found.aux[:, 0] - found.last).abs().max() > 0.1


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_batched_equals_single(target: LocalTarget) -> None:
    together = target.capture(BATCH, [0, 2, 5])
    for tokens, found in zip(BATCH, together, strict=True):
        (alone,) = target.capture([tokens], [0, 2, 5])
        for slot in range(3):
            assert relative_error(found.aux[:, slot], alone.aux[:, slot]) < 1e-5
        assert relative_error(found.last, alone.last) < 1e-5
        assert found.aux.is_contiguous()
        assert found.last.is_contiguous()


def test_the_same_batch_gives_the_same_bits(target: LocalTarget) -> None:
    for first, second in zip(target.capture(BATCH, [1, 3]), target.capture(BATCH, [1, 3]), strict=True):
        assert torch.equal(first.aux, second.aux)
        assert torch.equal(first.last, second.last)


def test_no_hook_stays_behind(target: LocalTarget) -> None:
    def hooks() -> list[int]:
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.structure.layers]

    before = hooks()
    target.capture(BATCH[:1], ALL_LAYERS)
    with pytest.raises(TargetError):
        target.capture(BATCH[:1], [2, 99])
    assert hooks() == before


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LocalTarget:
    return LocalTarget.load(save_tiny_target(tmp_path_factory.mktemp("model"), "llama"))


def test_layers_come_in_the_order_asked(llama: LocalTarget) -> None:
    (found,) = llama.capture([BATCH[0]], [4, 1])
    (ordered,) = llama.capture([BATCH[0]], [1, 4])
    assert torch.equal(found.aux, ordered.aux.flip(1))


def test_storage_dtype(llama: LocalTarget) -> None:
    (plain,) = llama.capture([BATCH[0]], [2])
    (stored,) = llama.capture([BATCH[0]], [2], store_dtype=torch.bfloat16)
    assert torch.equal(stored.aux, plain.aux.bfloat16())
    assert torch.equal(stored.last, plain.last.bfloat16())


def test_the_head_is_not_computed(llama: LocalTarget) -> None:
    handle = llama.structure.head.register_forward_hook(lambda *_: pytest.fail("the head ran"))
    llama.capture(BATCH, [2])
    handle.remove()


def test_what_is_refused(llama: LocalTarget, tmp_path: Path) -> None:
    for layer in (-1, NUM_LAYERS + 1):
        with pytest.raises(TargetError, match=f"no layer {layer}"):
            llama.capture([[1]], [layer])
    for tokens in ([VOCAB_SIZE], [-1, 4]):
        with pytest.raises(TargetError, match=f"token id {tokens[0]} "):
            llama.capture([[1], tokens], [1])
    with pytest.raises(TargetError, match="without tokens"):
        llama.capture([[1], []], [1])
    with pytest.raises(TargetError, match="no config"):
        LocalTarget.load(tmp_path)
    save_tiny_target(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(TargetError, match="transformers cannot load"):
        LocalTarget.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="no safetensors"):
        LocalTarget.load(tmp_path)


def test_facts_are_those_of_the_folder(tmp_path: Path) -> None:
    target = LocalTarget.load(save_tiny_target(tmp_path, "qwen3"), dtype="float64")
    assert target.facts == read_target_facts(tmp_path)
    assert target.dtype == torch.float64
    assert target.facts.end_tokens == (2, 0)
