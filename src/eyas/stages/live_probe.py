"""A drafter tried on a handful of prompts: what it would reach as served, and with its inputs shifted.

The target answers greedily; along its answers every draft of every row follows from captured states, so
the acceptance length of a chain is a walk and needs no drafting loop. The same walk with the layers below
and above, and with the mapping moved by one, says whether a shift would be better. If so, it is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eyas.base.errors import TargetError
from eyas.config.engine_layers import layers_in_sglang, layers_in_vllm
from eyas.config.target_facts import TargetFacts
from eyas.drafter.metrics import walk
from eyas.export.findings import Finding
from eyas.export.layout import Eagle3Checkpoint, read_eagle3
from eyas.export.layouts import engines_of
from eyas.export.reference import ReferenceDrafter
from eyas.targets.bench.prompts import BenchPrompt
from eyas.targets.dtype import resolve_device, resolve_dtype
from eyas.targets.local.generate import SamplingSettings, generate
from eyas.targets.local.model import LocalTarget
from eyas.targets.parts import load_parts

NUM_DRAFTS = 3
FEWEST_PROMPTS = 4
"""With fewer a difference cannot be told from chance."""
RESAMPLES = 4000
CERTAIN = 0.001
"""A shift is called better when at most this share of resampled prompts says otherwise."""
LIKELY = 0.05
"""And it is called a doubt up to this share: of a small target's layers, neighbours are nearly as good."""
LEAST_GAIN = 0.05
HARDLY_ANY = 1.1
_QUESTIONS = (
    "Name three rivers of Europe and the seas that they flow into.",
    "What is 17 times 24? Show how you get there.",
    "Write a Python function that returns the largest number of a list.",
    "Explain in two sentences why the sky is blue.",
    "Write a short letter that thanks a neighbour for their help.",
    "List the steps of making tea.",
    "Translate into French: The train leaves at seven in the morning.",
    "What is the difference between a lake and a sea?",
)


@dataclass(frozen=True)
class Tried:
    """One way of feeding the drafter.

    Attributes:
        name: what was done, for people.
        kind: ``served`` as engines would, ``layers`` or ``mapping`` moved.
        rounds, accepted: of each prompt.
    """

    name: str
    kind: str
    rounds: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.int64]

    @property
    def acceptance_length(self) -> float:
        return 1 + float(self.accepted.sum()) / max(1, int(self.rounds.sum()))

    def chance_against(self, other: Tried) -> float:
        """Share of resampled prompts (bootstrap) by which it is not better than another way.

        1 where its lead is too small to matter, or the prompts are too few to tell.
        """
        count = len(self.rounds)
        if count < FEWEST_PROMPTS or self.acceptance_length < other.acceptance_length + LEAST_GAIN:
            return 1.0
        drawn = np.random.default_rng(0).integers(0, count, size=(RESAMPLES, count))
        ours, theirs = (
            one.accepted[drawn].sum(axis=1) / np.maximum(1, one.rounds[drawn].sum(axis=1))
            for one in (self, other)
        )
        return float((ours <= theirs).mean())


@dataclass(frozen=True)
class LiveProbe:
    """What the tries showed; the first is as served."""

    tries: tuple[Tried, ...]
    num_prompts: int
    num_tokens: int

    @property
    def findings(self) -> list[Finding]:
        """A fault for each kind of shift that is better, a warning where it may be or nothing is accepted."""
        served = [one for one in self.tries if one.kind == "served"]
        found = []
        for one in served:
            for kind in ("layers", "mapping"):
                moved = [o for o in self.tries if o.kind == kind and o.name.startswith(one.name)]
                chances = {other.name: other.chance_against(one) for other in moved}
                best = min(moved, key=lambda other: chances[other.name], default=one)
                if chances.get(best.name, 1.0) <= LIKELY:
                    found.append(self._shifted(kind, one, best, chances[best.name]))
        best_served = max(one.acceptance_length for one in served)
        if not found and best_served < HARDLY_ANY:
            found.append(
                Finding(
                    "probe-accepts-nothing",
                    "warning",
                    f"hardly any draft would be accepted: {best_served:.2f} tokens per target forward",
                    evidence="no shift of layers or mapping by one explains it",
                )
            )
        return found

    def _shifted(self, kind: str, served: Tried, moved: Tried, chance: float) -> Finding:
        evidence = (
            f"acceptance length {served.acceptance_length:.2f} {served.name}, "
            f"{moved.acceptance_length:.2f} shifted, on {self.num_prompts} prompts"
        )
        if chance <= CERTAIN:
            what = f"{moved.name} it would accept more: its {kind} are wrong"
            return Finding(f"probe-{kind}-shifted", "fault", what, evidence=evidence)
        return Finding(
            "probe-shift-in-doubt",
            "warning",
            f"{moved.name} it may accept more: its {kind} may be wrong",
            evidence=f"{evidence}; in {100 * chance:.1f}% of resampled prompts it would not",
            hint="more prompts tell: --prompts FILE --limit 64",
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompts": self.num_prompts,
            "answer_tokens": self.num_tokens,
            "num_drafts": NUM_DRAFTS,
            "tries": [
                {"name": t.name, "kind": t.kind, "acceptance_length": t.acceptance_length} for t in self.tries
            ],
        }


def probe_drafter(
    folder: Path,
    target_folder: Path,
    facts: TargetFacts,
    prompts: Sequence[BenchPrompt],
    *,
    max_new_tokens: int,
    dtype: str = "auto",
) -> LiveProbe:
    """Try a drafter on prompts; without any, on a few that are built in.

    Raises:
        DataError: the folder cannot be read.
        ExportMismatch: its tensors do not fit its configuration.
        TargetError: the target cannot be loaded, or has no tokenizer.
    """
    checkpoint = read_eagle3(folder)
    device, _ = resolve_device("auto")
    target = LocalTarget.load(target_folder, device, resolve_dtype(dtype, device)[0])
    embedding = load_parts(target_folder, "cpu", torch.float32).embedding
    drafter = ReferenceDrafter(checkpoint, embedding, torch.float32)
    asked = _rendered(target_folder, prompts)
    room = facts.max_position_embeddings - max_new_tokens
    asked = [ids for ids in asked if len(ids) <= room]
    answers = generate(target, asked, SamplingSettings(max_new_tokens, facts.end_tokens))
    samples = [(ids, list(answer.tokens)) for ids, answer in zip(asked, answers, strict=True)]
    samples = [(ids, answer) for ids, answer in samples if len(answer) > 1]
    served = _served_layers(checkpoint, facts)
    wanted = {layers: name for name, layers in served.items()}
    tries = []
    for layers, name in wanted.items():
        kinds = {f"{name}": ("served", layers)}
        for shift in (-1, 1):
            moved = tuple(layer + shift for layer in layers)
            if moved[0] >= 0 and moved[-1] <= facts.num_layers:
                kinds[f"{name}, from layers {shift:+d}"] = ("layers", moved)
        for label, (kind, chosen) in kinds.items():
            drafted = [_drafts(target, drafter, ids + answer, chosen) for ids, answer in samples]
            ids_of = checkpoint.target_ids
            mappings = {label: (kind, ids_of)}
            if kind == "served":
                mappings |= {
                    f"{label}, with {what}": ("mapping", moved_ids)
                    for what, moved_ids in _moved_mappings(ids_of, facts.vocab_size).items()
                }
            for named, (its_kind, mapping) in mappings.items():
                walked = [
                    _walk(ids, answer, drafts, mapping)
                    for (ids, answer), drafts in zip(samples, drafted, strict=True)
                ]
                counts = np.array(walked, dtype=np.int64).reshape(-1, 2)
                tries.append(Tried(named, its_kind, counts[:, 0], counts[:, 1]))
    return LiveProbe(tuple(tries), len(samples), sum(len(answer) for _, answer in samples))


def _served_layers(checkpoint: Eagle3Checkpoint, facts: TargetFacts) -> dict[str, tuple[int, ...]]:
    """What each engine that the folder is for would capture, one entry where they agree."""
    config = checkpoint.config
    every = {
        "vLLM": layers_in_vllm(config, facts.num_layers),
        "SGLang": layers_in_sglang(config, facts.num_layers, facts.model_type),
    }
    found = {name: layers for name, layers in every.items() if name in engines_of(checkpoint.layout)}
    if len(set(found.values())) == 1:
        return {"as served": next(iter(found.values()))}
    return {f"as served by {name}": layers for name, layers in found.items()}


def _moved_mappings(ids: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
    found = {}
    for shift in (-1, 1):
        found[f"target ids {shift:+d}"] = (ids + shift).clamp(0, vocab_size - 1)
        found[f"draft ids {shift:+d}"] = ids.roll(-shift)
    return found


def _drafts(
    target: LocalTarget, drafter: ReferenceDrafter, tokens: Sequence[int], layers: Sequence[int]
) -> list[torch.Tensor]:
    """Draft ids of every row, one tensor for each draft step."""
    (captured,) = target.capture([list(tokens)], list(layers))
    return [logits.argmax(dim=-1) for logits in drafter.unroll(tokens, captured.aux.float(), NUM_DRAFTS)]


def _walk(
    prompt: Sequence[int], answer: Sequence[int], drafts: Sequence[torch.Tensor], mapping: torch.Tensor
) -> tuple[int, int]:
    """Rounds and accepted drafts along one answer.

    The row before the answer's first token knows that token, and drafts the second.
    """
    tokens = torch.tensor([*prompt, *answer])
    first, num_rows = len(prompt) - 1, len(answer) - 1
    followed = np.zeros((len(drafts), num_rows), dtype=np.bool_)
    for step, ids in enumerate(drafts):
        usable = num_rows - step
        if usable > 0:
            said = mapping[ids[first : first + usable]]
            behind = tokens[first + 2 + step : first + 2 + step + usable]
            followed[step, :usable] = (said == behind).numpy()
    return walk(followed)


def _rendered(folder: Path, prompts: Sequence[BenchPrompt]) -> list[list[int]]:
    """Token ids of first turns, as serving renders them."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TargetError(
            "the target's tokenizer cannot be loaded", where=folder, why=str(error).splitlines()[0]
        ) from error
    chats: list[list[Mapping[str, Any]]] = [
        list(prompt.messages([])) for prompt in prompts if not prompt.tokens
    ]
    if not prompts:
        chats = [[{"role": "user", "content": text}] for text in _QUESTIONS]
    found = [list(prompt.tokens) for prompt in prompts if prompt.tokens]
    for messages in chats:
        if getattr(tokenizer, "chat_template", None):
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer("\n".join(str(m["content"]) for m in messages))["input_ids"]
        found.append([int(token) for token in ids])
    return found
