"""What a folder is, and what is wrong with it: exports of any origin, and eyas's own checkpoints.

Importing this needs no torch; inspecting weights does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.base.errors import DataError
from eyas.base.files import read_json
from eyas.base.seal import is_sealed, read_seal, seal_faults
from eyas.base.units import format_bytes, format_count
from eyas.config.target_facts import TargetFacts
from eyas.export.findings import Finding, Inspection, some

if TYPE_CHECKING:
    import torch

    from eyas.export.layout import Eagle3Checkpoint

_STATE_NAME = "state.json"
_STATE_TABLES = ("shape", "best", "validation")
_ORDER = {"fault": 0, "warning": 1, "note": 2}


def inspect_folder(
    folder: Path,
    target: TargetFacts | None = None,
    *,
    embedding: torch.Tensor | None = None,
    head: torch.Tensor | None = None,
    special_tokens: Sequence[int] = (),
) -> Inspection:
    """Say what a folder holds and what is wrong with it; nothing is changed, nothing is unpickled.

    Args:
        folder: an EAGLE-3 export (ours or downloaded) or a checkpoint of eyas.
        target: the target's sizes, when it is at hand; more can be checked then.
        embedding, head: the target's tensors [V, H].
        special_tokens: ids that ought to be in the draft vocabulary.

    Returns:
        Faults first. A folder that is neither comes back as ``unknown``, with a finding.
    """
    if (folder / _STATE_NAME).is_file():
        return _checkpoint(folder)
    if not (folder / "config.json").is_file():
        what = (
            "there is no such folder"
            if not folder.is_dir()
            else "neither config.json nor state.json is there"
        )
        return Inspection("unknown", [("folder", str(folder))], [Finding("not-a-drafter", "fault", what)])
    return _export(folder, target, embedding, head, special_tokens)


def _export(
    folder: Path,
    target: TargetFacts | None,
    embedding: torch.Tensor | None,
    head: torch.Tensor | None,
    special_tokens: Sequence[int],
) -> Inspection:
    from eyas.export.check_config import check_config
    from eyas.export.check_mapping import check_mapping
    from eyas.export.check_weights import check_against_target, check_tensors
    from eyas.export.dimensions import read_dimensions
    from eyas.export.layout import read_config, read_eagle3
    from eyas.export.layouts import engines_of

    findings, facts = _seal(folder)
    try:
        config, is_foreign = read_config(folder)
        dims = read_dimensions(config)
    except DataError as error:
        findings.append(Finding("config-unreadable", "fault", "config.json cannot be used", _reason(error)))
        return Inspection("eagle3 export", facts, findings)
    try:
        checkpoint = read_eagle3(folder)
    except DataError as error:
        engines = engines_of("speculators" if is_foreign else "both")
        findings += check_config(config, dims, (), None, target, engines)
        findings = [f for f in findings if f.code != "norm-flag-contradicted"]  # no tensors to ask
        findings.append(Finding("weights-unreadable", "fault", error.what, f"{error.where}: {error.why}"))
        return Inspection("eagle3 export", facts, _sorted(findings))
    names = {*checkpoint.weights, *checkpoint.unknown}
    # Tensors of a norm that the configuration switched off are told as that contradiction, once.
    stray = [n for n in checkpoint.unknown if n.startswith("fc_norm.") or n == "input_norm.weight"]
    checkpoint.unknown[:] = [n for n in checkpoint.unknown if n not in stray]
    ends = target.end_tokens if target is not None else _end_tokens(config)
    engines = engines_of(checkpoint.layout)
    findings += check_config(config, dims, names, checkpoint.trained_layers, target, engines)
    findings += check_mapping(checkpoint.d2t, checkpoint.t2d, dims, ends, special_tokens)
    findings += check_tensors(checkpoint)
    findings += check_against_target(checkpoint, embedding, head)
    return Inspection("eagle3 export", _export_facts(checkpoint, target) + facts, _sorted(findings))


def _export_facts(checkpoint: Eagle3Checkpoint, target: TargetFacts | None) -> list[tuple[str, str]]:
    from eyas.config.engine_layers import layers_in_sglang, layers_in_vllm
    from eyas.export.layouts import engines_of

    dims, config = checkpoint.dimensions, checkpoint.config
    tensors = [*checkpoint.weights.values()]
    num_parameters = sum(t.numel() for t in tensors)
    types = sorted({str(t.dtype).removeprefix("torch.") for t in tensors})
    rope = f"base {dims.rope_theta:g}"
    if dims.rope_scaling:
        rope += f", {dims.rope_scaling['rope_type']} x {dims.rope_scaling.get('factor', '?')}"
    facts = [
        ("architecture", str((config.get("architectures") or ["not said"])[0])),
        ("layout", f"{checkpoint.layout}, for {' and '.join(engines_of(checkpoint.layout))}"),
        ("parameters", f"{format_count(num_parameters)}, {', '.join(types) or 'none'}"),
        ("size on disk", format_bytes(sum(t.numel() * t.element_size() for t in tensors))),
        ("hidden size", f"{dims.hidden_size:,} on {dims.num_aux} aux states of {dims.target_hidden_size:,}"),
        ("attention", f"{dims.num_heads} heads, {dims.num_kv_heads} key-value heads, {dims.head_dim} wide"),
        ("MLP", f"{dims.intermediate_size:,}"),
        ("draft vocabulary", f"{dims.draft_vocab_size:,} of {dims.target_vocab_size:,}"),
        ("rope", rope),
        ("positions", f"{dims.max_position_embeddings:,}"),
        ("norm_before_residual", _said(config, "norm_before_residual")),
        ("norm_output", _said(config, "norm_output")),
        ("fc_norm", _said(config, "fc_norm")),
        ("embedding", "its own" if checkpoint.embedding is not None else "the target's"),
    ]
    if checkpoint.trained_layers is not None:
        facts.append(("trained on layers", f"{list(checkpoint.trained_layers)} (after k layers)"))
    if target is not None:
        n = target.num_layers
        captured = {
            "vLLM": layers_in_vllm(config, n),
            "SGLang": layers_in_sglang(config, n, target.model_type),
        }
        for engine in engines_of(checkpoint.layout):
            facts.append((f"layers in {engine}", f"{list(captured[engine])} (after k layers)"))
    return facts


def _checkpoint(folder: Path) -> Inspection:
    findings, facts = _seal(folder)
    if not is_sealed(folder):
        findings.append(
            Finding("seal-broken", "fault", "a checkpoint without its seal does not count", hint="eyas run")
        )
    try:
        state = read_json(folder / _STATE_NAME)
        if not isinstance(state, dict):
            raise ValueError("no JSON object")
        facts = [*_state_facts(state), *facts]
    except (OSError, ValueError) as error:
        findings.append(Finding("state-unreadable", "fault", "state.json cannot be read", str(error)))
    findings += _checkpoint_tensors(folder)
    return Inspection("eyas checkpoint", facts, _sorted(findings))


def _state_facts(state: dict[str, Any]) -> list[tuple[str, str]]:
    """The plain values of a state, and those of the tables worth reading as ``shape.hidden_size``."""
    values = {k: v for k, v in state.items() if not isinstance(v, dict)}
    for table in _STATE_TABLES:
        inner = state.get(table)
        values |= {f"{table}.{k}": v for k, v in inner.items()} if isinstance(inner, dict) else {}
    return [(k, str(v)) for k, v in values.items() if isinstance(v, str | int | float)]


def _checkpoint_tensors(folder: Path) -> list[Finding]:
    from safetensors import SafetensorError, safe_open

    path, findings = folder / "model.safetensors", []
    try:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    findings.append(Finding("not-finite", "fault", f"{name} holds NaN or infinity"))
    except (OSError, SafetensorError) as error:
        findings.append(Finding("weights-unreadable", "fault", f"{path.name} cannot be read", str(error)))
    return findings


def _seal(folder: Path) -> tuple[list[Finding], list[tuple[str, str]]]:
    if not is_sealed(folder):
        return [], [("seal", "none")]
    faults = seal_faults(folder)
    if faults:
        return [Finding("seal-broken", "fault", "the folder is not as it was sealed", some(faults))], [
            ("seal", "broken")
        ]
    return [], [("seal", f"whole, of {read_seal(folder).get('sealed_at', 'unknown date')}")]


def _end_tokens(config: dict[str, Any]) -> tuple[int, ...]:
    ends = config.get("eos_token_id")
    return tuple(int(t) for t in (ends if isinstance(ends, list) else [ends]) if t is not None)


def _said(config: dict[str, Any], key: str) -> str:
    return "not said" if config.get(key) is None else str(config[key]).lower()


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())


def _sorted(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda f: _ORDER[f.severity])
