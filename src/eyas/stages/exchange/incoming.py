"""Older files into the store: every tensor checked, identity by tokens, the recipe stated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from eyas.base.clock import utc_now_text
from eyas.base.errors import EyasError
from eyas.base.layout import Layout
from eyas.base.progress import Progress
from eyas.base.seal import is_sealed
from eyas.base.stop import StopFlag
from eyas.base.storage import named_storage_errors
from eyas.config.resolve import SAFETENSORS_DTYPE
from eyas.stages.exchange.norm import FinalNorm
from eyas.stages.exchange.pickles import CodeRefused, read_pickle
from eyas.stages.project import Project
from eyas.stages.records import recorded_capture_recipe
from eyas.stages.room import project_room
from eyas.stages.stored_states import to_torch
from eyas.store.imports import NUM_RECHECKED, write_import
from eyas.store.layouts.naming import LayoutName, find_files
from eyas.store.layouts.record import OlderSample, hole_in, older_sample
from eyas.store.layouts.tensor_file import Array, read_tensor_file
from eyas.store.ledger import Ledger
from eyas.store.listing import list_samples
from eyas.store.place import remember_place, require_place
from eyas.store.recipe import StoreRecipe, require_store_recipe
from eyas.store.samples import last_rows, read_samples, sample_id
from eyas.store.segment import CapturedSample
from eyas.store.tensors import StoredTensor
from eyas.store.writer import StoreWriter
from eyas.targets.check import check_capture
from eyas.targets.dtype import torch_dtype
from eyas.targets.fingerprint import weights_fingerprint

Spans = tuple[tuple[int, int], ...]
LeftKind = Literal["damaged", "refused", "unmatched"]


@dataclass(frozen=True)
class LeftAlone:
    """A file that was not taken, and why; it stays as it is."""

    path: Path
    kind: LeftKind
    why: str


@dataclass
class Imported:
    """What an import did.

    Args:
        num_stored: samples that are stored now and were not before.
        num_known: samples that the store held already.
    """

    layout: LayoutName
    num_files: int
    recipe: StoreRecipe
    num_stored: int = 0
    num_known: int = 0
    num_tokens: int = 0
    left: list[LeftAlone] = field(default_factory=list)


def import_recipe(project: Project, fingerprint: str | None, computed_in: str | None) -> StoreRecipe:
    """The recipe that imported states are taken to have been captured with.

    What is not given comes from the store's own recipe, then from the project's target.

    Raises:
        TargetError: the target's weights are not there, and no fingerprint was given.
    """
    resolved, recorded = project.resolved, recorded_capture_recipe(project) or {}
    fingerprint = fingerprint or str(recorded.get("target_fingerprint", ""))
    if not fingerprint:
        fingerprint = weights_fingerprint(resolved.model, project.fingerprint_cache).hash
    wanted = project.config.target.dtype
    told = wanted if wanted != "auto" else project.config.store.dtype
    return StoreRecipe(
        target_fingerprint=fingerprint,
        aux_layers=resolved.aux_layers,
        hidden_size=resolved.facts.hidden_size,
        compute_dtype=computed_in or str(recorded.get("compute_dtype", told)),
        store_dtype=SAFETENSORS_DTYPE[project.config.store.dtype],
    )


def import_store(
    project: Project,
    folder: Path,
    *,
    layout: str,
    last: Literal["pre_norm", "post_norm"],
    recipe: StoreRecipe,
    ledger: Ledger | None,
    progress: Progress,
    stop: StopFlag,
) -> Imported:
    """Take in what fits; may be cut off anywhere and called again.

    Args:
        last: which last state the files hold; one from before the final norm is passed through it.
        ledger: open for writing, with the lock held; None only looks.

    Raises:
        RecipeChanged: the store was captured with another recipe.
        DataError: there is nothing to import.
        StoreNotMounted: the store's disk is not there.
        DiskFull: there is no room and nobody wants to wait; what is committed stays.
        Stopped: a signal came; what is committed stays.
    """
    place = project.layout
    name, files = find_files(folder, layout)
    result = Imported(name, len(files), recipe)
    if ledger is not None:
        moved = require_place(place, ledger)
        if moved is None:
            remember_place(place, ledger)
        else:
            progress.say(f"{moved}: the next run hashes every segment")
        require_store_recipe(place.store_recipe, recipe, {segment.recipe for segment in ledger.segments()})
    reader = _Reader(name, recipe, _Matches(place), FinalNorm(project) if last == "pre_norm" else None)
    progress.start("import", total=len(files), unit="files")
    if ledger is None:
        for path in files:
            stop.check()
            _take(reader, path, result, progress)
        return result
    record = _Record(place, folder, name, last, recipe)
    store, room = project.config.store, project_room(project, progress, stop)
    with StoreWriter(
        place.segments, ledger, recipe.hash, store.segment_mib << 20, store.segment_seconds
    ) as writer:
        for path in files:
            if stop.requested:
                writer.flush()
                stop.check()
            for sample in _take(reader, path, result, progress):
                if ledger.state_of(sample.id) == "stored":
                    result.num_known += 1
                    continue
                room.require(sample.nbytes + (store.segment_mib << 20))
                room.patiently(partial(record.note, sample.id), 0)
                if room.patiently(partial(writer.add, sample), sample.nbytes):
                    result.num_stored += 1
                    result.num_tokens += len(sample.tokens)
        room.patiently(writer.flush, 0)
    room.patiently(partial(record.finish, result.num_stored), 0)
    if is_sealed(place.samples):
        list_samples(place, ledger)  # so that status counts them before the next capture
    ledger.event("imported", {"folder": str(folder), "layout": name, "samples": result.num_stored})
    return result


def _take(reader: _Reader, path: Path, result: Imported, progress: Progress) -> list[CapturedSample]:
    samples: list[CapturedSample] = []
    try:
        samples = reader.samples(path)
        if not samples:
            result.left.append(LeftAlone(path, "unmatched", reader.why_unmatched))
    except CodeRefused as error:
        result.left.append(LeftAlone(path, "refused", error.why or error.what))
    except (EyasError, ValueError, OSError) as error:
        why = (error.why or error.what) if isinstance(error, EyasError) else str(error)
        result.left.append(LeftAlone(path, "damaged", why))
    progress.advance(1, left=len(result.left))
    return samples


def _token_digest(tokens: Array) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(tokens, dtype="<i4").tobytes())


class _Matches:
    """Samples of data/samples by their tokens."""

    def __init__(self, place: Layout) -> None:
        self.listed = is_sealed(place.samples)
        self._spans: dict[bytes, list[Spans]] = {}
        if self.listed:
            for sample in read_samples(place.samples):
                self._spans.setdefault(_token_digest(sample.tokens), []).append(sample.spans)

    def spans(self, found: OlderSample) -> Sequence[Spans]:
        """The spans of every sample with these tokens; without data/samples, those of the file itself."""
        if self.listed:
            return self._spans.get(_token_digest(found.tokens), [])
        return [found.spans] if found.spans else []


class _Reader:
    """Reads a file and proves what it holds."""

    def __init__(
        self, layout: LayoutName, recipe: StoreRecipe, matches: _Matches, norm: FinalNorm | None
    ) -> None:
        self._layout, self._recipe, self._matches, self._norm = layout, recipe, matches, norm
        names = {value: key for key, value in SAFETENSORS_DTYPE.items()}
        self._dtype = torch_dtype(names[recipe.store_dtype])
        self._zero_slots = [slot for slot, layer in enumerate(recipe.aux_layers) if layer == 0]
        self.why_unmatched = (
            "no sample of data/samples has these tokens"
            if matches.listed
            else "it does not say which tokens are supervised: run eyas prepare first"
        )

    def samples(self, path: Path) -> list[CapturedSample]:
        """The samples that this file holds the states of; empty when it belongs to none.

        Raises:
            DataError, CaptureInvalid, ValueError, OSError: the file is not fit.
        """
        content = read_pickle(path) if self._layout == "rows" else read_tensor_file(path)[0]
        found = older_sample(content, len(self._recipe.aux_layers), self._recipe.hidden_size)
        if found.aux.dtype != self._recipe.store_dtype:
            raise ValueError(f"its states are {found.aux.dtype}, the store's are {self._recipe.store_dtype}")
        if hole := hole_in(found.aux, self._zero_slots):
            raise ValueError(f"aux states, {hole}")
        return list(self._captured(found))

    def _captured(self, found: OlderSample) -> Iterator[CapturedSample]:
        for spans in self._matches.spans(found):
            last = self._last(found, spans)
            sample = CapturedSample(sample_id(found.tokens, spans), found.tokens, spans, found.aux, last)
            if hole := hole_in(last):
                raise ValueError(f"last states, {hole}")
            check_capture(
                to_torch(_contiguous(found.aux)),
                to_torch(last),
                num_tokens=len(found.tokens),
                num_last_rows=len(last_rows(spans, len(found.tokens))),
                aux_layers=self._recipe.aux_layers,
                hidden_size=self._recipe.hidden_size,
                dtype=self._dtype,
                sample=sample.id,
            )
            sample.check()
            yield sample

    def _last(self, found: OlderSample, spans: Spans) -> StoredTensor:
        """Last states of the rows that are kept for ``spans``, after the final norm."""
        rows = last_rows(spans, len(found.tokens))
        last = found.last
        if last.shape[0] == len(found.tokens):
            last = StoredTensor(last.dtype, last.array[rows])
        elif found.spans != spans:
            raise ValueError("it keeps last states for other spans than those of data/samples")
        if self._norm is not None and last.shape[0]:
            last = self._norm.apply(_contiguous(last))
        return _contiguous(last)


def _contiguous(tensor: StoredTensor) -> StoredTensor:
    return StoredTensor(tensor.dtype, np.ascontiguousarray(tensor.array))


class _Record:
    """Notes the import in the store before the first of its samples is."""

    def __init__(self, place: Layout, folder: Path, layout: str, last: str, recipe: StoreRecipe) -> None:
        self._place = place
        self._chosen: list[str] = []
        self._entry: dict[str, object] = {
            "at": utc_now_text(),
            "folder": str(folder),
            "layout": layout,
            "last": last,
            "recipe": recipe.as_dict(),
            "samples": None,
            "recheck": [],
            "rechecked_at": None,
        }

    def note(self, sample: str) -> None:
        """Choose the samples with the lowest ids, which are hashes; written down before they are stored."""
        chosen = sorted({*self._chosen, sample})[:NUM_RECHECKED]
        if chosen != self._chosen:
            self._write({"recheck": chosen})
            self._chosen = chosen

    def finish(self, num_samples: int) -> None:
        if num_samples:
            self._write({"recheck": self._chosen, "samples": num_samples})

    def _write(self, fields: dict[str, object]) -> None:
        with named_storage_errors(self._place.store):
            write_import(self._place, {**self._entry, **fields})
