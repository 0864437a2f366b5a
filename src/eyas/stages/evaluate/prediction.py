"""What stored validation states say about every chain and tree, beside what was measured by decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from eyas.drafter.prediction import as_rows, predict, predict_by, predict_by_place, walk_counts
from eyas.drafter.replay import replay_counts
from eyas.drafter.speculate import Drafting
from eyas.drafter.tree import TreeShape
from eyas.drafter.vocabulary import DraftVocabulary
from eyas.stages.project import Project
from eyas.stages.protocol import RunContext
from eyas.stages.stored_states import StoredSamples
from eyas.store.reader import StoreReader
from eyas.store.samples import read_samples

PREDICTED = 8
"""Longest chain that is looked at, at least."""
BATCH_TOKENS = 4096
PROMPT_LENGTHS = (0, 64, 256, 1024, 4096)
"""Where classes of prompt length begin, in tokens."""


def predict_from_store(
    project: Project,
    context: RunContext,
    drafting: Drafting,
    vocabulary: DraftVocabulary,
    end_tokens: frozenset[int],
) -> dict[str, object] | None:
    """Acceptance lengths on the validation conversations; None without any.

    Chains of 1 to `PREDICTED` drafts by one pass: over all, by domain, by place in the answer and by length
    of the prompt. Trees, where one is configured: that one, and with half and twice its drafts.

    Raises:
        SegmentDamaged: a stored sample cannot be read.
        Stopped: a stop was asked for.
    """
    entries = [entry for entry in context.ledger.entries() if entry.split == "validation"]
    samples = StoredSamples(StoreReader(project.layout.segments, context.ledger), entries)
    if not samples.lengths():
        return None
    counts = walk_counts(
        drafting.drafter,
        vocabulary,
        samples,
        max_drafts=max(project.config.evaluate.num_drafts, PREDICTED),
        batch_tokens=BATCH_TOKENS,
        stop=context.stop,
    )
    groups, domains, prompts = {}, {}, {}
    for sample in read_samples(project.layout.samples):
        groups[sample.id], domains[sample.id] = sample.conversation, sample.domain
        prompts[sample.id] = _length_class(sample.spans[0][0])
    return {
        "conversations": len({groups[sample] for sample in counts}),
        "rows": as_rows(predict(counts, groups)),
        "domains": {name: as_rows(rows) for name, rows in predict_by(counts, groups, domains).items()},
        "places": [
            {"from_token": begin, "rows": as_rows(rows)} for begin, rows in predict_by_place(counts, groups)
        ],
        "prompt_lengths": [
            {"from_token": int(begin), "rows": as_rows(rows)}
            for begin, rows in sorted(predict_by(counts, groups, prompts).items(), key=lambda x: int(x[0]))
        ],
        "trees": _trees(project, context, drafting, samples, groups, end_tokens),
    }


def _length_class(num_tokens: int) -> str:
    return str(max(begin for begin in PROMPT_LENGTHS if begin <= num_tokens))


def _trees(
    project: Project,
    context: RunContext,
    drafting: Drafting,
    samples: StoredSamples,
    groups: Mapping[str, str],
    end_tokens: frozenset[int],
) -> list[dict[str, float]]:
    wanted = project.config.evaluate.tree
    if wanted is None:
        return []
    sizes = sorted({max(1, wanted.total_tokens // 2), wanted.total_tokens, 2 * wanted.total_tokens})
    shapes = [TreeShape(wanted.depth, wanted.top_k, size) for size in sizes]
    counts = replay_counts(
        [replace(drafting, tree=shape) for shape in shapes],
        samples,
        end_tokens=end_tokens,
        batch_tokens=BATCH_TOKENS,
        stop=context.stop,
    )
    return [
        {
            "depth": shape.depth,
            "top_k": shape.top_k,
            "total_tokens": shape.total_tokens,
            "acceptance_length": found.acceptance_length,
            "low": found.low,
            "high": found.high,
        }
        for shape, found in zip(shapes, predict(counts, groups), strict=True)
    ]
