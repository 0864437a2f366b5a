"""Answering every prompt with the target.

Turns are answered in rounds. In a round, prompts are grouped by content (length, then id) over all
conversations, answered or not, so that a group that is redone after a crash is the same group and gives
the same bits with the local target. A group is durable as soon as it is finished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np

from eyas.base.checked import with_check
from eyas.base.errors import DamageFound, DataError, RecipeChanged
from eyas.base.files import read_json, set_aside, write_json
from eyas.base.hashing import recipe_differences, recipe_hash
from eyas.base.seal import read_seal, require_seal, sealed_folder
from eyas.base.units import counted
from eyas.chat.dialogue import Dialogue, read_dialogues
from eyas.chat.length import fit
from eyas.stages.chat_tools import load_renderer
from eyas.stages.local_target import target_arithmetic
from eyas.stages.project import Project
from eyas.stages.protocol import RunContext
from eyas.stages.regenerate.answers import Answer, part_recipes, prompt_digest, read_answers, write_part
from eyas.stages.regenerate.asks import Ask, OpenConversation
from eyas.stages.regenerate.local import LocalAnswers
from eyas.stages.regenerate.served import ServerAnswers
from eyas.stages.regenerate.stage import ANSWERS_RECIPE, answers_recipe, recorded_answers_recipe
from eyas.stages.served_target import is_served, served_dtype
from eyas.store.samples import Sample, read_samples, sample_id, write_samples
from eyas.targets.fingerprint import weights_fingerprint

CONVERSATIONS = "conversations.jsonl"
STATISTICS = "stats.json"
_CHANGED_HINT = "take the change back, or: eyas run --redo regenerate (the old answers are set aside)"


def run(project: Project, context: RunContext) -> dict[str, object]:
    """Answer what is unanswered, then write the samples.

    Raises:
        RecipeChanged: the answers on disk were drawn with other settings or weights.
        DataError: no answer holds anything to learn.
        Stopped: a signal came; finished groups are kept.
    """
    layout, config = project.layout, project.config
    require_seal(layout.prompts)
    recorded = recorded_answers_recipe(project)
    kept = str(recorded["dtype"]) if recorded else None
    served = is_served(project)
    device, dtype = ("", served_dtype(project, kept)) if served else target_arithmetic(project, kept)
    fingerprint = weights_fingerprint(project.resolved.model, project.fingerprint_cache)
    recipe = answers_recipe(project, fingerprint.hash, dtype)
    _require_recipe(project, recorded, recipe)
    renderer = load_renderer(project)
    conversations = [
        OpenConversation(prompts, Dialogue(renderer, prompts))
        for prompts in read_dialogues(layout.prompts / CONVERSATIONS)
    ]
    known = _known_answers(project, context)
    num_turns = sum(len(conversation.prompts.turns) for conversation in conversations)
    context.progress.start("answer", total=num_turns, unit="answers", done=min(len(known), num_turns))
    ends = sorted(renderer.end_tokens)
    answerer = (
        ServerAnswers(project, context, ends)
        if served
        else LocalAnswers(project, context, device, dtype, ends)
    )
    num_new = num_tokens = 0
    with closing(answerer):
        for turn in range(max((len(c.prompts.turns) for c in conversations), default=0)):
            groups = _groups(_asks(project, conversations, turn), config.regenerate.batch_size)
            missing = [[ask for ask in group if ask.key not in known] for group in groups]
            for answers in answerer.answer([group for group in missing if group]):
                write_part(layout.answers, turn, answers, recipe_hash(recipe))
                known.update({(a.conversation, a.turn, a.prompt): a for a in answers})
                num_new += len(answers)
                num_tokens += sum(len(answer.tokens) for answer in answers)
                context.progress.advance(len(answers), tokens=num_tokens)
            for ask in (ask for group in groups for ask in group):
                _take(ask, known.get(ask.key), answerer.failed.get(ask.key, ""), config.regenerate.truncated)
        faults = answerer.faults
    counts = _write_samples(project, conversations)
    if answerer.failed:
        unanswered = counted(len(answerer.failed), "prompt")
        context.progress.say(f"{unanswered} got no answer; their conversations end before")
    more = {"faults": faults} if faults else {}
    return {"answered": num_new, "answer_tokens": num_tokens, **counts, **more}


def _take(ask: Ask, answer: Answer | None, failure: str, truncated: str) -> None:
    """Go on with a conversation, or end it here."""
    if answer is None:
        ask.conversation.ended = f"no answer ({failure})"
        return
    ask.conversation.answers.append(answer)
    if answer.finish_reason == "length" and truncated == "drop":
        ask.conversation.ended = "truncated answer dropped"


def _require_recipe(project: Project, recorded: dict[str, object] | None, recipe: dict[str, object]) -> None:
    if recorded is None:
        wanted = recipe_hash(recipe)
        if others := sorted(part_recipes(project.layout.answers) - {wanted}):
            raise RecipeChanged(
                "the answers on disk were drawn with other settings or weights",
                where=project.layout.answers,
                why=f"{ANSWERS_RECIPE} is lost; the answers carry {', '.join(others)}, not {wanted}",
                hint=_CHANGED_HINT,
            )
        write_json(project.layout.answers / ANSWERS_RECIPE, with_check(recipe))
        return
    differences = recipe_differences(recorded, recipe)
    if differences:
        raise RecipeChanged(
            "the answers on disk were drawn with other settings or weights",
            where=project.layout.answers,
            why="; ".join(differences),
            hint=_CHANGED_HINT,
        )


def _known_answers(project: Project, context: RunContext) -> dict[tuple[str, int, str], Answer]:
    known = {}
    for path, result in read_answers(project.layout.answers):
        if isinstance(result, DamageFound):
            context.progress.say(f"{path.name} is damaged ({result.why}); it is set aside and redone")
            set_aside(path, project.layout.set_aside, str(result.why))
            continue
        for answer in result:
            known[answer.conversation, answer.turn, answer.prompt] = answer
    return known


def _asks(project: Project, conversations: Sequence[OpenConversation], turn: int) -> Iterator[Ask]:
    """The prompts of a round; a conversation whose prompt leaves no room for an answer ends here."""
    config = project.config
    for conversation in conversations:
        if conversation.ended or len(conversation.prompts.turns) <= turn:
            continue
        tokens = conversation.dialogue.next_prompt(conversation.emitted)
        assert tokens is not None
        room = config.data.max_seq_len - len(tokens)
        if room < 2:  # a span of one token asks for no draft
            conversation.ended = "prompt too long"
            continue
        limit = min(config.regenerate.max_new_tokens, room)
        yield Ask(conversation, turn, tokens, prompt_digest(tokens), limit)


def _groups(asks: Iterator[Ask], size: int) -> list[list[Ask]]:
    ordered = sorted(asks, key=lambda ask: (len(ask.tokens), ask.digest, ask.conversation.prompts.id))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _write_samples(project: Project, conversations: Sequence[OpenConversation]) -> dict[str, object]:
    layout = project.layout
    if layout.samples.exists():
        set_aside(
            layout.samples, layout.set_aside, "prompts or answers changed; the samples are written anew"
        )
    reasons: Counter[str] = Counter()
    about: dict[str, object] = {"prompts": read_seal(layout.prompts)["about"].get("identity")}
    with sealed_folder(layout.samples, about) as folder:
        counts = write_samples(folder, _all_samples(project, conversations, reasons))
        if counts.num_samples == 0:
            raise DataError(
                "no answer holds anything to learn",
                where=layout.answers,
                why="; ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or None,
                hint="look at the answers; raise regenerate.max_new_tokens or data.max_seq_len",
            )
        about |= {
            "num_samples": counts.num_samples,
            "num_tokens": counts.num_tokens,
            "num_supervised": counts.num_supervised,
        }
        numbers: dict[str, object] = {
            "samples": counts.num_samples,
            "tokens": counts.num_tokens,
            "supervised_tokens": counts.num_supervised,
            "duplicates": counts.num_duplicates,
        }
        stats = read_json(layout.prompts / STATISTICS)  # the sealed copy: data/stats.json may have been lost
        stats["regenerate"] = {**numbers, "reasons": dict(sorted(reasons.items()))}
        write_json(layout.stats, stats)  # before the seal: what is sealed is never without it
    return numbers


def _all_samples(
    project: Project, conversations: Sequence[OpenConversation], reasons: Counter[str]
) -> Iterator[Sample]:
    """Samples of all conversations, then those that were given as tokens; ``reasons`` is filled."""
    config, given = project.config, project.layout.prompts / "given"
    for conversation in conversations:
        for answer in conversation.answers:
            reasons[f"answers that ended by {answer.finish_reason}"] += 1
        if conversation.ended:
            reasons[f"conversations ended: {conversation.ended}"] += 1
        answers = conversation.emitted
        if conversation.ended == "truncated answer dropped":
            answers = answers[:-1]
        for rendered in conversation.dialogue.samples(answers):
            fitted = fit(rendered, config.data.max_seq_len, config.data.too_long)
            if fitted.sample is None:
                reasons[f"samples dropped: {fitted.reason}"] += 1
                continue
            tokens = np.asarray(fitted.sample.tokens, dtype=np.int32)
            yield Sample(
                id=sample_id(tokens, fitted.sample.spans),
                tokens=tokens,
                spans=fitted.sample.spans,
                conversation=conversation.prompts.id,
                source=conversation.prompts.source,
                domain=conversation.prompts.domain,
                split="validation" if conversation.prompts.split == "validation" else "train",
                finish_reason=fitted.sample.finish_reason,
                origin="regenerated",
            )
    if given.is_dir():
        yield from read_samples(given)
