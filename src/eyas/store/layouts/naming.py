"""Which files of a folder belong to a layout, and what a sample's tensors are called in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from eyas.base.errors import DataError
from eyas.store.layouts.record import mask_of_spans
from eyas.store.layouts.tensor_file import Array, FileTensor
from eyas.store.samples import last_rows
from eyas.store.segment import CapturedSample

LayoutName = Literal["rows", "speculators", "safetensors"]
LAYOUT_NAMES: tuple[LayoutName, ...] = ("rows", "speculators", "safetensors")
DEFAULT_LAST: dict[str, Literal["pre_norm", "post_norm"]] = {
    "rows": "post_norm",
    "speculators": "pre_norm",
    "safetensors": "post_norm",
}
"""Which last state each layout's own tool keeps: before the target's final norm or after it."""

_PICKLES = (".pt", ".pth", ".ckpt")
_ROWS_A_FOLDER = 2000


def layout_of(path: Path) -> LayoutName | None:
    """The layout that a file's name belongs to; None for any other file."""
    if path.suffix in _PICKLES:
        return "rows"
    if path.suffix != ".safetensors":
        return None
    return "speculators" if path.name.startswith("hs_") else "safetensors"


def find_files(folder: Path, wanted: str) -> tuple[LayoutName, list[Path]]:
    """The files of a layout below ``folder``, in the order of their numbers.

    Args:
        wanted: a layout, or ``auto`` for the only one that is there.

    Raises:
        DataError: there are none, or ``auto`` finds several layouts.
    """
    found: dict[LayoutName, list[Path]] = {}
    for path in _walk(folder):
        if (name := layout_of(path)) is not None:
            found.setdefault(name, []).append(path)
    if wanted == "auto" and len(found) > 1:
        counts = ", ".join(f"{len(paths)} of {name}" for name, paths in sorted(found.items()))
        raise DataError(
            "files of several layouts lie there", where=folder, why=counts, hint="say which with --layout"
        )
    chosen = next(iter(found), None) if wanted == "auto" else next(n for n in LAYOUT_NAMES if n == wanted)
    if chosen is None or chosen not in found:
        raise DataError(
            "no files of states lie there",
            where=folder,
            why="looked for .pt, .pth and .ckpt, hs_N.safetensors, and other .safetensors",
        )
    return chosen, sorted(found[chosen], key=_natural)


def _walk(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise DataError("there is no such folder", where=folder)
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            yield path


def _natural(path: Path) -> tuple[list[tuple[int, str]], str]:
    """Runs of digits by value: ``data_9`` before ``data_10``."""
    words: list[tuple[int, str]] = []
    digits = ""
    for sign in f"{path} ":
        if sign.isdigit():
            digits += sign
            continue
        if digits:
            words.append((int(digits), ""))
            digits = ""
        words.append((-1, sign))
    return words, str(path)


def file_name(layout: LayoutName, number: int, sample: str) -> str:
    """Where the ``number``-th exported sample goes, relative to the folder."""
    if layout == "rows":
        first = number // _ROWS_A_FOLDER * _ROWS_A_FOLDER
        return f"rows_{first}-{first + _ROWS_A_FOLDER}/data_{number}.ckpt"
    return f"hs_{number}.safetensors" if layout == "speculators" else f"{sample}.safetensors"


def file_content(layout: LayoutName, sample: CapturedSample) -> dict[str, FileTensor]:
    """A sample's tensors under the names and shapes of a layout.

    Where the layout has a last state for every token, rows that the store does not keep are zero.
    """
    dtype, length = sample.aux.dtype, len(sample.tokens)
    if layout == "safetensors":
        return {
            "tokens": FileTensor("I32", sample.tokens),
            "spans": FileTensor("I32", np.array(sample.spans, dtype="<i4").reshape(-1, 2)),
            "aux": FileTensor(dtype, sample.aux.array),
            "last": FileTensor(dtype, sample.last.array),
        }
    tokens = FileTensor("I64", sample.tokens.astype("<i8"))
    mask = FileTensor("I64", mask_of_spans(sample.spans, length))
    last = _every_row(sample)
    if layout == "speculators":
        states = np.concatenate([sample.aux.array, last[:, None]], axis=1)
        return {"token_ids": tokens, "loss_mask": mask, "hidden_states": FileTensor(dtype, states)}
    return {
        "input_ids": tokens,
        "loss_mask": mask,
        "hidden_state": FileTensor(dtype, last[None]),
        "aux_hidden_state": FileTensor(dtype, sample.aux.array.reshape(1, length, -1)),
    }


def _every_row(sample: CapturedSample) -> Array:
    """Last states ``[T, H]``."""
    rows = np.zeros((len(sample.tokens), sample.last.shape[1]), dtype=sample.last.array.dtype)
    rows[last_rows(sample.spans, len(sample.tokens))] = sample.last.array
    return rows
