"""The work of prepare: read, choose, render, split, count, and seal the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np

from eyas.base.errors import DataError
from eyas.base.files import write_json
from eyas.base.layout import Layout
from eyas.base.progress import Progress
from eyas.base.seal import sealed_folder
from eyas.base.stop import StopFlag
from eyas.chat.render import Renderer
from eyas.config.schema import EyasConfig
from eyas.stages.chat_tools import end_tokens, load_tokenizer
from eyas.stages.prepare.rendering import Rendering
from eyas.stages.prepare.selection import configured_sources, select
from eyas.stages.prepare.stage import prepare_recipe
from eyas.stages.project import Project
from eyas.stages.protocol import RunContext
from eyas.store.samples import Sample, sample_id, write_samples

CONVERSATIONS_NAME = "conversations.jsonl"
GIVEN_NAME = "given"
STATISTICS_NAME = "stats.json"


def run(project: Project, context: RunContext) -> dict[str, object]:
    """Prepare the project's data; returns what came of it. Raises as `prepare` does."""
    tokenizer = load_tokenizer(project)
    statistics = prepare(
        project.config,
        project.layout,
        tokenizer,
        end_tokens(project, tokenizer),
        project.resolved.facts.vocab_size,
        context.progress,
        context.stop,
        {"recipe": prepare_recipe(project)},
    )
    counted = "turns" if project.config.regenerate.enabled else "samples"
    return {key: statistics[key] for key in ("records", "kept", counted)}


def prepare(
    config: EyasConfig,
    layout: Layout,
    tokenizer: Any,
    ends: Iterable[int],
    vocab_size: int,
    progress: Progress,
    stop: StopFlag,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Turn the configured sources into samples, or into prompts that wait for answers.

    Without regeneration ``data/samples`` appears, sealed. With it, ``data/prompts`` appears: its
    ``conversations.jsonl`` holds the dialogues (see `eyas.chat.dialogue.read_dialogues`) and its
    folder ``given`` the samples that came as token rows. Both hold ``stats.json``, which is also
    written to ``data/stats.json``.

    Args:
        tokenizer: the target's, as transformers loads it.
        ends: ids at which the target ends an answer.
        vocab_size: ids of token rows must be below it.
        about: what else the seal shall say, for example the recipe.

    Returns:
        The statistics.

    Raises:
        DataError: a record cannot be read or rendered, or nothing is left to train on; nothing is
            written.
        ConfigError: the sources are configured in a way that leaves nothing.
        FileExistsError: the output exists already.
        OSError: the output could not be written.
        Stopped: a stop was asked for; nothing is written.
    """
    selection = select(configured_sources(config, layout), config, vocab_size, progress, stop)
    renderer = Renderer(tokenizer, ends)
    rendering = Rendering(config, selection, renderer, vocab_size)
    output = _Output(rendering)
    seal_text = dict(about or {})
    final = layout.prompts if config.regenerate.enabled else layout.samples
    with sealed_folder(final, seal_text) as folder:
        if config.regenerate.enabled:
            with open(folder / CONVERSATIONS_NAME, "w", encoding="utf-8", newline="\n") as file:
                write_samples(folder / GIVEN_NAME, output.samples(progress, stop, file))
        else:
            write_samples(folder, output.samples(progress, stop, None))
        statistics = rendering.tally.as_dict()
        _refuse_nothing(rendering, regenerate=config.regenerate.enabled)
        write_json(folder / STATISTICS_NAME, statistics)
        seal_text.update(
            num_conversations=statistics["kept"],
            num_turns=statistics["turns"],
            num_samples=rendering.tally.num_samples,
            identity=output.identity,
        )
        write_json(layout.stats, statistics)  # before the seal: what is sealed is never without it
    return statistics


class _Output:
    """Writes dialogues to a file while it gives samples to whoever asks for the next one."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._digest = hashlib.sha256()

    @property
    def identity(self) -> str:
        """Digest of everything that was written, 32 hexadecimal digits."""
        return self._digest.hexdigest()[:32]

    def samples(self, progress: Progress, stop: StopFlag, dialogues: IO[str] | None) -> Iterator[Sample]:
        for kept, split in self._rendering.stream(progress, stop):
            if kept.prompts is not None and dialogues is not None:
                line = json.dumps(
                    {**kept.prompts.as_dict(), "split": split}, ensure_ascii=False, separators=(",", ":")
                )
                dialogues.write(line + "\n")
                self._digest.update(line.encode() + b"\n")
            for sample in kept.samples:
                tokens = np.array(sample.tokens, dtype=np.int32)
                name = sample_id(tokens, sample.spans)
                self._digest.update(f"{name} {split}\n".encode())
                yield Sample(
                    id=name,
                    tokens=tokens,
                    spans=sample.spans,
                    conversation=kept.conversation,
                    source=kept.source,
                    domain=kept.domain,
                    split=split,
                    finish_reason=sample.finish_reason,
                    origin="given",
                )


def _refuse_nothing(rendering: Rendering, *, regenerate: bool) -> None:
    tally = rendering.tally
    if tally.num_samples or tally.num_prompts:
        return
    found = ", ".join(f"{count} {reason}" for reason, count in sorted(tally.dropped.items()))
    raise DataError(
        "no prompt to answer" if regenerate else "no supervised token anywhere",
        where=", ".join(str(source.path) for source in rendering.sources),
        why=f"{tally.num_records} records: {found or 'none'}",
        hint="give conversations with a user turn, or raise data.max_seq_len"
        if regenerate
        else "set regenerate.enabled = true, or give conversations with assistant answers",
    )
