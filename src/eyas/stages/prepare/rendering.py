"""Second pass over the sources: chosen records become samples or prompts, counted on the way."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from eyas.base.errors import DataError
from eyas.base.progress import Progress
from eyas.base.stop import StopFlag
from eyas.chat.conversation import Conversation, DialoguePrompts, TokenRow, content_key
from eyas.chat.length import PROMPT_TOO_LONG, fit
from eyas.chat.mixture import DUPLICATE, Splitter
from eyas.chat.readers import Record
from eyas.chat.refusal import HINT, Unreadable
from eyas.chat.render import RenderedSample, Renderer
from eyas.chat.statistics import Tally
from eyas.chat.view import TemplateRefused
from eyas.config.schema import EyasConfig
from eyas.stages.prepare.selection import NO_ANSWER, Selection, Source, record_key

EMPTY_ANSWER = "empty answer"
TEMPLATE_REFUSED = "template refused"


@dataclass(frozen=True)
class Kept:
    """What one record became: samples, or prompts that wait for answers."""

    conversation: str
    source: str
    domain: str
    samples: tuple[RenderedSample, ...] = ()
    prompts: DialoguePrompts | None = None
    num_prompt_tokens: int = 0


class Rendering:
    """Streams over the chosen records and gives each with its split.

    Every record of the sources is counted in ``tally``, as kept or dropped with a reason.
    """

    def __init__(self, config: EyasConfig, selection: Selection, renderer: Renderer, vocab_size: int) -> None:
        self.tally = Tally()
        self._config = config
        self._selection = selection
        self._renderer = renderer
        self._vocab_size = vocab_size
        self._seen: set[bytes] = set()

    @property
    def sources(self) -> list[Source]:
        return self._selection.sources

    def stream(
        self, progress: Progress, stop: StopFlag
    ) -> Iterator[tuple[Kept, Literal["train", "validation"]]]:
        """Kept records in the order of the sources, but for one that may come last.

        Raises:
            DataError: a record is refused by the chat template and ``on_unreadable`` is ``fail``, or
                a source changed since it was first read.
            Stopped: a stop was asked for.
        """
        data = self._config.data
        splitter: Splitter[Kept] = Splitter(data.validation, data.seed)
        progress.start("render", total=self._selection.num_records, unit="records")
        for index, source in enumerate(self._selection.sources):
            for record in source.reader(self._vocab_size):
                stop.check()
                self.tally.record(record.source, record.domain)
                kept = self._kept(index, source.path, record)
                if isinstance(kept, str):
                    self.tally.drop(record.source, record.domain, kept)
                else:
                    assert not isinstance(record, Unreadable)
                    opening = kept.prompts.opening_key if kept.prompts else record.opening_key
                    yield from self._counted(splitter.push(opening, kept))
                progress.advance(1)
        yield from self._counted(splitter.finish())

    def _counted(
        self, decided: Iterator[tuple[Kept, Literal["train", "validation"]]]
    ) -> Iterator[tuple[Kept, Literal["train", "validation"]]]:
        for kept, split in decided:
            self.tally.conversation(kept.source, kept.domain, split)
            for sample in kept.samples:
                self.tally.sample(kept.source, kept.domain, split, len(sample.tokens), sample.num_supervised)
            if kept.prompts is not None:
                self.tally.prompt(kept.source, kept.domain, len(kept.prompts.turns), kept.num_prompt_tokens)
            yield kept, split

    def _kept(self, index: int, path: Path, record: Record) -> Kept | str:
        regenerate = self._config.regenerate.enabled
        key, reason = record_key(record, regenerate=regenerate)
        reason = reason or self._selection.left_out[index].get(record.line, "")
        if reason:
            return reason
        if self._selection.keys[index].get(record.line) != key:
            raise DataError(
                "a source changed while it was read", where=f"{path}:{record.line}", hint="eyas prepare"
            )
        assert not isinstance(record, Unreadable)
        if isinstance(record, TokenRow):
            row = RenderedSample(record.tokens.tolist(), record.spans, record.finish_reason)
            return self._fitted(record.id, record, [row])
        try:
            return self._prompts(record) if regenerate else self._samples(record)
        except TemplateRefused as error:
            if self._config.data.on_unreadable == "skip":
                return TEMPLATE_REFUSED
            raise DataError(
                error.what, where=f"{path}:{record.line}", why=error.why, hint=error.hint or HINT
            ) from error

    def _samples(self, conversation: Conversation) -> Kept | str:
        rendering = self._renderer.render(conversation)
        self.tally.notes(rendering.notes)
        self.tally.notes(Counter({"empty answers, kept as context": rendering.num_empty}))
        if not rendering.samples:
            return EMPTY_ANSWER if rendering.num_empty else NO_ANSWER
        return self._fitted(conversation.id, conversation, rendering.samples)

    def _fitted(
        self, name: str, record: Conversation | TokenRow, samples: list[RenderedSample]
    ) -> Kept | str:
        data = self._config.data
        kept: list[RenderedSample] = []
        reasons: list[str] = []
        for sample in samples:
            fitted = fit(sample, data.max_seq_len, data.too_long)
            reason = fitted.reason
            if fitted.sample is not None:
                key = content_key(fitted.sample.tokens, fitted.sample.spans)
                if key in self._seen:
                    reason = DUPLICATE
                else:
                    self._seen.add(key)
                    kept.append(fitted.sample)
                    self.tally.num_truncated += fitted.truncated
            if reason:
                reasons.append(reason)
        for reason in reasons:
            self.tally.drop_sample(record.source, record.domain, reason)
        if not kept:
            return reasons[0]
        return Kept(name, record.source, record.domain, samples=tuple(kept))

    def _prompts(self, conversation: Conversation) -> Kept | str:
        prompts = conversation.dialogue()
        assert prompts is not None
        ids = self._renderer.prompt_ids(prompts.turns[0], prompts.tools)
        if len(ids) + self._config.regenerate.max_new_tokens > self._config.data.max_seq_len:
            return PROMPT_TOO_LONG
        # Other text may give the same ids; the turns after the first have no ids before an answer.
        later = replace(prompts, turns=prompts.turns[1:]).id if len(prompts.turns) > 1 else ""
        key = hashlib.blake2b(content_key(ids, ()) + later.encode(), digest_size=16).digest()
        if key in self._seen:
            return DUPLICATE
        self._seen.add(key)
        return Kept(
            prompts.id, conversation.source, conversation.domain, prompts=prompts, num_prompt_tokens=len(ids)
        )
