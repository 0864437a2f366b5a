"""Stored samples as files of an older layout, for tools that read those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from eyas.base.errors import DataError
from eyas.base.files import write_atomic
from eyas.base.progress import Progress
from eyas.base.stop import StopFlag
from eyas.stages.exchange.norm import FinalNorm
from eyas.stages.exchange.pickles import write_pickle
from eyas.stages.project import Project
from eyas.store.layouts.naming import LayoutName, file_content, file_name
from eyas.store.layouts.tensor_file import write_tensor_file
from eyas.store.ledger import Ledger
from eyas.store.reader import StoreReader
from eyas.store.recipe import read_store_recipe
from eyas.store.segment import CapturedSample

INDEX_NAME = "index.jsonl"


def export_store(
    project: Project,
    folder: Path,
    *,
    layout: LayoutName,
    last: Literal["pre_norm", "post_norm"],
    split: str | None,
    progress: Progress,
    stop: StopFlag,
) -> int:
    """Write every stored sample, each checked against its hash; returns how many.

    ``index.jsonl`` is written last: a folder without it is unfinished. It names each file's sample and spans.

    Args:
        folder: made; refused when something lies in it.
        last: ``pre_norm`` writes states that the target's norm maps to the stored ones.

    Raises:
        DataError: the folder is not empty, or nothing is stored.
        SegmentDamaged: a stored sample is not what was written.
        OSError: a file could not be written; the folder has no index.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError("something lies there already", where=folder, hint="name a new folder")
    place = project.layout
    norm = FinalNorm(project) if last == "pre_norm" else None
    with Ledger.open_read_only(place.ledger) as ledger:
        reader = StoreReader(place.segments, ledger, split=split)
    ids = reader.ids()
    if not ids:
        raise DataError("nothing is stored", where=place.store, hint="eyas extract")
    recipe = read_store_recipe(place.store_recipe)
    metadata = {"format": "eyas-sample", "recipe": recipe.hash, "last": last}
    progress.start("export", total=len(ids), unit="samples")
    lines = []
    for number, id_ in enumerate(ids):
        stop.check()
        sample = reader.sample(id_, check=True)
        if norm is not None and sample.last.shape[0]:
            undone = norm.undo(sample.last)
            sample = CapturedSample(sample.id, sample.tokens, sample.spans, sample.aux, undone)
        name = file_name(layout, number, id_)
        content = file_content(layout, sample)
        if layout == "rows":
            write_pickle(folder / name, content)
        else:
            write_tensor_file(folder / name, content, {**metadata, "id": id_})
        lines.append(json.dumps({"file": name, "id": id_, "spans": sample.spans, "last": last}))
        progress.advance(1)
    write_atomic(folder / INDEX_NAME, "".join(line + "\n" for line in lines))
    return len(ids)
