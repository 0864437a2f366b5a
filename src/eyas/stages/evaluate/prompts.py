"""Held-out prompts, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eyas.base.errors import DataError
from eyas.base.seal import require_seal
from eyas.chat.conversation import Conversation, DialoguePrompts, TokenRow
from eyas.chat.dialogue import Dialogue, EmittedAnswer
from eyas.chat.readers import SourceReader
from eyas.chat.render import Renderer
from eyas.stages.project import Project
from eyas.store.samples import read_samples


@dataclass
class HeldOut:
    """One held-out conversation: its domain, and how to get the prompt of its next turn."""

    id: str
    domain: str
    first_prompt: list[int] | None = None
    dialogue: Dialogue | None = None
    answers: list[EmittedAnswer] = field(default_factory=list)

    def next_prompt(self) -> list[int] | None:
        """Token ids of the next turn's prompt; None after the last turn."""
        if self.dialogue is not None:
            return self.dialogue.next_prompt(self.answers)
        return self.first_prompt if not self.answers else None


def held_out_conversations(project: Project, renderer: Renderer) -> list[HeldOut]:
    """The configured prompts, or the validation conversations; no prompt twice.

    Raises:
        DataError: the file cannot be read, or nothing is held out.
    """
    settings = project.config.evaluate
    found = _from_file(project, renderer) if settings.prompts else _from_validation(project)
    unique = list({conversation.id: conversation for conversation in found}.values())
    if not unique:
        raise DataError(
            "nothing is held out to evaluate on",
            where=settings.prompts or project.layout.samples,
            hint="set evaluate.prompts to a file of prompts, or data.validation above 0",
        )
    return unique[: settings.limit]


def _from_file(project: Project, renderer: Renderer) -> list[HeldOut]:
    path = project.source_path(str(project.config.evaluate.prompts))
    found: list[HeldOut] = []
    reader = SourceReader(path, name="held-out", domain=None, vocab_size=project.resolved.facts.vocab_size)
    for record in reader:
        prompts: DialoguePrompts | None = None
        if isinstance(record, Conversation):
            prompts = record.dialogue()
        elif isinstance(record, TokenRow) and record.spans:
            found.append(HeldOut(record.id, record.domain, record.tokens[: record.spans[0][0]].tolist()))
            continue
        if prompts is None:
            detail = getattr(record, "detail", "nothing is asked in it")
            raise DataError(
                "a held-out prompt cannot be used", where=f"{path}:{record.line}", why=str(detail)
            )
        found.append(HeldOut(prompts.id, prompts.domain, dialogue=Dialogue(renderer, prompts)))
    return found


def _from_validation(project: Project) -> list[HeldOut]:
    require_seal(project.layout.samples)
    return [
        HeldOut(sample.id, sample.domain, sample.tokens[: sample.spans[0][0]].tolist())
        for sample in read_samples(project.layout.samples)
        if sample.split == "validation"
    ]


def by_length(prompts: Sequence[list[int]], size: int) -> list[list[int]]:
    """Places of prompts in groups of similar length."""
    order = sorted(range(len(prompts)), key=lambda place: (len(prompts[place]), prompts[place]))
    return [order[start : start + size] for start in range(0, len(order), size)]
