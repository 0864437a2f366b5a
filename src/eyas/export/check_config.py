"""Checks of an export's ``config.json``, alone and against its target; no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from eyas.config.engine_layers import (
    IDS_KEY,
    SGLANG_COUNTS_INPUTS,
    engine_default,
    layers_in_sglang,
    layers_in_vllm,
)
from eyas.config.target_facts import TargetFacts
from eyas.export.dimensions import ARCHITECTURE, Eagle3Dimensions, plain_scaling, read_rope
from eyas.export.findings import Finding

_VLLM_ONLY = ("Eagle3LlamaForCausalLM", "PeagleLlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM")
_NORM_FLAGS = ("norm_before_residual", "norm_output", "fc_norm")
_EXAMPLE_POSITIONS = 2048


def check_config(
    config: Mapping[str, Any],
    dims: Eagle3Dimensions,
    tensor_names: Collection[str],
    trained_layers: Sequence[int] | None,
    target: TargetFacts | None,
    engines: Collection[str] = ("vLLM", "SGLang"),
) -> Iterator[Finding]:
    """Findings on names, switches, rope, positions and layer ids.

    Args:
        tensor_names: all tensors of the folder, in eyas's names.
        trained_layers: layers the weight file says it was trained on, if it does.
        target: the model that will be served, when it is at hand.
        engines: those that the folder is for.
    """
    yield from _architecture(config)
    yield from _norm_flags(config, dims, tensor_names, engines)
    yield from _rope(config, dims, target)
    yield from _positions(dims, target)
    yield from _layers(config, dims, trained_layers, target, engines)
    if target is not None:
        yield from _belongs_to(config, dims, target)


def _architecture(config: Mapping[str, Any]) -> Iterator[Finding]:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name in _VLLM_ONLY:
        yield Finding(
            "architecture-one-engine",
            "warning",
            f"SGLang does not know {name}",
            hint=f'"architectures": ["{ARCHITECTURE}"] serves in both engines',
        )
    elif name != ARCHITECTURE:
        yield Finding(
            "architecture-unknown",
            "fault",
            f"no engine knows {name!r} as an EAGLE-3 drafter of this layout",
            hint=f'set "architectures": ["{ARCHITECTURE}"]',
        )
    if config.get("tie_word_embeddings"):
        yield Finding(
            "head-tied",
            "fault",
            "tie_word_embeddings is true: SGLang would use the embedding as the head",
            hint='set "tie_word_embeddings": false',
        )
    if config.get("draft_vocab_size") is None:
        yield Finding(
            "draft-vocab-unsaid",
            "warning",
            "draft_vocab_size is not said: engines take the whole vocabulary, SGLang the target's head too",
        )


def _norm_flags(
    config: Mapping[str, Any],
    dims: Eagle3Dimensions,
    tensor_names: Collection[str],
    engines: Collection[str],
) -> Iterator[Finding]:
    unsaid = [flag for flag in _NORM_FLAGS if config.get(flag) is None]
    has_fc_norm = any(n.startswith("fc_norm.") for n in tensor_names)
    if unsaid:
        # Most published EAGLE-3 drafters say none of them and mean the default; with the tensors of
        # EAGLE-3.1 beside it, the default is likely wrong.
        yield Finding(
            "norm-flag-unsaid",
            "warning" if has_fc_norm else "note",
            f"{', '.join(unsaid)} left to the engine's default (false)",
            evidence="the speculators layout takes a missing norm_before_residual as true",
            hint="say them in config.json",
        )
    present = {
        "fc_norm": has_fc_norm,
        "norm_before_fc": "input_norm.weight" in tensor_names,
    }
    for flag, said in (("fc_norm", dims.fc_norm), ("norm_before_fc", dims.norm_before_fc)):
        if said != present[flag]:
            yield Finding(
                "norm-flag-contradicted",
                "fault",
                f"{flag} is {str(said).lower()} but its tensors are "
                + ("there" if present[flag] else "missing"),
                evidence="SGLang skips tensors it does not expect in silence, vLLM raises",
            )
    if dims.norm_before_residual and "SGLang" in engines:
        yield Finding(
            "norm-before-residual",
            "warning",
            "norm_before_residual is true: vLLM follows it, SGLang ignores it",
        )
    if dims.fc_norm != dims.norm_output:
        yield Finding(
            "norms-mixed",
            "warning",
            "fc_norm and norm_output differ: EAGLE-3 has neither, EAGLE-3.1 both",
            evidence=f"fc_norm {dims.fc_norm}, norm_output {dims.norm_output}",
        )


def _rope(config: Mapping[str, Any], dims: Eagle3Dimensions, target: TargetFacts | None) -> Iterator[Finding]:
    if isinstance(config.get("rope_parameters"), Mapping):
        old = {k: v for k, v in config.items() if k != "rope_parameters"}
        old_theta, old_scaling = read_rope(old)
        new_theta, new_scaling = read_rope(config)
        told = ("rope_theta" in config, "rope_scaling" in config)
        if (told[0] and old_theta != new_theta) or (told[1] and not _same_scaling(old_scaling, new_scaling)):
            yield Finding(
                "rope-spellings-disagree",
                "fault",
                "rope_theta and rope_scaling say something else than rope_parameters",
                evidence=f"old {old_theta:g} {old_scaling}, new {new_theta:g} {new_scaling}",
            )
    if target is None:
        return
    if dims.rope_theta != target.rope_theta:
        yield Finding(
            "rope-theta-differs",
            "warning",
            f"rope base {dims.rope_theta:g}, the target's is {target.rope_theta:g}",
            hint="harmless only if it was trained so",
        )
    wanted = plain_scaling(target.rope_scaling)
    if wanted is not None and dims.rope_scaling is None:
        yield Finding(
            "rope-scaling-lost",
            "fault",
            f"the target scales its rope ({wanted['rope_type']}), the drafter does not",
            hint="carry rope_scaling over, in the old and the new spelling",
        )
    elif not _same_scaling(dims.rope_scaling, wanted):
        yield Finding(
            "rope-scaling-differs",
            "warning",
            "the rope scaling is not the target's",
            evidence=f"drafter {dims.rope_scaling}, target {wanted}",
        )


def _same_scaling(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    return (one or {}) == (other or {})


def _positions(dims: Eagle3Dimensions, target: TargetFacts | None) -> Iterator[Finding]:
    here = dims.max_position_embeddings
    if target is not None and here < target.max_position_embeddings:
        yield Finding(
            "positions-short",
            "fault",
            f"max_position_embeddings is {here:,}, the target takes {target.max_position_embeddings:,}",
            evidence="engines size the drafter's rope table from it: longer prompts are drafted wrongly",
            hint=f'set "max_position_embeddings": {target.max_position_embeddings}',
        )
    elif target is None and here == _EXAMPLE_POSITIONS:
        yield Finding(
            "positions-suspicious",
            "warning",
            f"max_position_embeddings is {here:,}, the number that examples carry",
            hint="give the target to compare with",
        )


def _layers(
    config: Mapping[str, Any],
    dims: Eagle3Dimensions,
    trained: Sequence[int] | None,
    target: TargetFacts | None,
    engines: Collection[str],
) -> Iterator[Finding]:
    nested = config.get("eagle_config")
    lists = {
        IDS_KEY: config.get(IDS_KEY),
        f"eagle_config.{IDS_KEY}": nested.get(IDS_KEY) if isinstance(nested, Mapping) else None,
    }
    said = {where: [int(i) for i in ids] for where, ids in lists.items() if ids}
    if not said and dims.num_aux != 3:
        yield Finding(
            "layers-unsaid",
            "fault",
            f"{dims.num_aux} aux states but no layer ids: engines capture three layers by default",
        )
    for where, ids in said.items():
        if len(ids) != dims.num_aux:
            yield Finding(
                "layers-count", "fault", f"{where} has {len(ids)} ids for {dims.num_aux} aux states"
            )
        elif sorted(set(ids)) != ids and not _is_reordered_for_sglang(where, ids, target):
            yield Finding(
                "layers-unsorted",
                "fault",
                f"{where} is {ids}: engines hand layers over in ascending order, each once",
            )
    if target is None:
        top = said.get(IDS_KEY)
        if "vLLM" in engines and trained is not None and top is not None and sorted(top) != list(trained):
            yield _not_as_trained("vLLM", top, trained)
        return
    yield from _captured(config, trained, target, said, engines)


def _captured(
    config: Mapping[str, Any],
    trained: Sequence[int] | None,
    target: TargetFacts,
    said: Mapping[str, list[int]],
    engines: Collection[str],
) -> Iterator[Finding]:
    n = target.num_layers
    every = {
        "vLLM": layers_in_vllm(config, n),
        "SGLang": layers_in_sglang(config, n, target.model_type),
    }
    captured = {engine: layers for engine, layers in every.items() if engine in engines}
    outside = [
        f"{engine} {list(ks)}" for engine, ks in captured.items() if ks and not 0 <= ks[0] <= ks[-1] <= n
    ]
    if outside:
        yield Finding(
            "layers-range",
            "fault",
            f"a layer lies outside the target's 0..{n}",
            evidence=", ".join(outside),
        )
    elif trained is not None:
        for engine, layers in captured.items():
            if layers != tuple(trained):
                yield _not_as_trained(engine, layers, trained)
    elif said and len(set(captured.values())) > 1:
        counts = "as given" if target.model_type in SGLANG_COUNTS_INPUTS else "plus one"
        yield Finding(
            "layers-engines-disagree",
            "warning",
            "vLLM and SGLang would capture different layers; at most one of them is the trained set",
            evidence=f"vLLM {list(captured['vLLM'])}, SGLang {list(captured['SGLang'])} (it takes ids "
            f"{counts} for {target.model_type}); the default is {list(engine_default(n))}",
            hint=f"say vLLM's ids at the top level and SGLang's within eagle_config, as {IDS_KEY}",
        )


def _is_reordered_for_sglang(where: str, ids: list[int], target: TargetFacts | None) -> bool:
    """Whether a 1 was moved to the end, which keeps SGLang from adding one to every id."""
    known = target is None or target.model_type in SGLANG_COUNTS_INPUTS
    return known and where.startswith("eagle_config") and ids[-1] == 1 and sorted(set(ids[:-1])) == ids[:-1]


def _not_as_trained(engine: str, captured: Sequence[int], trained: Sequence[int]) -> Finding:
    return Finding(
        "layers-not-as-trained",
        "fault",
        f"{engine} would capture the states after layers {list(captured)}, trained were {list(trained)}",
        hint="eyas export writes each engine's ids anew",
    )


def _belongs_to(config: Mapping[str, Any], dims: Eagle3Dimensions, target: TargetFacts) -> Iterator[Finding]:
    if target.hidden_size not in (dims.target_hidden_size,) or dims.hidden_size != target.hidden_size:
        yield Finding(
            "target-hidden-differs",
            "fault",
            f"hidden size {dims.hidden_size:,} on states of {dims.target_hidden_size:,}, "
            f"the target has {target.hidden_size:,}",
            evidence="engines share the target's embedding with the drafter",
        )
    if dims.target_vocab_size != target.vocab_size:
        yield Finding(
            "target-vocab-differs",
            "fault",
            f"vocab_size is {dims.target_vocab_size:,}, the target's {target.vocab_size:,}",
        )
    ends = config.get("eos_token_id")
    listed = set(ends if isinstance(ends, list) else [ends]) - {None}
    if listed and target.end_tokens and not listed & set(target.end_tokens):
        yield Finding(
            "end-tokens-differ",
            "note",
            f"eos_token_id is {ends}, the target ends at {list(target.end_tokens)}",
        )
