"""Loading eyas.toml: what is refused, and how it is explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.base.errors import ConfigError, FormatTooNew, NoProject, TargetError
from eyas.config.load import load_config
from eyas.config.resolve import resolve
from eyas.config.target_facts import read_target_facts

GOOD = """
format = 1
[target]
model = "model"
[[data.sources]]
path = "chat.jsonl"
"""


def project(tmp_path: Path, text: str = GOOD) -> Path:
    (tmp_path / "eyas.toml").write_text(text)
    return tmp_path


def target(tmp_path: Path, **fields: Any) -> Path:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 30,
        "vocab_size": 1000,
        "num_attention_heads": 4,
        "eos_token_id": [2, 7],
        **fields,
    }
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_defaults_and_overrides(tmp_path: Path) -> None:
    config = load_config(
        project(tmp_path), ["train.lr=1e-4", "target.device=cpu", "extract.aux_layers=[1,2]"]
    )
    assert config.train.lr == 1e-4
    assert config.target.device == "cpu"
    assert config.extract.aux_layers == (1, 2)
    assert config.regenerate.enabled


@pytest.mark.parametrize(
    ("addition", "what", "hint"),
    [
        ("[train]\nlearning_rate = 1", "unknown key train.learning_rate", "known here"),
        ("[train]\nepoch = 1", "unknown key train.epoch", "did you mean train.epochs?"),
        ("[trian]\nlr = 1", "unknown key trian", "did you mean train?"),
        ('[[data.sources]]\npath = "x"\nlimt = 3', "unknown key data.sources.1.limt", "data.sources.1.limit"),
        ("[train]\nlr = -1", "train.lr cannot be -1", "config show"),
        ('[train]\nloss = "mse"', "train.loss cannot be 'mse'", "config show"),
    ],
)
def test_a_wrong_key_is_named_with_a_hint(tmp_path: Path, addition: str, what: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(project(tmp_path, GOOD + addition))
    assert caught.value.what == what
    assert hint in str(caught.value.hint)
    assert caught.value.exit_code == 2


def test_values_that_do_not_fit_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not fit|does not fit") as caught:
        load_config(project(tmp_path), ["regenerate.max_new_tokens=9000"])
    assert "leaves no room" in str(caught.value.why)


def test_missing_newer_and_torn(tmp_path: Path) -> None:
    with pytest.raises(NoProject) as none:
        load_config(tmp_path)
    assert none.value.exit_code == 10
    with pytest.raises(FormatTooNew):
        load_config(project(tmp_path, GOOD.replace("format = 1", "format = 99")))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(project(tmp_path, "[target\n"))
    with pytest.raises(ConfigError, match=r"target is missing"):
        load_config(project(tmp_path, "[[data.sources]]\npath = 'x'"))
    with pytest.raises(ConfigError, match="has no value"):
        load_config(project(tmp_path), ["train.lr"])


def test_the_target_is_read_from_the_top_or_from_text_config(tmp_path: Path) -> None:
    flat = read_target_facts(target(tmp_path))
    assert (flat.hidden_size, flat.num_layers, flat.head_dim, flat.end_tokens) == (64, 30, 16, (2, 7))
    assert flat.default_aux_layers() == (2, 15, 27)
    inner = {"hidden_size": 64, "num_hidden_layers": 61, "vocab_size": 9, "num_attention_heads": 8}
    outer = target(
        tmp_path, text_config=inner, hidden_size=None, num_hidden_layers=None, vocab_size=None,
        num_attention_heads=None,
    )  # fmt: skip
    nested = read_target_facts(outer)
    assert (nested.num_layers, nested.vocab_size, nested.head_dim) == (61, 9, 8)
    assert nested.default_aux_layers() == (2, 30, 58)
    with pytest.raises(TargetError, match="hidden_size"):
        read_target_facts(target(tmp_path, hidden_size=None))
    with pytest.raises(TargetError, match=r"no config\.json"):
        read_target_facts(tmp_path / "nowhere")


def test_sizes_under_the_names_of_gpt2(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "gpt2",
        "n_embd": 48,
        "n_layer": 7,
        "n_head": 3,
        "vocab_size": 99,
        "n_positions": 512,
    }
    (folder / "config.json").write_text(json.dumps(config))
    facts = read_target_facts(folder)
    assert (facts.hidden_size, facts.num_layers, facts.head_dim, facts.max_position_embeddings) == (
        48,
        7,
        16,
        512,
    )


def test_rope_scaling_in_both_spellings(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    old = read_target_facts(target(tmp_path, rope_theta=50000.0, rope_scaling=yarn))
    new = read_target_facts(target(tmp_path, rope_parameters={**yarn, "rope_theta": 50000.0}))
    assert old.rope_theta == new.rope_theta == 50000.0
    assert old.rope_scaling == yarn
    assert new.rope_scaling is not None
    assert new.rope_scaling["factor"] == 64.0
    plain = read_target_facts(target(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e5}))
    assert plain.rope_scaling is None
    assert plain.rope_theta == 1e5


@pytest.mark.parametrize("layers", [[2, 31], [27, 2], [2, 2]])
def test_layers_that_do_not_fit_are_refused(tmp_path: Path, layers: list[int]) -> None:
    target(tmp_path)
    config = load_config(project(tmp_path), [f"extract.aux_layers={layers}"])
    with pytest.raises((TargetError, ConfigError), match="aux_layers"):
        resolve(config, tmp_path)


def test_bytes_per_token_of_the_founding_run(tmp_path: Path) -> None:
    target(tmp_path, hidden_size=7168, num_hidden_layers=61, num_attention_heads=64)
    assert resolve(load_config(project(tmp_path)), tmp_path).bytes_per_token_full == 57_344
