"""What stored validation states say about every chain length, beside what was measured by decoding."""

from __future__ import annotations

from eyas.drafter.model import EagleDrafter
from eyas.drafter.prediction import as_rows, predict, walk_counts
from eyas.drafter.vocabulary import DraftVocabulary
from eyas.stages.project import Project
from eyas.stages.protocol import RunContext
from eyas.stages.stored_states import StoredSamples
from eyas.store.reader import StoreReader
from eyas.store.samples import read_samples

PREDICTED = 8
"""Longest chain that is looked at, at least."""
BATCH_TOKENS = 4096


def predict_from_store(
    project: Project,
    context: RunContext,
    drafter: EagleDrafter,
    vocabulary: DraftVocabulary,
    *,
    max_drafts: int,
) -> dict[str, object] | None:
    """Acceptance lengths of chains of 1..``max_drafts`` on the validation conversations; None without any.

    Raises:
        SegmentDamaged: a stored sample cannot be read.
        Stopped: a stop was asked for.
    """
    entries = [entry for entry in context.ledger.entries() if entry.split == "validation"]
    samples = StoredSamples(StoreReader(project.layout.segments, context.ledger), entries)
    if not samples.lengths():
        return None
    counts = walk_counts(
        drafter,
        vocabulary,
        samples,
        max_drafts=max_drafts,
        batch_tokens=BATCH_TOKENS,
        stop=context.stop,
    )
    groups = {sample.id: sample.conversation for sample in read_samples(project.layout.samples)}
    return {
        "conversations": len({groups[sample] for sample in counts}),
        "rows": as_rows(predict(counts, groups)),
    }
