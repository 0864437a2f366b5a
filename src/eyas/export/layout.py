"""Checkpoint folders that engines load: writing one in any layout, and reading any of them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eyas.base.errors import DataError, ExportMismatch
from eyas.base.files import read_json, write_json
from eyas.base.pickled import why_unreadable
from eyas.config.engine_layers import IDS_KEY, engine_layer_ids, explicit_layer_ids
from eyas.config.target_facts import TargetFacts
from eyas.export.dimensions import ARCHITECTURE, Eagle3Dimensions, expected_shapes, read_dimensions
from eyas.export.layouts import (
    LAYOUT_METADATA,
    Layout,
    as_speculators,
    flattened,
    for_one_engine,
    is_speculators,
)

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
AUX_LAYERS_METADATA = "eyas.aux_layers"
"""Key in the weight file's metadata: the trained layers, "after k layers", whatever engines call them."""

_ALIASES = (
    ("model.", ""),
    ("layers.0.", "midlayer."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)
_SHARED = ("embed_tokens.weight", "d2t", "t2d")


@dataclass(frozen=True)
class Eagle3Checkpoint:
    """A drafter read from a folder, tensor names as eyas writes them.

    Attributes:
        weights: the trained tensors.
        d2t: offsets [Vd] int64 (target id = i + d2t[i]), or None: ids are the same.
        t2d: mask [V] bool, or None.
        embedding: [V, H] when the folder brings one along; engines share the target's otherwise.
        missing, unknown: tensor names that are absent, or mean nothing to this layout.
        wrong_shapes: name, shape found, shape expected.
        metadata: text fields of the weight file.
        layout: as the file names it, or as its configuration shows.
    """

    folder: Path
    config: dict[str, Any]
    dimensions: Eagle3Dimensions
    weights: dict[str, torch.Tensor]
    d2t: torch.Tensor | None
    t2d: torch.Tensor | None
    embedding: torch.Tensor | None
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    wrong_shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    layout: str = "both"

    @property
    def target_ids(self) -> torch.Tensor:
        """Target id of each draft id, [Vd] int64."""
        if self.d2t is None:
            return torch.arange(self.dimensions.draft_vocab_size)
        return torch.arange(len(self.d2t)) + self.d2t.to(torch.int64)

    @property
    def trained_layers(self) -> tuple[int, ...] | None:
        """The layers it was trained on, when eyas wrote the file; None otherwise."""
        text = self.metadata.get(AUX_LAYERS_METADATA)
        return None if text is None else tuple(int(k) for k in json.loads(text))

    def require_whole(self) -> None:
        """Raises ExportMismatch naming the first missing, unknown or misshapen tensor."""
        problems = [f"{name} is missing" for name in self.missing]
        problems += [f"{name} is unknown" for name in self.unknown]
        problems += [f"{n} is {list(g)}, not {list(e)}" for n, g, e in self.wrong_shapes]
        if problems:
            raise ExportMismatch(
                "the checkpoint's tensors do not fit its configuration",
                where=self.folder,
                why="; ".join(problems[:3]),
                hint=f"eyas inspect {self.folder}",
            )


def eagle3_config(
    shape: Mapping[str, Any], aux_layers: Sequence[int], target: TargetFacts, dtype: str
) -> dict[str, Any]:
    """``config.json`` of an export, everything said that an engine would otherwise assume.

    Args:
        shape: the fields of a ``DrafterShape``.
        aux_layers: trained layers, "after k layers".
        target: gives positions, end tokens and the kind of model.
        dtype: as config files name it, for example ``bfloat16``.

    Raises:
        ConfigError: the layers are such as no engine can hand over.
        ExportMismatch: drafter and target do not belong together.
    """
    _check_fits(shape, aux_layers, target)
    ids = engine_layer_ids(aux_layers, target)
    new_norms = shape["norms"] == "eagle3.1"
    scaling = dict(shape["rope_scaling"]) if shape["rope_scaling"] else None
    kind = scaling.get("rope_type", scaling.get("type")) if scaling else "default"
    if scaling is not None and kind == "yarn":
        # vLLM refuses YaRN without it, and each tool has a default of its own.
        scaling.setdefault("original_max_position_embeddings", int(shape["max_position_embeddings"]))
    eagle_config: dict[str, Any] = {"use_aux_hidden_state": True}
    if ids.sglang is not None:
        eagle_config[IDS_KEY] = list(ids.sglang)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": int(shape["hidden_size"]),
        "target_hidden_size": int(shape["target_hidden_size"]),
        "intermediate_size": int(shape["intermediate_size"]),
        "num_hidden_layers": 1,
        "num_attention_heads": int(shape["num_heads"]),
        "num_key_value_heads": int(shape["num_kv_heads"]),
        "head_dim": int(shape["head_dim"]),
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": float(shape["rms_norm_eps"]),
        "vocab_size": int(shape["target_vocab_size"]),
        "draft_vocab_size": int(shape["draft_vocab_size"]),
        "tie_word_embeddings": False,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_theta": float(shape["rope_theta"]),
        "rope_scaling": None if scaling is None else {**scaling, "type": kind, "rope_type": kind},
        "rope_parameters": {
            **{k: v for k, v in (scaling or {}).items() if k != "type"},
            "rope_type": kind,
            "rope_theta": float(shape["rope_theta"]),
        },
        "bos_token_id": None,
        "eos_token_id": _one_or_list(target.end_tokens),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "norm_output": new_norms,
        "fc_norm": new_norms,
        "eagle_config": eagle_config,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if ids.vllm is not None:
        config[IDS_KEY] = list(ids.vllm)
    if int(shape["num_aux"]) != 3:
        config["num_aux_hidden_states"] = int(shape["num_aux"])
    return config


def write_eagle3(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    shape: Mapping[str, Any],
    d2t: torch.Tensor | np.ndarray[Any, Any],
    t2d: torch.Tensor | np.ndarray[Any, Any],
    aux_layers: Sequence[int],
    target: TargetFacts,
    dtype: torch.dtype = torch.bfloat16,
    about: Mapping[str, str] | None = None,
    *,
    layout: Layout = "both",
    target_path: str = "",
    num_drafts: int = 3,
) -> None:
    """Write ``config.json`` and ``model.safetensors`` into ``folder``, which the caller seals.

    Args:
        weights: the drafter's state, names as in `expected_shapes`.
        shape: the fields of a ``DrafterShape``.
        d2t: offsets [Vd] int64. t2d: mask [V] bool. Neither is written when the two vocabularies
            are the same: vLLM refuses a mapping then.
        aux_layers: trained layers, "after k layers".
        about: more text fields for the weight file's metadata.
        layout: whose conventions are written.
        target_path, num_drafts: what speculators' layout says of the target and of proposals.

    Raises:
        ConfigError: the layers are such as no engine can hand over.
        ExportMismatch: tensors, shape, mapping and target do not fit together.
        OSError: writing failed.
    """
    config = eagle3_config(shape, aux_layers, target, str(dtype).removeprefix("torch."))
    dims = read_dimensions(config)
    shapes = expected_shapes(dims)
    wrong = sorted(shapes.keys() ^ weights.keys())
    wrong += [
        f"{n} {list(weights[n].shape)}" for n, s in shapes.items() if n in weights and weights[n].shape != s
    ]
    if wrong:
        raise ExportMismatch("the drafter's tensors are not those of its shape", why=", ".join(wrong[:4]))
    tensors = {n: weights[n].detach().to(device="cpu", dtype=dtype).contiguous() for n in shapes}
    same_vocabulary = dims.draft_vocab_size == dims.target_vocab_size
    d2t, t2d = torch.as_tensor(d2t).detach().cpu(), torch.as_tensor(t2d).detach().cpu()
    _check_mapping(d2t, t2d, dims, same_vocabulary)
    if not same_vocabulary:
        tensors["d2t"] = d2t.to(torch.int64).contiguous()
        tensors["t2d"] = t2d.to(torch.bool).contiguous()
    metadata = {
        "format": "pt",
        AUX_LAYERS_METADATA: json.dumps([int(k) for k in aux_layers]),
        LAYOUT_METADATA: layout,
        **(about or {}),
    }
    ids = explicit_layer_ids(aux_layers, target)
    if layout == "speculators":
        config = as_speculators(config, target, target_path, num_drafts, ids["vllm"])
        tensors = {_renamed(name, "midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    elif layout != "both":
        config = for_one_engine(config, layout, ids)
    write_json(folder / CONFIG_NAME, config)
    save_file(tensors, folder / WEIGHTS_NAME, metadata=metadata)


def read_eagle3(folder: Path) -> Eagle3Checkpoint:
    """Read an EAGLE-3 folder, ours or downloaded: one file or shards, safetensors or ``.bin``.

    Names of other tools (``layers.0.``, ``model.`` in front) are translated. ``.bin`` files are
    unpickled with weights only.

    Raises:
        DataError: configuration or weights are absent or cannot be read.
    """
    config, is_foreign = read_config(folder)
    dims = read_dimensions(config)
    tensors, metadata = _read_tensors(folder)
    shapes = expected_shapes(dims)
    named = {_canonical(name): tensor for name, tensor in tensors.items()}
    weights = {name: tensor for name, tensor in named.items() if name in shapes}
    return Eagle3Checkpoint(
        folder=folder,
        config=config,
        dimensions=dims,
        weights=weights,
        d2t=named.get("d2t"),
        t2d=named.get("t2d"),
        embedding=named.get("embed_tokens.weight"),
        missing=[name for name in shapes if name not in named],
        unknown=sorted(name for name in named if name not in shapes and name not in _SHARED),
        wrong_shapes=[
            (n, tuple(t.shape), shapes[n]) for n, t in weights.items() if tuple(t.shape) != shapes[n]
        ],
        metadata=metadata,
        layout="speculators" if is_foreign else metadata.get(LAYOUT_METADATA, "both"),
    )


def _renamed(name: str, old: str, new: str) -> str:
    return new + name[len(old) :] if name.startswith(old) else name


def _check_fits(shape: Mapping[str, Any], aux_layers: Sequence[int], target: TargetFacts) -> None:
    pairs = (
        ("aux layers", int(shape["num_aux"]), len(aux_layers)),
        ("target hidden size", int(shape["target_hidden_size"]), target.hidden_size),
        ("hidden size (the embedding is the target's)", int(shape["hidden_size"]), target.hidden_size),
        ("vocabulary", int(shape["target_vocab_size"]), target.vocab_size),
    )
    for what, drafter_has, target_has in pairs:
        if drafter_has != target_has:
            raise ExportMismatch(f"drafter and target differ in {what}: {drafter_has} and {target_has}")


def _check_mapping(d2t: torch.Tensor, t2d: torch.Tensor, dims: Eagle3Dimensions, same: bool) -> None:
    ids = torch.arange(dims.draft_vocab_size)
    if tuple(d2t.shape) != (dims.draft_vocab_size,) or tuple(t2d.shape) != (dims.target_vocab_size,):
        raise ExportMismatch(
            "the vocabulary mapping has another size than the drafter",
            why=f"d2t {list(d2t.shape)}, t2d {list(t2d.shape)}",
        )
    targets = ids + d2t
    mask = torch.zeros(dims.target_vocab_size, dtype=torch.bool)
    in_range = bool(((targets >= 0) & (targets < dims.target_vocab_size)).all())
    if in_range:
        mask[targets] = True
    if not in_range or int(mask.sum()) != dims.draft_vocab_size or not torch.equal(mask, t2d.bool()):
        raise ExportMismatch("d2t and t2d do not describe one mapping of draft ids to distinct target ids")
    if same and bool(d2t.any()):
        raise ExportMismatch("a draft vocabulary as large as the target's must keep the target's order")


def _one_or_list(tokens: Sequence[int]) -> int | list[int] | None:
    if not tokens:
        return None
    return int(tokens[0]) if len(tokens) == 1 else [int(t) for t in tokens]


def _canonical(name: str) -> str:
    for alias, ours in _ALIASES:
        if name.startswith(alias):
            name = ours + name[len(alias) :]
    return name


def read_config(folder: Path) -> tuple[dict[str, Any], bool]:
    """``config.json`` in the words of the common layout, and whether it came in speculators'.

    Raises:
        DataError: it is absent, cannot be read, or is of a kind that is not known here.
    """
    try:
        config = read_json(folder / CONFIG_NAME)
    except FileNotFoundError as error:
        raise DataError("there is no config.json", where=folder) from error
    except (OSError, ValueError) as error:
        raise DataError("config.json cannot be read", where=folder / CONFIG_NAME, why=str(error)) from error
    if not isinstance(config, dict):
        raise DataError("config.json is no JSON object", where=folder / CONFIG_NAME)
    return (flattened(config), True) if is_speculators(config) else (config, False)


def _read_tensors(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    files = _weight_files(folder)
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for path in files:
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as opened:
                    tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                    metadata |= opened.metadata() or {}
            else:
                tensors |= torch.load(path, map_location="cpu", weights_only=True)
        except (
            OSError,
            SafetensorError,
            RuntimeError,
            ValueError,
            EOFError,
            pickle.UnpicklingError,
        ) as error:
            raise DataError("a weight file cannot be read", where=path, why=why_unreadable(error)) from error
    return tensors, metadata


def _weight_files(folder: Path) -> list[Path]:
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = folder / f"{stem}.{suffix}.index.json"
        if index.is_file():
            try:
                names = sorted(set(read_json(index)["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise DataError("the index of the weight files cannot be read", where=index) from error
            paths = [folder / name for name in names]
            # An index is a stranger's text: it may name files of this folder only.
            absent = [p.name for p in paths if p.parent != folder or not p.is_file()]
            if absent:
                raise DataError(f"the index names {absent[0]}, which is not there", where=index)
            return paths
        if (folder / f"{stem}.{suffix}").is_file():
            return [folder / f"{stem}.{suffix}"]
    raise DataError(
        "there are no weights", where=folder, why="neither model.safetensors nor pytorch_model.bin"
    )
