"""How many bytes a run will take, before the first is written."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import asdict, dataclass
from typing import Any

from eyas.base.errors import EyasError
from eyas.base.files import read_json, tree_bytes
from eyas.base.seal import is_sealed, read_seal
from eyas.base.units import format_bytes, format_count, parse_bytes
from eyas.stages.project import Project
from eyas.store.ledger import Ledger

WEIGHT_COPIES = 3
"""A checkpoint holds the weights and both of AdamW's averages."""
BYTES_PER_WEIGHT = 4
TOKEN_BYTES = 4


@dataclass(frozen=True)
class Forecast:
    """Bytes that a project will take.

    Attributes:
        basis: ``counted`` from the samples, or ``expected`` from the configuration.
        raw_bytes: aux and last states of every token.
        store_bytes: the same with last states only where the next token is supervised.
        checkpoint_bytes: all kept checkpoints and the one being written.
        left_bytes: of store and checkpoints, what is not written yet.
        room_bytes: what may still be written; samples_that_fit counts whole samples of average size.
    """

    basis: str
    samples: int
    tokens: int
    supervised_tokens: int
    bytes_per_token: int
    raw_bytes: int
    store_bytes: int
    checkpoint_bytes: int
    export_bytes: int
    left_bytes: int
    room_bytes: int
    samples_that_fit: int

    @property
    def fits(self) -> bool:
        return self.left_bytes <= self.room_bytes

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def forecast(project: Project, used_bytes: int | None = None) -> Forecast | None:
    """The forecast of a project; None while neither counts nor expectations are known.

    Args:
        used_bytes: bytes of the project folder, when they are counted already.

    Raises:
        TargetError: the target's configuration cannot be read.
    """
    counted = _counts(project)
    if counted is None:
        return None
    basis, samples, tokens, supervised = counted
    resolved, layout = project.resolved, project.layout
    raw = tokens * resolved.bytes_per_token_full
    store = tokens * (resolved.bytes_per_token_aux + TOKEN_BYTES) + supervised * resolved.bytes_per_token_last
    weights = drafter_weights(project)
    checkpoint = weights * BYTES_PER_WEIGHT * WEIGHT_COPIES
    checkpoints = checkpoint * (project.config.train.keep_checkpoints + 2)
    export = weights * 2
    written = tree_bytes(layout.store) + tree_bytes(layout.checkpoints) + tree_bytes(layout.exports)
    left = max(0, store + checkpoints + export - written)
    room = _room(project, used_bytes)
    per_sample = store / samples
    return Forecast(
        basis=basis,
        samples=samples,
        tokens=tokens,
        supervised_tokens=supervised,
        bytes_per_token=resolved.bytes_per_token_full,
        raw_bytes=raw,
        store_bytes=store,
        checkpoint_bytes=checkpoints,
        export_bytes=export,
        left_bytes=left,
        room_bytes=room,
        samples_that_fit=max(0, int((room + written - checkpoints - export) / per_sample)),
    )


def drafter_weights(project: Project) -> int:
    """Trained parameters of the drafter."""
    resolved, hidden = project.resolved, project.resolved.facts.hidden_size
    heads = resolved.num_heads * resolved.head_dim
    key_value = resolved.num_kv_heads * resolved.head_dim
    attention = 2 * hidden * (heads + 2 * key_value) + heads * hidden
    mlp = 3 * hidden * resolved.intermediate_size
    fc = len(resolved.aux_layers) * hidden * hidden
    return attention + mlp + fc + _draft_vocabulary(project) * hidden + 4 * hidden


def _draft_vocabulary(project: Project) -> int:
    """Tokens that the drafter can propose: at most so many, until training has chosen them."""
    limit = project.resolved.draft_vocab_limit
    with contextlib.suppress(EyasError, KeyError, TypeError, ValueError):
        return min(limit, int(read_seal(project.layout.vocabulary)["about"]["size"]))
    return limit


def _counts(project: Project) -> tuple[str, int, int, int] | None:
    """Basis, samples, tokens and supervised tokens."""
    layout, expected = project.layout, project.config.expect
    if is_sealed(layout.samples):
        about = read_seal(layout.samples)["about"]
        if "num_supervised" in about:
            return "counted", about["num_samples"], about["num_tokens"], about["num_supervised"]
        with contextlib.suppress(Exception):  # samples that were given: prepare counted them
            stats = read_json(layout.samples / "stats.json")
            num_samples = sum(stats["samples"].values())
            if num_samples and stats["tokens"]:
                return "counted", num_samples, stats["tokens"], stats["supervised_tokens"]
        with contextlib.suppress(Exception), Ledger.open_read_only(layout.ledger) as ledger:
            entries = list(ledger.entries())
            if entries:
                tokens, supervised = sum(e.length for e in entries), sum(e.num_supervised for e in entries)
                return "counted", len(entries), tokens, supervised
    if expected is None:
        return None
    return "expected", expected.samples, expected.tokens, round(expected.tokens * expected.supervised_share)


def _room(project: Project, used_bytes: int | None) -> int:
    """Bytes that may still be written: by the budget, else by the filesystem."""
    disk, root = project.config.disk, project.layout.root
    if disk.budget is not None:
        return max(0, parse_bytes(disk.budget) - (tree_bytes(root) if used_bytes is None else used_bytes))
    return max(0, shutil.disk_usage(root).free - parse_bytes(disk.reserve))


def forecast_lines(found: Forecast) -> list[str]:
    """The forecast for people."""
    saved = found.raw_bytes - found.store_bytes
    verdict = (
        "it fits" if found.fits else f"it does not fit: {format_count(found.samples_that_fit)} samples do"
    )
    return [
        f"data ({found.basis}): {format_count(found.samples)} samples, {format_count(found.tokens)} tokens, "
        f"{format_count(found.supervised_tokens)} of them supervised",
        f"store: {found.bytes_per_token:,} bytes a token raw, {format_bytes(found.raw_bytes)} in all; "
        f"last states only where the next token is supervised: {format_bytes(found.store_bytes)} "
        f"(saves {format_bytes(saved)})",
        f"drafter: {format_bytes(found.checkpoint_bytes)} of checkpoints, "
        f"{format_bytes(found.export_bytes)} exported",
        f"room: {format_bytes(found.left_bytes)} still to write, {format_bytes(found.room_bytes)} may be: "
        f"{verdict}",
    ]
