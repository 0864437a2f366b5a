"""Capturing the samples that the store does not hold yet.

Batches are planned over all samples by content, so that a batch that is redone after a crash is the same
batch and gives the same bits; only its missing samples are stored.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch

from eyas.base.errors import CaptureInvalid, EyasError
from eyas.base.layout import Layout
from eyas.base.seal import require_seal
from eyas.base.units import format_bytes
from eyas.config.resolve import SAFETENSORS_DTYPE
from eyas.stages.extract.continuity import check_continuity, chosen_samples
from eyas.stages.extract.items import MAX_TRIES, Item, ledger_failure, store_writer
from eyas.stages.extract.served import capture_served, engines_source
from eyas.stages.extract.sources import note_source, source_changed
from eyas.stages.extract.stage import SAME_STATES, capture_recipe
from eyas.stages.local_target import load_target, target_arithmetic
from eyas.stages.project import Project
from eyas.stages.protocol import RunContext
from eyas.stages.records import recorded_capture_recipe
from eyas.stages.room import project_room
from eyas.stages.served_target import capture_target, is_served, served_dtype
from eyas.store.imports import note_rechecked, to_recheck
from eyas.store.ledger import Ledger
from eyas.store.place import remember_place
from eyas.store.reader import StoreReader
from eyas.store.recipe import StoreRecipe, require_store_recipe
from eyas.store.repair import repair
from eyas.store.room import MEMORY_FILESYSTEMS, filesystem_kind
from eyas.store.samples import last_rows, read_samples
from eyas.store.scrub import quick
from eyas.store.segment import CapturedSample
from eyas.targets.batches import padding_share, plan_batches
from eyas.targets.capture import CapturedStates, CaptureTarget
from eyas.targets.check import check_capture
from eyas.targets.dtype import torch_dtype
from eyas.targets.fingerprint import weights_fingerprint
from eyas.targets.local.model import LocalTarget

RECHECK_OF_A_NEW_SOURCE = 3
"""Stored samples that another engine captures again at least, whatever ``extract.recheck`` says."""


def run(project: Project, context: RunContext) -> dict[str, object]:
    """Capture what is left.

    Raises:
        RecipeChanged: the store was made by another recipe.
        DiskFull: there is no room; everything committed is whole.
        ServerUnreachable: no server answers any more; everything committed is whole.
        Stopped: a signal came.
    """
    layout, ledger = project.layout, context.ledger
    recorded = recorded_capture_recipe(project)
    known = str(recorded["compute_dtype"]) if recorded else None
    served = is_served(project)
    device, dtype = ("", served_dtype(project, known)) if served else target_arithmetic(project, known)
    fingerprint = weights_fingerprint(project.resolved.model, project.fingerprint_cache)
    recipe = capture_recipe(project, fingerprint.hash, dtype)
    require_seal(layout.samples)
    require_store_recipe(layout.store_recipe, recipe, {segment.recipe for segment in ledger.segments()})
    remember_place(layout, ledger)
    items = _list_samples(layout, ledger)
    ledger.release_leases()
    _mend(layout, ledger, context)
    before = ledger.counts()["stored"]
    started = time.monotonic()
    todo = set(ledger.pending())
    imported = [sample for sample in to_recheck(layout) if ledger.state_of(sample) == "stored"]
    num_bytes, faults = 0, Counter[str]()
    if (todo or imported) and served:
        num_bytes, faults = _through_servers(project, context, recipe, items, imported)
    elif todo or imported:
        target = load_target(project, device, dtype, context.progress)
        source: dict[str, object] = {"kind": "local"}
        _recheck(project, context, target, recipe, imported, source)
        if todo:
            _warn_of_room(project, items, todo, context)
            note_source(layout, source, context.attempt)
            num_bytes = _capture_all(project, context, recipe, target, items)
        del target
        gc.collect()
    seconds = time.monotonic() - started
    counts = ledger.counts()
    tokens = counts["stored"].tokens - before.tokens
    return {
        "captured": counts["stored"].samples - before.samples,
        "tokens": tokens,
        "bytes": num_bytes,
        "tokens_per_second": round(tokens / seconds, 1) if tokens else 0.0,
        "stored": counts["stored"].samples,
        "set_aside": counts["set_aside"].samples,
        **({"faults": dict(sorted(faults.items()))} if faults else {}),
    }


def _through_servers(
    project: Project,
    context: RunContext,
    recipe: StoreRecipe,
    items: Sequence[Item],
    imported: Sequence[str],
) -> tuple[int, Counter[str]]:
    """Capture what is left with servers; bytes stored, and everything that went wrong by its code."""
    todo = set(context.ledger.pending())
    canary = min(items, key=lambda item: (item.id not in todo, abs(len(item.tokens) - 64), item.id))
    longest = max(len(item.tokens) for item in items)
    with capture_target(project, context, recipe, canary.tokens.tolist(), longest) as target:
        source = engines_source(project, target)
        _recheck(project, context, target, recipe, imported, source)
        num_bytes = 0
        if todo:
            _warn_of_room(project, items, todo, context)
            note_source(project.layout, source, context.attempt)
            num_bytes = capture_served(project, context, recipe, target, items)
        return num_bytes, Counter(target.faults)


def _list_samples(layout: Layout, ledger: Ledger) -> list[Item]:
    """All samples, which the ledger lists from now on."""
    items, entries = [], []
    for sample in read_samples(layout.samples):
        items.append(Item(sample.id, sample.tokens, sample.spans))
        entries.append(sample.entry)
    ledger.replace_samples(entries)
    return items


def _mend(layout: Layout, ledger: Ledger, context: RunContext) -> None:
    """Adopt whole segments that the ledger does not know; set damaged ones aside."""
    for line in repair(layout, ledger, quick(layout, ledger)):
        context.progress.say(line)


def _recheck(
    project: Project,
    context: RunContext,
    target: CaptureTarget,
    recipe: StoreRecipe,
    imported: Sequence[str],
    source: dict[str, object],
) -> None:
    """Continuity: some stored samples, and imported ones, have to come out the same before more are added."""
    reader = StoreReader(project.layout.segments, context.ledger)
    count = project.config.extract.recheck
    if source_changed(project.layout, source):
        count = max(count, RECHECK_OF_A_NEW_SOURCE)
    ids = chosen_samples(reader.ids(), count, context.attempt)
    ids += [sample for sample in imported if sample in reader and sample not in ids]
    if ids:
        error = check_continuity(target, reader, recipe, ids)
        context.progress.say(f"{len(ids)} {SAME_STATES} (largest error {error:.1g})")
    if imported:
        note_rechecked(project.layout, imported)


def _warn_of_room(project: Project, items: Sequence[Item], todo: set[str], context: RunContext) -> None:
    """Say so before the first byte when the forecast does not fit."""
    resolved = project.resolved
    needed = 0
    kind = filesystem_kind(project.layout.store)
    if kind in MEMORY_FILESYSTEMS:
        context.progress.say(f"the store lies on {kind}: a reboot wipes it; move the project to a disk")
    for item in items:
        if item.id in todo:
            needed += len(item.tokens) * (resolved.bytes_per_token_aux + 4)
            needed += len(last_rows(item.spans, len(item.tokens))) * resolved.bytes_per_token_last
    room = project_room(project, context.progress, context.stop).writable_bytes()
    then = "pause" if project.config.disk.when_full == "wait" else "stop"
    verdict = "" if needed < room else f": it will not fit; the run will {then} when the disk is full"
    context.progress.say(
        f"forecast: {format_bytes(needed)} for {len(todo)} samples, "
        f"{format_bytes(max(0, room))} may be written{verdict}"
    )


def _capture_all(
    project: Project, context: RunContext, recipe: StoreRecipe, target: LocalTarget, items: Sequence[Item]
) -> int:
    config, ledger = project.config, context.ledger
    sizes = [(item.id, len(item.tokens)) for item in items]
    batches = plan_batches(sizes, config.extract.batch_tokens)
    todo = set(ledger.pending())
    context.progress.say(
        f"{len(batches)} batches of up to {config.extract.batch_tokens} tokens, "
        f"{100 * padding_share(sizes, batches):.1f}% padding"
    )
    total_tokens = sum(length for _, length in sizes)
    left = sum(length for id_, length in sizes if id_ in todo)
    context.progress.start("capture", total=total_tokens, unit="tokens", done=total_tokens - left)
    num_bytes, room = 0, project_room(project, context.progress, context.stop)
    with store_writer(project, ledger, recipe) as writer:
        capture = _Capture(target, recipe, ledger, context.attempt)
        for _ in range(MAX_TRIES):
            for batch in batches:
                wanted = {items[index].id for index in batch} & todo
                if not wanted:
                    continue
                if context.stop.requested:
                    writer.flush()
                    context.stop.check()
                ledger.lease(wanted, context.attempt)
                for sample in capture.batch([items[index] for index in batch], wanted):
                    room.require(sample.nbytes + (config.store.segment_mib << 20))
                    room.patiently(partial(writer.add, sample), sample.nbytes)
                    num_bytes += sample.nbytes
                done = sum(len(items[index].tokens) for index in batch if items[index].id in wanted)
                context.progress.advance(done, bytes=num_bytes)
            room.patiently(writer.flush, 0)
            todo = set(ledger.pending())
            if not todo:
                break
    return num_bytes


class _Capture:
    """Captures and checks batches; a failure costs only the samples it concerns."""

    def __init__(self, target: LocalTarget, recipe: StoreRecipe, ledger: Ledger, attempt: int) -> None:
        self._target, self._recipe, self._ledger, self._attempt = target, recipe, ledger, attempt
        names = {value: key for key, value in SAFETENSORS_DTYPE.items()}
        self._dtype = torch_dtype(names[recipe.store_dtype])

    def batch(self, items: Sequence[Item], wanted: set[str]) -> list[CapturedSample]:
        """The wanted samples of a batch that could be captured; the others are noted as failed."""
        try:
            captured = self._states(items)
        except (RuntimeError, EyasError) as error:
            if len(items) == 1:
                self._fail(items[0].id, error)
                return []
            half = len(items) // 2  # out of memory, or one poisonous sample: find it
            return [*self.batch(items[:half], wanted), *self.batch(items[half:], wanted)]
        samples = []
        for item, states in zip(items, captured, strict=True):
            if item.id not in wanted:
                continue
            try:
                samples.append(self._checked(item, states))
            except CaptureInvalid as error:
                self._fail(item.id, error)
        return samples

    def _states(self, items: Sequence[Item]) -> list[CapturedStates]:
        return self._target.capture(
            [item.tokens.tolist() for item in items], self._recipe.aux_layers, store_dtype=self._dtype
        )

    def _checked(self, item: Item, states: CapturedStates) -> CapturedSample:
        rows = last_rows(item.spans, len(item.tokens))
        last = states.last[torch.from_numpy(rows)]
        aux = states.aux.clone()  # a copy of its own: the batch's memory is not held until the commit
        check_capture(
            aux,
            last,
            num_tokens=len(item.tokens),
            num_last_rows=len(rows),
            aux_layers=self._recipe.aux_layers,
            hidden_size=self._recipe.hidden_size,
            dtype=self._dtype,
            sample=item.id,
        )
        return item.captured(aux, last, self._recipe)

    def _fail(self, sample: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {getattr(error, 'why', None) or error}"
        ledger_failure(self._ledger, sample, reason, self._attempt)
