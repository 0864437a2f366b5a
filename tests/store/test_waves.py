"""Waves: planned from content and sizes alone, within their bound, each sample as often as it should be."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.base.errors import ConfigError
from eyas.base.layout import Layout
from eyas.store.commit import write_segment
from eyas.store.entry import SampleEntry
from eyas.store.segment import encode_segment
from eyas.store.segment_header import segment_name
from eyas.store.wave_record import WaveRecord, read_waves, waves_path, write_waves
from eyas.store.waves import (
    AT_ONCE,
    SAMPLE_OVERHEAD_BYTES,
    STORE_OVERHEAD_BYTES,
    WavePlan,
    WaveRule,
    plan_waves,
)
from tests.store.making import captured

RULE = WaveRule(
    max_bytes=STORE_OVERHEAD_BYTES + 200_000,
    least_bytes=20_000,
    token_bytes=100,
    row_bytes=40,
    epochs=3.0,
    recapture=False,
    seed=0,
)


def entries_of(lengths: list[int], num_kept: int = 0) -> list[SampleEntry]:
    return [
        SampleEntry(f"{i:032x}", length, length // 2, "validation" if i < num_kept else "train", "x")
        for i, length in enumerate(lengths)
    ]


def bytes_of(entry: SampleEntry) -> int:
    return entry.length * 100 + entry.num_supervised * 40 + SAMPLE_OVERHEAD_BYTES


lengths_ = st.lists(st.integers(2, 60), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(lengths_, st.integers(0, 4), st.sampled_from([0.5, 1.0, 1.5, 3.0]), st.booleans(), st.integers(0, 9))
def test_each_sample_is_in_the_waves_that_it_should_be_in(
    lengths: list[int], num_kept: int, epochs: float, recapture: bool, seed: int
) -> None:
    entries = entries_of(lengths, num_kept)
    rule = replace(RULE, epochs=epochs, recapture=recapture, seed=seed)
    plan = plan_waves(entries, rule)
    trained = {e.id: e for e in entries if e.split == "train"}
    assert set(plan.kept) == {e.id for e in entries} - trained.keys()
    room = rule.max_bytes - STORE_OVERHEAD_BYTES - sum(bytes_of(e) for e in entries if e.id in plan.kept)
    counts: Counter[tuple[str, int]] = Counter()
    for number, wave in enumerate(plan.waves):
        assert wave.number == number
        assert wave.ids
        assert wave.num_bytes == sum(bytes_of(trained[name]) for name in wave.ids)
        assert len(plan) == 1 or wave.num_bytes <= room // AT_ONCE
        counts.update((name, epoch) for name in wave.ids for epoch, _ in wave.passes)
    assert set(counts.values()) <= {1}, "no sample twice in an epoch"
    for epoch in range(int(epochs)):
        assert {name for name, e in counts if e == epoch} == trained.keys()
    shares = {share for wave in plan.waves for epoch, share in wave.passes if epoch == int(epochs)}
    if epochs % 1 and len(plan) > 1 and (recapture or epochs < 1):
        assert shares == {1.0}, "the last epoch's samples are chosen, not the last part of each wave"
        last = sum(trained[name].length for name, e in counts if e == int(epochs))
        wanted = (epochs % 1) * sum(e.length for e in trained.values())
        assert wanted <= last < wanted + 60
    for position in range(len(plan) + 1):
        here = [plan.waves[n].num_bytes for n in plan.on_disk(position)]
        assert plan.kept_bytes + sum(here) + STORE_OVERHEAD_BYTES <= rule.max_bytes
        assert plan.most_bytes <= rule.max_bytes


@settings(max_examples=60, deadline=None)
@given(lengths_, st.booleans(), st.integers(0, 9))
def test_the_plan_is_a_function_of_content_and_seed(lengths: list[int], recapture: bool, seed: int) -> None:
    entries = entries_of(lengths, 2)
    rule = replace(RULE, recapture=recapture)
    plan = plan_waves(entries, rule)
    shuffled = random.Random(seed).sample(entries, len(entries))
    assert plan_waves(shuffled, rule) == plan
    assert plan_waves(shuffled, rule).digest == plan.digest


def test_another_seed_mixes_otherwise() -> None:
    entries = entries_of([50] * 60)
    first, second = (plan_waves(entries, replace(RULE, seed=seed)) for seed in (0, 1))
    assert len(first) > 2
    assert first.digest != second.digest
    assert set(first.waves[0].ids) != set(second.waves[0].ids)


def test_waves_are_as_few_and_as_even_as_they_can_be() -> None:
    entries = entries_of([50] * 60)
    plan = plan_waves(entries, RULE)
    sizes = [len(wave.ids) for wave in plan.waves]
    fit = (RULE.max_bytes - STORE_OVERHEAD_BYTES) // AT_ONCE // bytes_of(entries[0])
    assert len(plan) == -(-60 // fit)
    assert max(sizes) - min(sizes) <= 1


def test_a_bound_that_holds_everything_releases_nothing() -> None:
    plan = plan_waves(entries_of([50] * 10), replace(RULE, recapture=True))
    assert len(plan) == 1
    assert plan.waves[0].passes == ((0, 1.0), (1, 1.0), (2, 1.0))
    assert plan.over(1) == set()
    assert plan.on_disk(0) == plan.on_disk(1) == [0]


def over_by_hand(plan: WavePlan, position: int) -> set[str]:
    """What is not needed any more, wave by wave."""
    everything = {name for wave in plan.waves for name in wave.ids}
    epoch = plan.waves[position].passes[0][0] if position < len(plan) else None
    if not plan.again or epoch is None:
        later = {name for wave in plan.waves[position:] for name in wave.ids}
    else:
        later = {n for w in plan.waves[position:] if w.passes[0][0] == epoch for n in w.ids}
    return everything - later


@pytest.mark.parametrize("recapture", [False, True])
def test_what_is_over_at_each_position(recapture: bool) -> None:
    plan = plan_waves(entries_of([50] * 60, 3), replace(RULE, recapture=recapture, epochs=2.5))
    assert len(plan) > 6
    for position in range(len(plan) + 1):
        over = plan.over(position)
        assert over == over_by_hand(plan, position)
        assert over.isdisjoint(plan.kept)
        for number in plan.on_disk(position):
            assert over.isdisjoint(plan.waves[number].ids)
    assert plan.over(len(plan)) == {name for wave in plan.waves for name in wave.ids}


def test_nothing_is_captured_ahead_for_another_epoch() -> None:
    plan = plan_waves(entries_of([50] * 60), replace(RULE, recapture=True))
    epochs = [wave.first_epoch for wave in plan.waves]
    last = epochs.index(1) - 1
    assert plan.on_disk(last) == [last]
    assert plan.on_disk(0) == [0, 1]


@pytest.mark.parametrize("change", [{"max_bytes": STORE_OVERHEAD_BYTES + 30_000}, {"least_bytes": 150_000}])
def test_a_bound_that_is_too_small_is_refused_with_what_it_takes(change: dict[str, int]) -> None:
    entries = entries_of([50] * 60, 2)
    with pytest.raises(ConfigError) as caught:
        plan_waves(entries, replace(RULE, **change))
    enough = int(str(caught.value.hint).partition("at least ")[2].partition(" bytes")[0])
    assert plan_waves(entries, replace(RULE, **change | {"max_bytes": enough})).most_bytes <= enough
    with pytest.raises(ConfigError):
        plan_waves(entries, replace(RULE, **change | {"max_bytes": enough - 1}))


def test_a_real_segment_is_never_larger_than_what_is_counted_for_it(tmp_path: Path) -> None:
    """Each sample in a segment of its own, in whole blocks, and all in one."""
    rng = np.random.default_rng(0)
    samples = []
    for seed in range(40):
        length = int(rng.integers(4, 60))
        middle = int(rng.integers(1, length))
        samples.append(captured(seed, length, ((middle - 1, middle), (middle, length))))
    for group in [*([sample] for sample in samples), samples]:
        segment = encode_segment(group, "0" * 32)
        path = tmp_path / segment_name(1, segment.checksum)
        write_segment(path, segment)
        width = group[0].aux.shape[1] * group[0].aux.shape[2] * group[0].aux.array.itemsize
        row = group[0].last.shape[1] * group[0].last.array.itemsize
        rule = replace(RULE, token_bytes=width + 4, row_bytes=row + 8)
        counted = sum(
            rule.sample_bytes(SampleEntry(s.id, len(s.tokens), s.num_supervised, "train", "")) for s in group
        )
        assert path.stat().st_blocks * 512 <= counted
        path.unlink()


def test_the_record_is_believed_only_whole(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    assert read_waves(layout) is None
    record = WaveRecord(RULE, "ab", 7, 21, {"ab" * 16: "CaptureInvalid: NaN"})
    write_waves(layout, record)
    assert read_waves(layout) == record
    text = waves_path(layout).read_text()
    for place in range(0, len(text), 7):
        waves_path(layout).write_text(text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :])
        assert read_waves(layout) in (None, record)  # a flip of a blank is none
    waves_path(layout).write_text(text[: len(text) // 2])
    assert read_waves(layout) is None
