"""Capturing the samples that the store does not hold yet.

Batches are planned over all samples by content, so that a batch that is redone after a crash is the same
batch and gives the same bits; only its missing samples are stored.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from eyas.base.errors import CaptureInvalid, EyasError
from eyas.base.layout import Layout
from eyas.base.seal import require_seal
from eyas.base.units import counted, format_bytes, format_count, format_seconds
from eyas.config.resolve import SAFETENSORS_DTYPE
from eyas.stages.extract.continuity import check_continuity, chosen_samples
from eyas.stages.extract.groups import groups_to_capture
from eyas.stages.extract.items import MAX_TRIES, Item, ledger_failure, store_writer
from eyas.stages.extract.left import Left, find_listing
from eyas.stages.extract.pace import MEASURED_FROM_BYTES, Pace
from eyas.stages.extract.retry import wait_to_retry
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
from eyas.store.ledger_file import ledger_damaged
from eyas.store.listing import Listing
from eyas.store.place import remember_place
from eyas.store.reader import StoreReader
from eyas.store.recipe import StoreRecipe, require_store_recipe
from eyas.store.room import MEMORY_FILESYSTEMS, filesystem_kind
from eyas.store.samples import last_rows, read_samples
from eyas.store.segment import CapturedSample
from eyas.store.write_speed import measure_write_speed
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
    require_store_recipe(layout.store_recipe, recipe, {segment.recipe for segment in ledger.segments()})
    remember_place(layout, ledger)
    listing = find_listing(layout, ledger, context.progress)
    groups = groups_to_capture(project, context, listing)
    started = time.monotonic()
    imported = [sample for sample in to_recheck(layout) if ledger.state_of(sample) == "stored"]
    done, faults = Captured(), Counter[str]()
    work = (left for left in groups if imported or left.listing.is_left.any())
    first = next(work, None)
    if first is not None and served:
        faults = _through_servers(project, context, recipe, chain([first], work), imported, listing, done)
    elif first is not None:
        target = load_target(project, device, dtype, context.progress)
        source: dict[str, object] = {"kind": "local"}
        _recheck(project, context, target, recipe, imported, source)
        for left in chain([first], work):
            todo = left.listing.left()
            if not todo:
                continue
            note_source(layout, source, context.attempt)
            items = _read_items(layout, (sample for batch in left.batches() for sample in batch))
            pace = _warn_of_room(project, items, todo, context)
            done.add(ledger, items, todo, _capture_all(project, context, recipe, target, left, items, pace))
        del target
        gc.collect()
    seconds = time.monotonic() - started
    counts = ledger.counts()
    return {
        "captured": done.samples,
        "tokens": done.tokens,
        "bytes": done.num_bytes,
        "tokens_per_second": round(done.tokens / seconds, 1) if done.tokens else 0.0,
        "stored": counts["stored"].samples,
        **({"released": counts["released"].samples} if counts["released"].samples else {}),
        "set_aside": counts["set_aside"].samples,
        **({"faults": dict(sorted(faults.items()))} if faults else {}),
    }


def _through_servers(
    project: Project,
    context: RunContext,
    recipe: StoreRecipe,
    groups: Iterator[Left],
    imported: Sequence[str],
    listing: Listing,
    done: Captured,
) -> Counter[str]:
    """Capture what is left with servers, counted in ``done``; everything that went wrong by its code."""
    layout, ledger = project.layout, context.ledger
    first = next(groups)
    todo = first.listing.left()
    items = _read_items(layout, todo or imported[:1])
    canary = min(items.values(), key=lambda item: (abs(len(item.tokens) - 64), item.id))
    longest = int(listing.lengths.max())
    with capture_target(project, context, recipe, canary.tokens.tolist(), longest) as target:
        source = engines_source(project, target)
        _recheck(project, context, target, recipe, imported, source)
        for left in chain([first], groups):
            todo = left.listing.left()
            if not todo:
                continue
            items = _read_items(layout, todo)
            note_source(layout, source, context.attempt)
            _warn_of_room(project, items, todo, context)
            label, tokens = f"capture{left.name}", int(left.listing.lengths.sum(dtype=int))
            num_bytes = capture_served(project, context, recipe, target, items, tokens, label)
            done.add(ledger, items, todo, num_bytes)
        return Counter(target.faults)


@dataclass
class Captured:
    """What a run has captured so far."""

    samples: int = 0
    tokens: int = 0
    num_bytes: int = 0

    def add(self, ledger: Ledger, items: Mapping[str, Item], todo: set[str], num_bytes: int) -> None:
        """Count those of ``todo`` that are stored now."""
        stored = [name for name in todo if ledger.state_of(name) == "stored"]
        self.samples += len(stored)
        self.tokens += sum(len(items[name].tokens) for name in stored)
        self.num_bytes += num_bytes


def _read_items(layout: Layout, ids: Iterable[str]) -> dict[str, Item]:
    """These samples by id. Raises DamageFound."""
    wanted = set(ids)
    require_seal(layout.samples)
    samples = read_samples(layout.samples)
    items = {s.id: Item(s.id, s.tokens, s.spans) for s in samples if s.id in wanted}
    if missing := wanted - items.keys():
        raise ledger_damaged(layout.ledger, f"it lists {len(missing)} samples that are not in data/samples")
    return items


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


def _warn_of_room(project: Project, items: Mapping[str, Item], todo: set[str], context: RunContext) -> Pace:
    """Say before the first byte what will be written, whether it fits, and how long the disk takes for it."""
    resolved = project.resolved
    needed = 0
    places = {"project": project.layout.root, "store": project.layout.store, "target": resolved.model}
    wiped = [name for name, path in places.items() if filesystem_kind(path) in MEMORY_FILESYSTEMS]
    if wiped:
        context.progress.say(
            f"in memory, where a reboot wipes it: {', '.join(wiped)}; move that to a disk before a long run"
        )
    for item in items.values():
        if item.id in todo:
            needed += len(item.tokens) * (resolved.bytes_per_token_aux + 4)
            needed += len(last_rows(item.spans, len(item.tokens))) * resolved.bytes_per_token_last
    room = project_room(project, context.progress, context.stop).writable_bytes()
    then = "pause" if project.config.disk.when_full == "wait" else "stop"
    disk = measure_write_speed(project.layout.segments) if MEASURED_FROM_BYTES < needed < room else None
    speed = ""
    if disk is not None:
        speed = f"; the disk took {format_bytes(disk)}/s: {format_seconds(needed / disk)} of writing at least"
    verdict = "" if needed < room else f": it will not fit; the run will {then} when the disk is full"
    context.progress.say(
        f"forecast: {format_bytes(needed)} for {counted(len(todo), 'sample')}, "
        f"{format_bytes(max(0, room))} may be written{speed}{verdict}"
    )
    return Pace(disk, needed, context.progress)


def _capture_all(
    project: Project,
    context: RunContext,
    recipe: StoreRecipe,
    target: LocalTarget,
    left: Left,
    items: Mapping[str, Item],
    pace: Pace,
) -> int:
    config, ledger = project.config, context.ledger
    batches, todo = left.batches(), left.listing.left()
    context.progress.say(
        f"{counted(len(left.plan), 'batch', 'batches')} of up to "
        f"{format_count(config.extract.batch_tokens)} tokens, "
        f"{100 * left.plan.padding_share(left.listing.lengths):.1f}% padding"
    )
    total_tokens = int(left.listing.lengths.sum(dtype=int))
    tokens_left = sum(len(items[sample].tokens) for sample in todo)
    label = f"capture{left.name}"
    context.progress.start(label, total=total_tokens, unit="tokens", done=total_tokens - tokens_left)
    num_bytes, room = 0, project_room(project, context.progress, context.stop)
    with store_writer(project, ledger, recipe) as writer:
        capture = _Capture(target, recipe, ledger, context.attempt)
        for num_tried in range(MAX_TRIES):
            if num_tried:
                wait_to_retry(ledger, num_tried, config.extract.retry_seconds, context.progress, context.stop)
            for batch in batches:
                wanted = todo.intersection(batch)
                if not wanted:
                    continue
                if context.stop.requested:
                    writer.flush()
                    context.stop.check()
                ledger.lease(wanted, context.attempt)
                num_tokens = 0
                started = time.monotonic()
                captured = capture.batch([items[name] for name in batch], wanted)
                pace.note(time.monotonic() - started, sum(sample.nbytes for sample in captured))
                for sample in captured:
                    room.require(sample.nbytes + (config.store.segment_mib << 20))
                    room.patiently(partial(writer.add, sample), sample.nbytes)
                    num_bytes += sample.nbytes
                    num_tokens += len(sample.tokens)
                context.progress.advance(num_tokens, bytes=num_bytes)
            room.patiently(writer.flush, 0)
            todo = items.keys() & set(ledger.pending())
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
