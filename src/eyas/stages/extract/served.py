"""Capturing through servers: many requests in flight, stored as they come.

An engine batches as it likes, so an interrupted run equals an unbroken one in its samples, with states
within the tolerance of `eyas.targets.compare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from eyas.stages.extract.items import MAX_TRIES, Item, ledger_failure, store_writer
from eyas.stages.extract.retry import wait_to_retry
from eyas.stages.project import Project
from eyas.stages.protocol import RunContext
from eyas.stages.room import project_room
from eyas.store.commit import CommittedSegment
from eyas.store.ledger import Ledger
from eyas.store.recipe import StoreRecipe
from eyas.store.samples import last_rows
from eyas.store.writer import StoreWriter
from eyas.targets.server.capturing import Prompt
from eyas.targets.server.target import Failed, ServedTarget


def engines_source(project: Project, target: ServedTarget) -> dict[str, object]:
    """What `eyas.stages.extract.sources` notes: the kind, and every engine with its version."""
    return {"kind": project.config.target.kind, "engines": sorted(set(target.engines.values()))}


def capture_served(
    project: Project,
    context: RunContext,
    recipe: StoreRecipe,
    target: ServedTarget,
    items: Mapping[str, Item],
    total_tokens: int,
    label: str = "capture",
) -> int:
    """Capture what is pending of ``items``, each at most `MAX_TRIES` times; returns bytes given to the store.

    A dump is removed only after the commit of its sample. Every fault that is a sample's own stands in the
    ledger as ``CODE: what was seen``.

    Args:
        items: samples by id.
        total_tokens: of all samples that the progress is about, done or not.
        label: of the progress.

    Raises:
        ServerUnreachable, TargetError: all servers are lost; what was taken is committed.
        DiskFull: there is no room.
        Stopped: a signal came; what was taken is committed.
    """
    ledger = context.ledger
    todo = _pending(ledger, items)
    left = sum(len(items[sample].tokens) for sample in todo)
    context.progress.start(label, total=total_tokens, unit="tokens", done=total_tokens - left)

    def committed(segment: CommittedSegment) -> None:
        target.release(segment.ids)

    num_bytes = 0
    try:
        with store_writer(project, ledger, recipe, committed) as writer:
            for num_tried in range(MAX_TRIES):
                wanted = [items[sample] for sample in todo]
                if not wanted:
                    break
                if num_tried:
                    seconds = project.config.extract.retry_seconds
                    wait_to_retry(ledger, num_tried, seconds, context.progress, context.stop)
                num_bytes += _round(project, context, recipe, target, writer, wanted)
                todo = _pending(ledger, items)
    finally:
        ledger.release_leases()
    return num_bytes


def _pending(ledger: Ledger, items: Mapping[str, Item]) -> list[str]:
    return [sample for sample in ledger.pending() if sample in items]


def _round(
    project: Project,
    context: RunContext,
    recipe: StoreRecipe,
    target: ServedTarget,
    writer: StoreWriter,
    items: Sequence[Item],
) -> int:
    """One try of each item; ends with everything taken committed."""
    ledger, progress = context.ledger, context.progress
    room = project_room(project, progress, context.stop)
    by_id = {item.id: item for item in items}
    prompts = [
        Prompt(item.id, item.tokens.tolist(), last_rows(item.spans, len(item.tokens)).tolist())
        for item in items
    ]
    num_bytes = 0
    for one in target.stream(prompts, context.stop, partial(_lease, ledger, context.attempt)):
        if isinstance(one, Failed):
            limit = 1 if one.final else MAX_TRIES
            ledger_failure(ledger, one.key, f"{one.code}: {one.why}", context.attempt, limit)
            continue
        sample = by_id[one.prompt.sample].captured(one.states.aux, one.states.last, recipe)
        room.require(sample.nbytes + (project.config.store.segment_mib << 20))
        room.patiently(partial(writer.add, sample), sample.nbytes)
        num_bytes += sample.nbytes
        progress.advance(len(sample.tokens), bytes=num_bytes)
    room.patiently(writer.flush, 0)
    context.stop.check()
    return num_bytes


def _lease(ledger: Ledger, attempt: int, sample: str) -> None:
    ledger.lease([sample], attempt)
