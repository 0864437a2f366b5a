"""Speculative decoding on held-out prompts, measured against plain decoding by the same code."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from eyas.base.checked import with_check
from eyas.base.clock import utc_now_text
from eyas.base.errors import DataError
from eyas.base.files import write_json
from eyas.chat.dialogue import EmittedAnswer
from eyas.drafter.speculate import Decoded, DecodeSettings, Drafting, decode
from eyas.drafter.tree import TreeShape
from eyas.stages.chat_tools import load_renderer
from eyas.stages.evaluate.prediction import predict_from_store
from eyas.stages.evaluate.prompts import HeldOut, by_length, held_out_conversations
from eyas.stages.evaluate.stage import evaluation_recipe
from eyas.stages.evaluate.tally import DraftTally
from eyas.stages.local_target import load_target, target_arithmetic
from eyas.stages.project import Project
from eyas.stages.protocol import RunContext
from eyas.stages.records import recorded_capture_recipe
from eyas.stages.trained import load_trained
from eyas.targets.local.model import LocalTarget
from eyas.targets.parts import load_parts


@dataclass
class _Tally:
    """What the measurement has seen so far; ``tree`` is None where none is configured."""

    chain: DraftTally
    tree: DraftTally | None
    prompts: dict[str, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(frozen=True)
class _Decoder:
    """All ways to decode a group of prompts."""

    target: LocalTarget
    drafting: Drafting
    settings: DecodeSettings
    context: RunContext

    def plain(self, prompts: Sequence[list[int]]) -> list[Decoded]:
        return self._decode(prompts, None)

    def drafted(self, prompts: Sequence[list[int]]) -> list[Decoded]:
        return self._decode(prompts, self.drafting)

    def with_tree(self, prompts: Sequence[list[int]], shape: TreeShape) -> list[Decoded]:
        return self._decode(prompts, replace(self.drafting, tree=shape))

    def _decode(self, prompts: Sequence[list[int]], drafting: Drafting | None) -> list[Decoded]:
        session = self.target.session(len(prompts))
        return decode(session, prompts, self.settings, drafting, self.context.stop)


def run(project: Project, context: RunContext) -> dict[str, object]:
    """Measure acceptance length, losslessness and speed; write ``reports/evaluation.json``.

    Raises:
        NotReady: training has not ended.
        DataError: nothing is held out.
        Stopped: a signal came; nothing is written.
    """
    settings = project.config.evaluate
    trained = load_trained(project)
    recipe = evaluation_recipe(project, trained.path)
    renderer = load_renderer(project)
    conversations = held_out_conversations(project, renderer)
    recorded = recorded_capture_recipe(project)
    device, dtype = target_arithmetic(project, str(recorded["compute_dtype"]) if recorded else None)
    target = load_target(project, device, dtype, context.progress)
    embedding = load_parts(project.resolved.model, device, target.dtype).embedding
    drafting = Drafting(
        drafter=trained.drafter(embedding, target.dtype),
        target_ids=torch.from_numpy(trained.vocabulary.target_ids).to(device),
        aux_layers=project.resolved.aux_layers,
        num_drafts=settings.num_drafts,
    )
    decoder = _Decoder(
        target,
        drafting,
        DecodeSettings(settings.max_new_tokens, frozenset(renderer.end_tokens)),
        context,
    )
    shape = None if settings.tree is None else TreeShape(**settings.tree.model_dump())
    tally = _Tally(DraftTally(settings.num_drafts), None if shape is None else DraftTally(shape.depth))
    timed: list[list[int]] = []
    context.progress.start("decode", total=_num_turns(conversations), unit="prompts")
    while asked := [(c, prompt) for c in conversations if (prompt := _fitting(project, c)) is not None]:
        prompts = [prompt for _, prompt in asked]
        if not timed:
            timed = _spread(asked, settings.timing_prompts)
        for group in by_length(prompts, settings.batch_size):
            _measure(decoder, [asked[place] for place in group], tally, shape)
            context.progress.advance(len(group), accepted=round(tally.chain.total.acceptance_length, 3))
    if not tally.chain.num_answers:
        raise DataError("no held-out prompt fits the target", hint="give shorter prompts")
    if doubt := _doubt(tally.chain, dtype):
        context.progress.say(doubt)
    speed = _speed(decoder, timed, context) if timed else None
    report = _report(project, recipe, tally, speed, len(conversations), dtype)
    report["prediction"] = predict_from_store(
        project, context, drafting, trained.vocabulary, decoder.settings.end_tokens
    )
    write_json(project.layout.evaluation, with_check(report))
    return {
        "prompts": len(conversations),
        "acceptance_length": report["acceptance_length"],
        **({"tree_acceptance_length": tally.tree.total.acceptance_length} if tally.tree else {}),
        "equal_texts": _equal_texts(tally.chain),
        **({"speedup": speed["ratio"]} if speed else {}),
    }


def _equal_texts(tally: DraftTally) -> str:
    """``12 of 27``, and the ties where there are any: without them bfloat16 looks like a fault.

    What differs by more than a tie is said as well; else it would hide behind the ties.
    """
    ties = f", {tally.ties} at a numeric tie" if tally.ties else ""
    different = f", {len(tally.different)} different" if tally.different else ""
    return f"{tally.equal} of {tally.num_answers}{ties}{different}"


def _doubt(tally: DraftTally, dtype: str) -> str:
    """How to tell rounding from a fault where texts differ by more than a tie; empty where none does."""
    if not tally.different:
        return ""
    count = f"{len(tally.different)} of {tally.num_answers} texts"
    said = f"{count} differ from plain decoding's by more than a numeric tie"
    if dtype in ("bfloat16", "float16"):
        tells = "eyas evaluate --redo --set target.dtype=float32 shows whether"
        return f"{said}; {tells} that is {dtype}'s rounding"
    return f"{said}, which rounding cannot do in {dtype}: please report it"


def _num_turns(conversations: Sequence[HeldOut]) -> int:
    return sum(c.dialogue.num_turns if c.dialogue is not None else 1 for c in conversations)


def _fitting(project: Project, conversation: HeldOut) -> list[int] | None:
    """The next prompt, when it leaves room for an answer within the target's positions."""
    prompt = conversation.next_prompt()
    limit = project.resolved.facts.max_position_embeddings - project.config.evaluate.max_new_tokens
    return prompt if prompt is not None and len(prompt) <= max(limit, 1) else None


def _spread(asked: Sequence[tuple[HeldOut, list[int]]], count: int) -> list[list[int]]:
    """Prompts to time, taken from the domains in turn."""
    by_domain: dict[str, list[list[int]]] = defaultdict(list)
    for conversation, prompt in asked:
        by_domain[conversation.domain].append(prompt)
    picked: list[list[int]] = []
    for place in range(len(asked)):
        picked += [by_domain[domain][place] for domain in sorted(by_domain) if place < len(by_domain[domain])]
    return picked[:count]


def _measure(
    decoder: _Decoder,
    group: Sequence[tuple[HeldOut, list[int]]],
    tally: _Tally,
    shape: TreeShape | None,
) -> None:
    prompts = [prompt for _, prompt in group]
    plain, drafted = decoder.plain(prompts), decoder.drafted(prompts)
    ways = [(tally.chain, drafted)]
    if shape is not None and tally.tree is not None:
        ways.append((tally.tree, decoder.with_tree(prompts, shape)))
    for place, (conversation, prompt) in enumerate(group):
        if not conversation.answers:
            tally.prompts[conversation.domain] += 1
        one = plain[place]
        conversation.answers.append(EmittedAnswer(tuple(one.tokens), one.finish_reason))
        for kept, answers in ways:
            kept.add(decoder.target, conversation.id, conversation.domain, prompt, one, answers[place])


def _speed(decoder: _Decoder, prompts: Sequence[list[int]], context: RunContext) -> dict[str, float]:
    """Tokens per second one prompt at a time, with and without the drafter, taking turns."""
    seconds, tokens = {"plain": 0.0, "drafted": 0.0}, {"plain": 0, "drafted": 0}
    context.progress.start("time one by one", total=len(prompts), unit="prompts")
    for way in (decoder.plain, decoder.drafted):
        way([prompts[0][:8]])  # the first call of each pays for warming up
    for prompt in prompts:
        for name, way in (("plain", decoder.plain), ("drafted", decoder.drafted)):
            started = time.monotonic()
            answers = way([prompt])
            seconds[name] += time.monotonic() - started
            tokens[name] += len(answers[0].tokens)
        context.progress.advance(1)
    rates = {name: tokens[name] / seconds[name] for name in seconds}
    return {
        "prompts": len(prompts),
        "plain_tokens_per_second": rates["plain"],
        "drafted_tokens_per_second": rates["drafted"],
        "ratio": rates["drafted"] / rates["plain"],
    }


def _report(
    project: Project,
    recipe: dict[str, object],
    tally: _Tally,
    speed: dict[str, float] | None,
    num_prompts: int,
    dtype: str,
) -> dict[str, object]:
    settings = project.config.evaluate
    tree = None
    if tally.tree is not None and settings.tree is not None:
        tree = {**settings.tree.model_dump(), **tally.tree.as_dict(tally.prompts)}
    return {
        "recipe": recipe,
        "at": utc_now_text(),
        "num_prompts": num_prompts,
        "num_answers": tally.chain.num_answers,
        "num_tokens": tally.chain.num_tokens,
        "num_drafts": settings.num_drafts,
        "temperature": 0.0,
        "dtype": dtype,
        **tally.chain.as_dict(tally.prompts),
        "tree": tree,
        "speed": speed,
    }
