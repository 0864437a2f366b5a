"""How many bytes a run will take, before the first is written."""

from __future__ import annotations

import contextlib
import math
import shutil
from dataclasses import asdict, dataclass
from typing import Any

from eyas.base.errors import EyasError
from eyas.base.files import read_json, tree_bytes
from eyas.base.seal import is_sealed, read_seal
from eyas.base.units import counted, format_bytes, format_count, parse_bytes
from eyas.stages.project import Project
from eyas.stages.waves import wave_rule
from eyas.store.ledger import Ledger
from eyas.store.wave_record import read_waves, waves_over
from eyas.store.waves import AT_ONCE, SAMPLE_OVERHEAD_BYTES, STORE_OVERHEAD_BYTES, plan_waves

WEIGHT_COPIES = 3
"""A checkpoint holds the weights and both of AdamW's averages."""
BYTES_PER_WEIGHT = 4
TOKEN_BYTES = 4


@dataclass(frozen=True)
class WavesForecast:
    """What a bound on the store comes to.

    Attributes:
        exact: planned from the samples; otherwise an estimate from their counts.
        count: waves.
        captures: samples captured in all, the same one in several epochs counted again.
        at_once_bytes: the most that the store holds at any time.
    """

    exact: bool
    max_bytes: int
    count: int
    captures: int
    at_once_bytes: int


@dataclass(frozen=True)
class Forecast:
    """Bytes that a project will take.

    Attributes:
        basis: ``counted`` from the samples, or ``expected`` from the configuration.
        raw_bytes: aux and last states of every token.
        store_bytes: the same with last states only where the next token is supervised.
        checkpoint_bytes: all kept checkpoints and the one being written.
        left_bytes: of store and checkpoints, what is not written yet; with a bound, how much they still grow.
        room_bytes: what may still be written; samples_that_fit counts whole samples of average size.
        waves: how the store with a bound holds them one after the other.
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
    waves: WavesForecast | None = None

    @property
    def fits(self) -> bool:
        return self.left_bytes <= self.room_bytes

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def forecast(project: Project, used_bytes: int | None = None, *, exact: bool = False) -> Forecast | None:
    """The forecast of a project; None while neither counts nor expectations are known.

    Args:
        used_bytes: bytes of the project folder, when they are counted already.
        exact: plan the waves of a store with a bound from the samples themselves, which reads them.

    Raises:
        TargetError: the target's configuration cannot be read.
        ConfigError: the bound on the store is too small for the data.
    """
    known = _counts(project)
    if known is None:
        return None
    basis, samples, tokens, supervised = known
    resolved, layout = project.resolved, project.layout
    raw = tokens * resolved.bytes_per_token_full
    store = tokens * (resolved.bytes_per_token_aux + TOKEN_BYTES) + supervised * resolved.bytes_per_token_last
    weights = drafter_weights(project)
    checkpoint = weights * BYTES_PER_WEIGHT * WEIGHT_COPIES
    checkpoints = checkpoint * (project.config.train.keep_checkpoints + 2)
    export = weights * 2
    stored = tree_bytes(layout.store)
    written = tree_bytes(layout.checkpoints) + tree_bytes(layout.exports)
    waves = _waves(project, samples, store, exact)
    if waves is None:
        written += stored
        left = max(0, store + checkpoints + export - written)
    else:
        grows = min(_to_capture(project, store, tokens), max(0, waves.at_once_bytes - stored))
        left = grows + max(0, checkpoints + export - written)
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
        waves=waves,
    )


def _waves(project: Project, samples: int, store: int, exact: bool) -> WavesForecast | None:
    """What the bound comes to; None without one."""
    rule, layout = wave_rule(project), project.layout
    if rule is None:
        return None
    record = read_waves(layout)
    if exact and is_sealed(layout.samples):
        from eyas.store.samples import iter_sample_index  # numpy is loaded only when it is needed

        plan = plan_waves(iter_sample_index(layout.samples), rule)
        return WavesForecast(True, rule.max_bytes, len(plan), plan.num_captures, plan.most_bytes)
    total = store + samples * SAMPLE_OVERHEAD_BYTES
    at_once = min(total + STORE_OVERHEAD_BYTES, rule.max_bytes)
    if record is not None and record.rule == rule:
        return WavesForecast(True, rule.max_bytes, record.num_waves, record.num_captures, at_once)
    kept = project.config.data.validation
    room = max(1, rule.max_bytes - STORE_OVERHEAD_BYTES - round(total * kept))
    train = round(total * (1 - kept))
    count = 1 if train <= room else math.ceil(train / (room // AT_ONCE or 1))
    passes = rule.epochs if rule.recapture and count > 1 else 1
    count = math.ceil(count * passes)
    captures = round(samples * (kept + (1 - kept) * passes))
    return WavesForecast(False, rule.max_bytes, count, captures, at_once)


def _to_capture(project: Project, store: int, tokens: int) -> int:
    """About the bytes that are still to be captured, now or for later epochs."""
    record = read_waves(project.layout)
    if project.config.store.recapture and record is not None:
        return store if waves_over(project.layout, record.digest) < record.num_waves else 0
    with contextlib.suppress(Exception), Ledger.open_read_only(project.layout.ledger) as ledger:
        counts = ledger.counts()
        left = sum(counts[state].tokens for state in ("pending", "in_flight", "failed"))
        if sum(count.samples for count in counts.values()):
            return round(store * left / max(1, tokens))
    return store


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
    saved, waves = found.raw_bytes - found.store_bytes, found.waves
    verdict = (
        "it fits" if found.fits else f"it does not fit: {format_count(found.samples_that_fit)} samples do"
    )
    if waves is not None and not found.fits:
        verdict = "it does not fit: lower store.max_bytes or free space"
    about = "" if waves is None or waves.exact else "about "
    bounded = (
        []
        if waves is None
        else [
            f"waves: {about}{counted(waves.count, 'wave')}, {about}{format_count(waves.captures)} captures; "
            f"the store holds at most {format_bytes(waves.at_once_bytes)} at once (store.max_bytes is "
            f"{format_bytes(waves.max_bytes)})"
        ]
    )
    return [
        f"data ({found.basis}): {format_count(found.samples)} samples, {format_count(found.tokens)} tokens, "
        f"{format_count(found.supervised_tokens)} of them supervised",
        f"store: {found.bytes_per_token:,} bytes a token raw, {format_bytes(found.raw_bytes)} in all; "
        f"last states only where the next token is supervised: {format_bytes(found.store_bytes)} "
        f"(saves {format_bytes(saved)})",
        *bounded,
        f"drafter: {format_bytes(found.checkpoint_bytes)} of checkpoints, "
        f"{format_bytes(found.export_bytes)} exported",
        f"room: {format_bytes(found.left_bytes)} still to write, {format_bytes(found.room_bytes)} may be: "
        f"{verdict}",
    ]
