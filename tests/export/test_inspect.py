"""Planted faults, each named by its code, and silence on good folders."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eyas.base.seal import sealed_folder
from eyas.export.findings import FINDING_CODES, Finding
from eyas.export.inspect import inspect_folder
from tests.export import make

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
IDS = "eagle_aux_hidden_state_layer_ids"
Plant = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def look(folder: Path, **options: Any) -> Any:
    options.setdefault("target", make.facts())
    options.setdefault("embedding", make.embedding())
    options.setdefault("head", make.target_head())
    return inspect_folder(folder, options.pop("target"), **options)


def spoil(folder: Path, plant: Plant, *, foreign: bool = False) -> None:
    """Change configuration and tensors of an export by hand; a foreign one has no metadata of eyas."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        metadata = None if foreign else opened.metadata()
    plant(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata)


GOOD: dict[str, dict[str, Any]] = {
    "defaults": {},
    "eagle3.1": {"norms": "eagle3.1"},
    "bfloat16": {"dtype": torch.bfloat16},
    "other layers": {"aux_layers": (1, 5, 10)},
    "four layers": {"aux_layers": (1, 4, 7, 10), "num_aux": 4},
    "deepseek": {"aux_layers": (1, 5, 10), "target": make.facts(model_type="deepseek_v3")},
    "deepseek defaults": {"target": make.facts(model_type="kimi_k25")},
    "yarn": {"rope_scaling": YARN, "target": make.facts(rope_scaling=YARN)},
    "several ends": {"target": make.facts(end_tokens=(1, 2))},
}


@pytest.mark.parametrize("name", GOOD)
def test_no_alarm_on_a_good_export(tmp_path: Path, name: str) -> None:
    make.write(tmp_path, **GOOD[name])
    target = GOOD[name].get("target", make.facts())
    full = look(tmp_path, target=target, special_tokens=[0, 1, 3])
    assert full.kind == "eagle3 export"
    assert full.findings == []
    assert inspect_folder(tmp_path).findings == []


def test_no_alarm_on_a_good_sealed_export(tmp_path: Path) -> None:
    with sealed_folder(tmp_path / "export", {"kind": "export"}) as folder:
        make.write(folder)
        (folder / "README.md").write_text("a card\n")
    inspection = look(tmp_path / "export")
    assert inspection.findings == []
    assert dict(inspection.facts)["seal"].startswith("whole")


def test_a_published_drafter_that_says_little_gets_notes_only(tmp_path: Path) -> None:
    make.write(tmp_path)

    def plant(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for key in ("norm_before_residual", "norm_output", "fc_norm", "rope_parameters", "eagle_config"):
            del config[key]
        del tensors["t2d"]

    spoil(tmp_path, plant, foreign=True)
    inspection = look(tmp_path)
    assert inspection.alarms == []
    assert {f.code for f in inspection.findings} == {"norm-flag-unsaid", "mapping-t2d-missing"}


def set_config(**values: Any) -> Plant:
    return lambda config, tensors: config.update(values)


def drop_config(*keys: str) -> Plant:
    def plant(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for key in keys:
            del config[key]

    return plant


def nested_ids(ids: list[int], top: list[int] | None = None) -> Plant:
    def plant(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["eagle_config"][IDS] = ids
        if top is not None:
            config[IDS] = top

    return plant


def ids_and_count(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["eagle_config"][IDS] = [1, 5]
    config["num_aux_hidden_states"] = 3


def silent_override(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Trained on other layers than the default, of which the configuration says nothing."""
    config["eagle_config"].pop(IDS, None)
    config.pop(IDS, None)


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def plant(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = change(tensors[name])

    return plant


def new_tensor(name: str, value: torch.Tensor) -> Plant:
    return lambda config, tensors: tensors.update({name: value})


def drop_tensor(*names: str) -> Plant:
    def plant(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            del tensors[name]

    return plant


def with_value(index: Any, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(t: torch.Tensor) -> torch.Tensor:
        t = t.clone()
        t[index] = value
        return t

    return change


def remap(ids: Callable[[torch.Tensor], torch.Tensor], *, with_mask: bool = True) -> Plant:
    """Replace the mapping; the mask follows unless told otherwise."""

    def plant(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        old = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        new = ids(old.clone())
        tensors["d2t"] = new - torch.arange(len(new))
        if with_mask:
            mask = torch.zeros(make.VOCAB, dtype=torch.bool)
            mask[new.clamp(0, make.VOCAB - 1)] = True
            tensors["t2d"] = mask

    return plant


def shift_mask_and_mapping(ids: torch.Tensor) -> torch.Tensor:
    return (ids + 1).clamp(max=make.VOCAB - 1)


def another_corpus(ids: torch.Tensor) -> torch.Tensor:
    """The most frequent tokens of other data: the same special ids, other ones behind them."""
    order = torch.randperm(make.VOCAB - 4, generator=torch.Generator().manual_seed(77)) + 4
    return torch.cat([torch.arange(4), order[: len(ids) - 4]]).sort().values


def shuffled(t: torch.Tensor) -> torch.Tensor:
    return t[torch.randperm(len(t), generator=torch.Generator().manual_seed(5))]


def untrained(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, value in tensors.items():
        if value.is_floating_point() and name != "lm_head.weight":
            drawn = 0.02 * torch.randn(value.shape, generator=generator)
            tensors[name] = torch.ones(value.shape) if value.dim() == 1 else drawn


def norms_at_one(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        if value.dim() == 1 and value.is_floating_point():
            tensors[name] = torch.ones_like(value)


def random_like(t: torch.Tensor) -> torch.Tensor:
    return 0.02 * torch.randn(t.shape, generator=torch.Generator().manual_seed(4))


def heavy_tailed(t: torch.Tensor) -> torch.Tensor:
    return random_like(t) * torch.linspace(0.2, 3, len(t))[:, None]


FAULTS: dict[str, tuple[str, Plant]] = {
    "wrong architecture name": ("architecture-unknown", set_config(architectures=["LlamaForCausalLM"])),
    "no architecture": ("architecture-unknown", drop_config("architectures")),
    "a name only vLLM knows": (
        "architecture-one-engine",
        set_config(architectures=["Eagle3LlamaForCausalLM"]),
    ),
    "tied": ("head-tied", set_config(tie_word_embeddings=True)),
    "fc_norm said, tensors absent": ("norm-flag-contradicted", set_config(fc_norm=True, norm_output=True)),
    "fc_norm tensors, not said": (
        "norm-flag-contradicted",
        new_tensor("fc_norm.0.weight", torch.full((32,), 1.1)),
    ),
    "norm before residual": ("norm-before-residual", set_config(norm_before_residual=True)),
    "norm_output alone": ("norms-mixed", set_config(norm_output=True)),
    "positions of an example": ("positions-short", set_config(max_position_embeddings=2048)),
    "rope base lost": (
        "rope-theta-differs",
        set_config(rope_theta=10000.0, rope_parameters={"rope_theta": 10000.0}),
    ),
    "rope spelled twice": ("rope-spellings-disagree", set_config(rope_theta=10000.0)),
    "scaling in one spelling only": ("rope-spellings-disagree", set_config(rope_scaling=YARN)),
    "scaling the target lacks": (
        "rope-scaling-differs",
        set_config(rope_scaling=YARN, rope_parameters={**YARN, "rope_theta": 100000.0}),
    ),
    "more aux states, no ids": ("layers-unsaid", set_config(num_aux_hidden_states=4)),
    "fewer ids than states": ("layers-count", ids_and_count),
    "layers of the override not said": ("layers-not-as-trained", silent_override),
    "a layer past the end": ("layers-range", nested_ids([1, 5, 12])),
    "ids out of order": ("layers-unsorted", nested_ids([5, 1, 8], top=[6, 2, 9])),
    "ids one too low for vLLM": ("layers-not-as-trained", nested_ids([1, 5, 8])),
    "ids one too high for SGLang": ("layers-not-as-trained", nested_ids([2, 6, 9], top=[2, 6, 9])),
    "another vocabulary": ("target-vocab-differs", set_config(vocab_size=95)),
    "another hidden size": ("target-hidden-differs", set_config(hidden_size=64, target_hidden_size=64)),
    "a tensor missing": ("tensor-missing", drop_tensor("norm.weight")),
    "a tensor too many": ("tensor-unknown", new_tensor("midlayer.self_attn.q_norm.weight", torch.rand(8))),
    "a transposed tensor": ("tensor-shape", tensor("fc.weight", lambda t: t.T)),
    "a rounded tensor": ("tensor-dtype", tensor("fc.weight", lambda t: t.half())),
    "a quantised tensor": ("tensor-dtype", tensor("fc.weight", lambda t: (t * 100).to(torch.int8))),
    "another type than said": ("dtype-differs", set_config(dtype="bfloat16", torch_dtype="bfloat16")),
    "NaN": ("not-finite", tensor("midlayer.mlp.up_proj.weight", with_value((3, 4), float("nan")))),
    "infinity": ("not-finite", tensor("norm.weight", with_value(3, float("inf")))),
    "zeros": ("all-zero", tensor("midlayer.self_attn.o_proj.weight", torch.zeros_like)),
    "one row everywhere": ("tensor-constant", tensor("lm_head.weight", lambda t: t[:1].repeat(len(t), 1))),
    "a copy of another tensor": (
        "tensor-duplicate",
        lambda config, tensors: tensors.update(
            {"midlayer.self_attn.v_proj.weight": tensors["midlayer.self_attn.k_proj.weight"].clone()}
        ),
    ),
    "norms untouched": ("norms-untouched", norms_at_one),
    "never trained": ("weights-untrained", untrained),
    "one aux state ignored": (
        "aux-chunk-unused",
        tensor("fc.weight", with_value((slice(None), slice(0, 32)), 1e-9)),
    ),
    "random head": ("head-random", tensor("lm_head.weight", random_like)),
    "head of another model": ("head-unlike-target", tensor("lm_head.weight", heavy_tailed)),
    "head rows shifted": ("head-shifted", tensor("lm_head.weight", lambda t: t.roll(1, 0))),
    "head rows shifted back": ("head-shifted", tensor("lm_head.weight", lambda t: t.roll(-1, 0))),
    "a mapping made anew": ("head-misaligned", remap(another_corpus)),
    "head rows of another mapping": ("head-misaligned", tensor("lm_head.weight", shuffled)),
    "mapping shifted": ("head-shifted", remap(shift_mask_and_mapping)),
    "random embedding": ("embedding-foreign", new_tensor("embed_tokens.weight", torch.randn(96, 32))),
    "embedding copied": ("embedding-duplicate", new_tensor("embed_tokens.weight", make.embedding())),
    "no mapping": ("mapping-missing", drop_tensor("d2t", "t2d")),
    "mapping too short": ("mapping-length", tensor("d2t", lambda t: t[:-1])),
    "mask too short": ("mapping-length", tensor("t2d", lambda t: t[:-1])),
    "mapping of floats": ("mapping-dtype", tensor("d2t", lambda t: t.float())),
    "ids instead of offsets": ("mapping-absolute", tensor("d2t", lambda t: t + torch.arange(len(t)))),
    "outside the vocabulary": ("mapping-range", tensor("d2t", with_value(39, 60))),
    "negative ids": ("mapping-range", tensor("d2t", with_value(0, -1))),
    "one id twice": ("mapping-duplicate", remap(lambda ids: torch.cat([ids[:-1], ids[-2:-1]]))),
    "not ascending": ("mapping-unsorted", remap(lambda ids: torch.cat([ids[:-2], ids[-2:].flip(0)]))),
    "never filled": ("mapping-placeholder", remap(lambda ids: torch.arange(len(ids)))),
    "mask of another mapping": ("mapping-t2d-disagrees", tensor("t2d", lambda t: ~t)),
    "no end token": ("end-token-absent", remap(lambda ids: torch.where(ids == 2, torch.tensor(95), ids))),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(tmp_path: Path, name: str) -> None:
    code, plant = FAULTS[name]
    make.write(tmp_path, **({"aux_layers": (1, 5, 10)} if plant is silent_override else {}))
    spoil(tmp_path, plant)
    inspection = look(tmp_path)
    assert code in {f.code for f in inspection.findings}
    notes = {"embedding-duplicate", "mapping-unsorted", "head-unlike-target"}
    assert (code in {f.code for f in inspection.alarms}) == (code not in notes)


def test_faults_that_need_another_setting(tmp_path: Path) -> None:
    def codes(name: str, plant: Plant | None = None, **options: Any) -> set[str]:
        folder = tmp_path / name
        make.write(folder, **options.pop("written", {}))
        if plant is not None:
            spoil(folder, plant)
        return {f.code for f in look(folder, **options).findings}

    scaled = make.facts(rope_scaling=YARN)
    assert codes("scaling", target=scaled) == {"rope-scaling-lost"}
    assert codes("special", special_tokens=[0, 95, 94]) == {"special-token-absent"}
    assert codes("example", set_config(max_position_embeddings=2048), target=None) == {"positions-suspicious"}
    assert codes("unsaid", drop_config("draft_vocab_size")) >= {"draft-vocab-unsaid", "tensor-shape"}
    assert codes("ends", target=make.facts(end_tokens=(3,))) == {"end-tokens-differ"}
    new_norms = {"written": {"norms": "eagle3.1"}}
    assert codes("silent", drop_config("norm_output"), **new_norms) >= {"norm-flag-unsaid", "norms-mixed"}
    own = new_tensor("embed_tokens.weight", make.embedding())
    assert codes("own", own, embedding=None) == {"embedding-own"}


def test_a_mapping_of_one_vocabulary_is_superfluous(tmp_path: Path) -> None:
    make.write(tmp_path, draft_vocab_size=96)
    assert look(tmp_path).findings == []
    spoil(tmp_path, new_tensor("d2t", torch.zeros(96, dtype=torch.int64)))
    assert "mapping-superfluous" in {f.code for f in look(tmp_path).findings}


def test_foreign_ids_that_engines_read_differently(tmp_path: Path) -> None:
    """A drafter that does not say what it was trained on: ids in one place mean two things."""
    make.write(tmp_path)
    spoil(tmp_path, nested_ids([0, 4, 7]), foreign=True)
    for kind, disagree in (("llama", True), ("deepseek_v3", False)):
        found = {f.code for f in look(tmp_path, target=make.facts(model_type=kind)).findings}
        assert ("layers-engines-disagree" in found) == disagree


def test_unreadable_folders(tmp_path: Path) -> None:
    make.write(tmp_path / "torn")
    path = tmp_path / "torn" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert [f.code for f in look(tmp_path / "torn").findings] == ["weights-unreadable"]
    path.unlink()
    assert [f.code for f in look(tmp_path / "torn").findings] == ["weights-unreadable"]
    for text in ("{", "[]", '{"hidden_size": 4}', '{"hidden_size": "x"}', "\x00"):
        (tmp_path / "torn" / "config.json").write_text(text)
        assert [f.code for f in look(tmp_path / "torn").findings] == ["config-unreadable"]
    make.write(tmp_path / "ids")
    spoil(tmp_path / "ids", nested_ids(["a"]))  # type: ignore[list-item]
    assert [f.code for f in look(tmp_path / "ids").findings] == ["config-unreadable"]
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        inspection = inspect_folder(tmp_path / name)
        assert inspection.kind == "unknown"
        assert [f.code for f in inspection.faults] == ["not-a-drafter"]


def test_a_changed_file_breaks_the_seal(tmp_path: Path) -> None:
    with sealed_folder(tmp_path / "export", {}) as folder:
        make.write(folder)
    spoil(tmp_path / "export", set_config(extra=1))
    findings = look(tmp_path / "export").findings
    assert [f.code for f in findings] == ["seal-broken"]
    assert "config.json" in findings[0].evidence


def checkpoint(folder: Path, weights: dict[str, torch.Tensor] | None = None) -> Path:
    with sealed_folder(folder, {"kind": "checkpoint"}) as inside:
        sizes = make.shape()
        save_file(weights or make.weights(sizes, (2, 6, 9), make.facts()), inside / "model.safetensors")
        state = {"step": 120, "total_steps": 400, "shape": sizes, "recipe": {"lr": 1e-3}, "best": None}
        (inside / "state.json").write_text(json.dumps(state))
    return folder


def test_a_checkpoint_of_eyas(tmp_path: Path) -> None:
    inspection = inspect_folder(checkpoint(tmp_path / "step-00000120"))
    assert inspection.kind == "eyas checkpoint"
    assert inspection.findings == []
    facts = dict(inspection.facts)
    assert facts["step"] == "120"
    assert facts["shape.hidden_size"] == "32"
    assert facts["seal"].startswith("whole")


def test_damaged_checkpoints(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "step-1")
    (folder / "state.json").write_text("{")
    assert {f.code for f in inspect_folder(folder).findings} == {"seal-broken", "state-unreadable"}
    folder = checkpoint(tmp_path / "step-2")
    (folder / "seal.json").unlink()
    assert {f.code for f in inspect_folder(folder).findings} == {"seal-broken"}
    folder = checkpoint(tmp_path / "step-3", {"fc.weight": torch.full((2, 2), float("nan"))})
    assert {f.code for f in inspect_folder(folder).findings} == {"not-finite"}
    (folder / "model.safetensors").unlink()
    assert {f.code for f in inspect_folder(folder).findings} == {"seal-broken", "weights-unreadable"}


def test_every_code_is_planted_somewhere() -> None:
    # what needs prompts is planted where a target is at hand
    tests = (Path(__file__), Path(__file__).parents[1] / "cli" / "test_probe.py")
    text = "".join(path.read_text() for path in tests)
    assert [code for code in FINDING_CODES if f'"{code}"' not in text] == []


def test_a_code_nobody_explains_is_refused() -> None:
    with pytest.raises(ValueError, match="no such finding"):
        Finding("made-up", "note", "nothing")


def test_as_json_and_facts(tmp_path: Path) -> None:
    make.write(tmp_path, aux_layers=(1, 5, 10), dtype=torch.bfloat16)
    inspection = look(tmp_path)
    facts = dict(inspection.facts)
    assert facts["trained on layers"] == "[1, 5, 10] (after k layers)"
    assert facts["layers in SGLang"] == facts["layers in vLLM"] == "[1, 5, 10] (after k layers)"
    assert facts["draft vocabulary"] == "40 of 96"
    assert "bfloat16" in facts["parameters"]
    assert json.loads(json.dumps(inspection.as_dict()))["faults"] == 0


def test_importing_inspection_loads_no_torch() -> None:
    code = "import sys, eyas.export.inspect, eyas.export.check_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
