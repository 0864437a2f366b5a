"""The folder that engines load: every field, every tensor, and the way back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eyas.base.errors import ConfigError, DataError, ExportMismatch
from eyas.export.layout import eagle3_config, read_eagle3, write_eagle3
from tests.export import make

YARN = {
    "rope_type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def test_every_field_of_the_configuration() -> None:
    config = eagle3_config(make.shape(), (2, 6, 9), make.facts(end_tokens=(2, 7)), "bfloat16")
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 32,
        "target_hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "vocab_size": 96,
        "draft_vocab_size": 40,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "bos_token_id": None,
        "eos_token_id": [2, 7],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "norm_output": False,
        "fc_norm": False,
        "eagle_config": {"use_aux_hidden_state": True},
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def test_positions_come_from_the_target_not_from_an_example() -> None:
    config = eagle3_config(make.shape(max_position_embeddings=2048), (2, 6, 9), make.facts(), "float32")
    assert config["max_position_embeddings"] == 8192


def test_rope_scaling_is_carried_in_both_spellings() -> None:
    config = eagle3_config(make.shape(rope_scaling=YARN), (2, 6, 9), make.facts(rope_scaling=YARN), "float32")
    assert config["rope_scaling"] == {**YARN, "type": "yarn"}
    assert config["rope_parameters"] == {**YARN, "rope_theta": 100000.0}


def test_rope_reads_the_same_through_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    make.write(tmp_path, rope_scaling=YARN)
    loaded = transformers.AutoConfig.from_pretrained(tmp_path)
    assert {k: loaded.rope_parameters[k] for k in YARN} == YARN
    assert loaded.rope_parameters["rope_theta"] == 100000.0
    assert loaded.draft_vocab_size == 40
    assert loaded.eagle_config == {"use_aux_hidden_state": True}


def test_eagle31_norms_are_said() -> None:
    config = eagle3_config(make.shape(norms="eagle3.1"), (2, 6, 9), make.facts(), "float32")
    assert config["fc_norm"] is True
    assert config["norm_output"] is True


def test_another_number_of_layers_is_said_to_both_engines() -> None:
    config = eagle3_config(make.shape(num_aux=4), (1, 4, 7, 9), make.facts(), "float32")
    assert config["num_aux_hidden_states"] == 4
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 7, 9]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 6, 8]


@pytest.mark.parametrize(("norms", "num_aux"), [("eagle3", 3), ("eagle3.1", 3), ("eagle3", 2)])
def test_round_trip(tmp_path: Path, norms: str, num_aux: int) -> None:
    layers = (2, 6, 9)[:num_aux]
    made = make.write(tmp_path, aux_layers=layers, norms=norms, num_aux=num_aux)
    read = read_eagle3(tmp_path)
    assert (read.missing, read.unknown, read.wrong_shapes) == ([], [], [])
    assert read.weights.keys() == made.keys()
    assert all(torch.equal(read.weights[n], made[n]) for n in made)
    d2t, t2d = make.mapping(make.shape())
    assert read.d2t is not None
    assert read.t2d is not None
    assert torch.equal(read.d2t, d2t)
    assert torch.equal(read.t2d, t2d)
    assert torch.equal(read.target_ids, t2d.nonzero().flatten())
    assert read.trained_layers == layers
    assert read.dimensions.as_shape() == make.shape(norms=norms, num_aux=num_aux)
    read.require_whole()


def test_names_and_types_in_the_file(tmp_path: Path) -> None:
    make.write(tmp_path, dtype=torch.bfloat16)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        types = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    assert types.pop("d2t") == "I64"
    assert types.pop("t2d") == "BOOL"
    assert set(types.values()) == {"BF16"}
    assert set(types) == {
        "fc.weight",
        "midlayer.input_layernorm.weight",
        "midlayer.hidden_norm.weight",
        "midlayer.post_attention_layernorm.weight",
        "midlayer.self_attn.q_proj.weight",
        "midlayer.self_attn.k_proj.weight",
        "midlayer.self_attn.v_proj.weight",
        "midlayer.self_attn.o_proj.weight",
        "midlayer.mlp.gate_proj.weight",
        "midlayer.mlp.up_proj.weight",
        "midlayer.mlp.down_proj.weight",
        "norm.weight",
        "lm_head.weight",
    }


def test_no_mapping_when_the_vocabularies_are_one(tmp_path: Path) -> None:
    sizes = make.shape(draft_vocab_size=96)
    made = make.weights(sizes, (2, 6, 9), make.facts())
    same, everything = torch.zeros(96, dtype=torch.int64), torch.ones(96, dtype=torch.bool)
    write_eagle3(tmp_path, made, sizes, same, everything, (2, 6, 9), make.facts(), torch.float32)
    read = read_eagle3(tmp_path)
    assert read.d2t is None
    assert read.target_ids.tolist() == list(range(96))


@pytest.mark.parametrize("layers", [(6, 2, 9), (2, 2, 9), (2, 6, 13), (-1, 2, 6)])
def test_layers_no_engine_can_hand_over_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="aux layers"):
        eagle3_config(make.shape(), layers, make.facts(), "float32")


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    sizes = make.shape()
    made = make.weights(sizes, (2, 6, 9), make.facts())
    d2t, t2d = make.mapping(sizes)

    def attempt(**changes: object) -> None:
        arguments = {
            "weights": made,
            "shape": sizes,
            "d2t": d2t,
            "t2d": t2d,
            "target": make.facts(),
            **changes,
        }
        write_eagle3(tmp_path, aux_layers=(2, 6, 9), dtype=torch.float32, **arguments)  # type: ignore[arg-type]

    with pytest.raises(ExportMismatch, match="vocabulary"):
        attempt(target=make.facts(vocab_size=97))
    with pytest.raises(ExportMismatch, match="hidden"):
        attempt(target=make.facts(hidden_size=64))
    with pytest.raises(ExportMismatch, match="aux layers"):
        attempt(shape=make.shape(num_aux=4))
    with pytest.raises(ExportMismatch, match="tensors"):
        attempt(weights={n: t for n, t in made.items() if n != "norm.weight"})
    with pytest.raises(ExportMismatch, match="tensors"):
        attempt(weights={**made, "extra.weight": torch.zeros(1)})
    with pytest.raises(ExportMismatch, match="tensors"):
        attempt(weights={**made, "fc.weight": made["fc.weight"].T})
    with pytest.raises(ExportMismatch, match="one mapping"):
        attempt(t2d=t2d.roll(1))
    with pytest.raises(ExportMismatch, match="size"):
        attempt(d2t=d2t[:-1])
    assert list(tmp_path.iterdir()) == []


def test_shards_and_names_of_other_tools(tmp_path: Path) -> None:
    made = make.write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    renamed = {n.replace("midlayer.", "model.layers.0."): t for n, t in tensors.items()}
    halves = [dict(list(renamed.items())[::2]), dict(list(renamed.items())[1::2])]
    weight_map = {}
    for number, half in enumerate(halves):
        save_file(half, tmp_path / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(half, f"part-{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read = read_eagle3(tmp_path)
    read.require_whole()
    assert all(torch.equal(read.weights[n], made[n]) for n in made)


def test_bin_files_are_read_without_running_code(tmp_path: Path) -> None:
    make.write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    read_eagle3(tmp_path).require_whole()

    ran = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (Path.touch, (ran,))

    torch.save({"fc.weight": Trap()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match="cannot be read") as caught:
        read_eagle3(tmp_path)
    assert not ran.exists()
    assert "GLOBAL getattr" in str(caught.value)
    assert not {"weights_only", "add_safe_globals"} & set(re.findall(r"\w+", str(caught.value)))


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    make.write(folder)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}})
    )
    with pytest.raises(DataError, match="not there"):
        read_eagle3(folder)


def test_missing_unknown_and_misshapen_tensors_are_listed(tmp_path: Path) -> None:
    make.write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["norm.weight"]
    tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(32)
    tensors["fc.weight"] = torch.zeros(32, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    read = read_eagle3(tmp_path)
    assert read.missing == ["norm.weight"]
    assert read.unknown == ["midlayer.self_attn.q_proj.bias"]
    assert read.wrong_shapes == [("fc.weight", (32, 64), (32, 96))]
    with pytest.raises(ExportMismatch, match=r"norm\.weight is missing"):
        read.require_whole()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no config.json"),
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
        ("{}", "does not say hidden_size"),
    ],
)
def test_a_folder_that_is_no_checkpoint(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read_eagle3(tmp_path)


def test_truncated_and_absent_weights(tmp_path: Path) -> None:
    make.write(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="cannot be read"):
        read_eagle3(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="no weights"):
        read_eagle3(tmp_path)
