"""One drafter in every layout: the same numbers after reading back, each engine's own conventions said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.base.errors import DataError
from eyas.export.inspect import inspect_folder
from eyas.export.layout import read_eagle3, write_eagle3
from eyas.export.layouts import FURTHER_LAYOUTS, Layout, engines_of
from eyas.export.reference import ReferenceDrafter
from tests.export import make
from tests.export.test_engines import captured_by_sglang

IDS = "eagle_aux_hidden_state_layer_ids"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "eagle3.1": {"norms": "eagle3.1"},
    "other layers": {"aux_layers": (1, 5, 10)},
    "four layers": {"aux_layers": (1, 4, 7, 10), "num_aux": 4},
    "deepseek": {"aux_layers": (1, 5, 10), "target": make.facts(model_type="deepseek_v3")},
    "yarn": {"rope_scaling": YARN, "target": make.facts(rope_scaling=YARN)},
    "one vocabulary": {"draft_vocab_size": 96},
}
TOKENS = [5, 17, 2, 40, 8, 9, 61, 3, 77, 30]


def write(folder: Path, layout: Layout, **changes: Any) -> dict[str, torch.Tensor]:
    aux_layers = changes.pop("aux_layers", (2, 6, 9))
    target = changes.pop("target", make.facts())
    sizes = make.shape(**changes)
    made = make.weights(sizes, aux_layers, target)
    folder.mkdir(parents=True, exist_ok=True)
    write_eagle3(
        folder, made, sizes, *make.mapping(sizes), aux_layers, target, torch.float32,
        layout=layout, target_path="/models/target", num_drafts=4,
    )  # fmt: skip
    return made


def logits(folder: Path, num_aux: int) -> list[torch.Tensor]:
    aux = torch.randn(len(TOKENS), num_aux, make.HIDDEN, generator=torch.Generator().manual_seed(8)) * 3
    drafter = ReferenceDrafter(read_eagle3(folder), make.embedding(), torch.float64)
    return drafter.unroll(TOKENS, aux, 3)


@pytest.mark.parametrize("layout", FURTHER_LAYOUTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_read_back_it_computes_the_same(tmp_path: Path, name: str, layout: Layout) -> None:
    settings = SETTINGS[name]
    write(tmp_path / "both", "both", **settings)
    made = write(tmp_path / layout, layout, **settings)
    read = read_eagle3(tmp_path / layout)
    read.require_whole()
    assert read.layout == layout
    assert read.trained_layers == settings.get("aux_layers", (2, 6, 9))
    assert all(torch.equal(read.weights[tensor], value) for tensor, value in made.items())
    num_aux = settings.get("num_aux", 3)
    for ours, theirs in zip(
        logits(tmp_path / "both", num_aux), logits(tmp_path / layout, num_aux), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("layout", FURTHER_LAYOUTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_no_alarm_on_a_good_one(tmp_path: Path, name: str, layout: Layout) -> None:
    settings = SETTINGS[name]
    write(tmp_path, layout, **settings)
    options = {"embedding": make.embedding(), "head": make.target_head()}
    target = settings.get("target", make.facts())
    assert inspect_folder(tmp_path, target, special_tokens=[0, 1, 3], **options).findings == []
    assert inspect_folder(tmp_path).findings == []


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("layers", [(2, 6, 9), (1, 5, 10)])
def test_conventions_are_written_in_words(tmp_path: Path, model_type: str, layers: tuple[int, ...]) -> None:
    """The default layers too, which the common folder leaves to the engines."""
    settings = {"aux_layers": layers, "target": make.facts(model_type=model_type)}
    for layout in FURTHER_LAYOUTS:
        write(tmp_path / layout, layout, **settings)
    configs = {name: json.loads((tmp_path / name / "config.json").read_text()) for name in FURTHER_LAYOUTS}
    sglang, vllm, speculators = configs["sglang"], configs["vllm"], configs["speculators"]
    ids = sglang["eagle_config"][IDS]
    assert IDS not in sglang
    assert captured_by_sglang(ids, make.LAYERS, model_type == "deepseek_v3") == list(layers)
    assert vllm[IDS] == vllm["eagle_config"][IDS] == speculators[IDS] == list(layers)
    for config in configs.values():
        assert (config["norm_before_residual"], config["norm_output"], config["fc_norm"]) == (False,) * 3
    verifier = speculators["speculators_config"]["verifier"]
    assert verifier == {"architectures": ["LlamaForCausalLM"], "name_or_path": "/models/target"}
    (greedy,) = speculators["speculators_config"]["proposal_methods"]
    assert (greedy["proposal_type"], greedy["speculative_tokens"]) == ("greedy", 4)
    names = set(load_file(tmp_path / "speculators" / "model.safetensors"))
    assert "layers.0.self_attn.q_proj.weight" in names
    assert not any(name.startswith("midlayer.") for name in names)


def test_engines() -> None:
    assert engines_of("both") == ("vLLM", "SGLang")
    assert engines_of("sglang") == ("SGLang",)
    assert engines_of("speculators") == ("vLLM",)
    assert engines_of("what another tool wrote") == ("vLLM", "SGLang")


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key, value in values.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def foreign(folder: Path) -> None:
    """As another tool writes it: no metadata of eyas."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_published_folder_that_leaves_out_what_its_library_assumes(tmp_path: Path) -> None:
    """Sizes that equal those of transformers' Llama are not written; norm_before_residual means true."""
    vocab, hidden = 32000, 4096
    write(tmp_path, "speculators")
    foreign(tmp_path)
    layer = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"):
        del layer[key]
    change(tmp_path, transformer_layer_config=layer, norm_before_residual=None)
    read = read_eagle3(tmp_path)
    dims = read.dimensions
    assert (dims.target_vocab_size, dims.hidden_size, dims.intermediate_size) == (vocab, hidden, 11008)
    assert dims.norm_before_residual
    assert read.trained_layers is None
    assert read.layout == "speculators"


@pytest.mark.parametrize(
    ("code", "values"),
    [
        ("config-unreadable", {"speculators_model_type": "dflash"}),
        ("config-unreadable", {"speculators_model_type": "eagle3", "transformer_layer_config": [1]}),
        ("config-unreadable", {"transformer_layer_config": {"model_type": "mamba"}}),
        ("architecture-unknown", {"architectures": ["MtpSpeculator"]}),
        ("layers-not-as-trained", {IDS: [1, 5, 8]}),
        ("layers-not-as-trained", {IDS: [3, 7, 10]}),
        ("tensor-shape", {IDS: [2, 6]}),
        ("norm-flag-contradicted", {"fc_norm": True, "norm_output": True}),
        ("norms-mixed", {"norm_output": True}),
        ("tensor-shape", {"draft_vocab_size": 41}),
    ],
)
def test_faults_in_speculators_layout_are_named(tmp_path: Path, code: str, values: dict[str, Any]) -> None:
    write(tmp_path, "speculators")
    change(tmp_path, **values)
    found = inspect_folder(tmp_path, make.facts(), embedding=make.embedding(), head=make.target_head())
    assert code in {finding.code for finding in found.alarms}


def test_kinds_that_are_not_known(tmp_path: Path) -> None:
    write(tmp_path, "speculators")
    change(tmp_path, speculators_model_type="peagle")
    with pytest.raises(DataError, match="peagle"):
        read_eagle3(tmp_path)


@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
def test_the_library_itself_computes_the_same(tmp_path: Path, norms: str) -> None:
    """speculators reads our folder and gives the logits of our reference, every row and draft step."""
    library = pytest.importorskip("speculators.models.eagle3", reason="speculators is not installed")
    import transformers

    write(tmp_path / "drafter", "speculators", norms=norms)
    verifier = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=make.VOCAB, hidden_size=make.HIDDEN, num_hidden_layers=make.LAYERS,
            intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        )
    )  # fmt: skip
    with torch.no_grad():
        verifier.model.embed_tokens.weight.copy_(make.embedding())
    verifier.save_pretrained(tmp_path / "target")
    change_verifier(tmp_path / "drafter", tmp_path / "target")
    config = library.Eagle3SpeculatorConfig.from_pretrained(tmp_path / "drafter")
    config.transformer_layer_config._attn_implementation = "eager"
    model = library.Eagle3DraftModel.from_pretrained(tmp_path / "drafter", config=config)
    model.embed_tokens.weight.data.copy_(make.embedding())
    model = model.float().eval()
    aux = torch.randn(len(TOKENS), 3, make.HIDDEN, generator=torch.Generator().manual_seed(8)) * 3
    expected = ReferenceDrafter(read_eagle3(tmp_path / "drafter"), make.embedding()).unroll(TOKENS, aux, 3)
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    with torch.no_grad():
        # its rows hold the state of a token beside the token behind it
        model(
            hidden_states=aux[:-1].flatten(1)[None],
            input_ids=torch.tensor([TOKENS[1:]]),
            document_ids=torch.zeros(1, len(TOKENS) - 1, dtype=torch.long),
            ttt_steps=3,
        )
    for step, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        torch.testing.assert_close(theirs[: len(ours)], ours, rtol=1e-4, atol=1e-4, msg=f"step {step}")


def change_verifier(drafter: Path, target: Path) -> None:
    config = json.loads((drafter / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    (drafter / "config.json").write_text(json.dumps(config))
