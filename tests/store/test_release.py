"""Releasing waves: from any position to any other, cut off anywhere, with the ledger or without it."""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from eyas.base.errors import ConfigError
from eyas.base.layout import Layout
from eyas.base.seal import sealed_folder
from eyas.store import release
from eyas.store.clear import find_removable, remove
from eyas.store.commit import commit_samples, next_number
from eyas.store.ledger import Ledger
from eyas.store.release import recall_released, settle, settle_ledger, sweep_released
from eyas.store.repair import open_or_rebuild, repair, unknown_segments
from eyas.store.samples import write_samples
from eyas.store.scrub import deep, quick
from eyas.store.segment import CapturedSample
from eyas.store.wave_record import read_waves, settled_at
from eyas.store.waves import STORE_OVERHEAD_BYTES, WavePlan, WaveRule, plan_waves
from tests.store.making import RECIPE, captured, project, text_sample

RULE = WaveRule(
    max_bytes=STORE_OVERHEAD_BYTES + 62_000,
    least_bytes=1,
    token_bytes=2 * 8 * 2 + 4,
    row_bytes=8 * 2 + 8,
    epochs=2.0,
    recapture=False,
    seed=0,
)


@dataclass
class Place:
    """A project with its samples, their plan, and a ledger that is open."""

    layout: Layout
    ledger: Ledger
    samples: dict[str, CapturedSample]
    plan: WavePlan

    def store(self, *numbers: int, kept: bool = False) -> None:
        """Capture waves, each into segments of its own."""
        groups = [self.plan.kept] if kept else []
        groups += [self.plan.waves[number].ids for number in numbers]
        for ids in groups:
            counter = itertools.count(next_number(self.layout.segments, self.ledger))
            wanted = [self.samples[name] for name in ids if self.ledger.state_of(name) == "pending"]
            for chunk in (wanted[:2], wanted[2:]):
                if chunk:
                    commit_samples(self.layout.segments, self.ledger, RECIPE.hash, chunk, counter)

    def trained(self, position: int) -> None:
        """A checkpoint says that so many waves are over."""
        folder = self.layout.checkpoints / f"step-{position:08d}"
        about = {"step": position, "waves_over": position, "waves": self.plan.digest}
        with sealed_folder(folder, about):
            pass

    def states(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        with self.ledger.reading() as connection:
            for name, state in connection.execute("SELECT id, state FROM samples"):
                found.setdefault(state, set()).add(name)
        return found

    def files(self) -> set[str]:
        return set(os.listdir(self.layout.segments))

    def ids(self, *numbers: int) -> set[str]:
        return {name for number in numbers for name in self.plan.waves[number].ids}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    samples = {sample.id: sample for sample in (captured(seed) for seed in range(24))}
    layout = project(tmp_path / "p", samples.values())
    ledger = Ledger.open(layout.ledger)
    entries = list(ledger.entries())
    split = [entry._replace(split="validation" if i < 2 else "train") for i, entry in enumerate(entries)]
    shutil.rmtree(layout.samples)
    with sealed_folder(layout.samples, {}) as folder:
        write_samples(folder, [text_sample(samples[entry.id], entry.split) for entry in split])
    ledger.replace_samples(split)
    plan = plan_waves(split, RULE)
    assert len(plan) >= 4
    return Place(layout, ledger, samples, plan)


def test_waves_that_are_over_go_and_the_others_stay(place: Place) -> None:
    place.store(0, 1, kept=True)
    settle(place.layout, place.ledger, RULE, place.plan, 0)
    before = place.files()
    done = settle(place.layout, place.ledger, RULE, place.plan, 1)
    assert done.released == len(place.ids(0))
    assert done.num_bytes > 0
    states = place.states()
    assert states["released"] == place.ids(0)
    assert states["stored"] == place.ids(1) | set(place.plan.kept)
    assert sum(map(len, states.values())) == 24
    assert place.files() == {segment.name for segment in place.ledger.segments()}
    assert len(before) - len(place.files()) == done.segments == 2
    assert settled_at(place.ledger) == 1
    assert settle(place.layout, place.ledger, RULE, place.plan, 1) == release.Settled()


def test_a_removal_that_was_cut_off_is_finished_and_nothing_of_it_is_taken_in_again(place: Place) -> None:
    place.store(0, 1, kept=True)
    before = place.files()
    settle_ledger(place.layout, place.ledger, RULE, place.plan, 1)
    assert place.files() == before, "only the transaction happened"
    assert unknown_segments(place.layout, place.ledger) == []
    faults = quick(place.layout, place.ledger)
    assert {fault.kind for fault in faults} == {"released"}
    assert not any(fault.is_damage for fault in faults)
    assert not any(fault.is_damage for fault in deep(place.layout, place.ledger))
    assert repair(place.layout, place.ledger, faults) == []
    assert place.states()["released"] == place.ids(0)
    removable = find_removable(place.layout, place.ledger, 2)
    assert [item.kind for item in removable] == ["released", "released"]
    assert sweep_released(place.layout, place.ledger)[0] == 2
    assert quick(place.layout, place.ledger) == []


def test_gc_removes_what_a_release_left(place: Place) -> None:
    place.store(0, 1, kept=True)
    settle_ledger(place.layout, place.ledger, RULE, place.plan, 1)
    remove(place.layout, place.ledger, find_removable(place.layout, place.ledger, 2))
    assert place.files() == {segment.name for segment in place.ledger.segments()}
    assert place.states()["released"] == place.ids(0)


def test_training_that_fell_back_needs_released_samples_again(place: Place) -> None:
    place.store(0, 1, kept=True)
    settle(place.layout, place.ledger, RULE, place.plan, 1)
    place.store(2)
    settle(place.layout, place.ledger, RULE, place.plan, 2)
    place.store(3)
    done = settle(place.layout, place.ledger, RULE, place.plan, 1)
    assert done.recalled == len(place.ids(1))
    states = place.states()
    assert states["released"] == place.ids(0)
    assert states["stored"] == place.ids(2) | set(place.plan.kept), "wave 3 has no room beside 1 and 2"
    assert place.ids(1) | place.ids(3) <= states["pending"]
    assert settle(place.layout, place.ledger, RULE, place.plan, 0).recalled == len(place.ids(0))
    assert "released" not in place.states()


def test_a_lost_ledger_comes_back_to_where_training_stood(place: Place) -> None:
    place.store(0, 1, kept=True)
    failed = sorted(place.ids(2))[0]
    for number in (1, 2, 3):
        place.trained(number)
        if number == 1:  # it is captured ahead now
            for _ in range(3):
                place.ledger.fail_sample(failed, "poison", 1, 3)
        settle(place.layout, place.ledger, RULE, place.plan, number)
        place.store(*place.plan.on_disk(number))
    before = place.states()
    assert before["set_aside"] == {failed}
    assert read_waves(place.layout).passed == {failed: "poison"}
    place.ledger.close()
    for path in place.layout.state.glob("ledger.db*"):
        path.unlink()
    place.ledger, adoption = open_or_rebuild(place.layout)
    assert adoption is not None
    assert place.states() == before


def test_orphans_of_a_wave_that_is_over_are_no_samples_of_a_rebuilt_ledger(place: Place) -> None:
    place.store(0, 1, kept=True)
    settle(place.layout, place.ledger, RULE, place.plan, 0)
    place.trained(1)
    place.ledger.close()
    for path in place.layout.state.glob("ledger.db*"):
        path.unlink()
    place.ledger, _ = open_or_rebuild(place.layout)
    states = place.states()
    assert states["released"] == place.ids(0)
    assert states["stored"] == place.ids(1) | set(place.plan.kept)
    assert sweep_released(place.layout, place.ledger)[0] == 2


def test_samples_that_were_passed_stay_set_aside_when_failed_ones_are_retried(place: Place) -> None:
    place.store(1, kept=True)
    failed = sorted(place.ids(0))[0]
    place.ledger.set_aside_sample(failed, "poison")
    place.store(0)
    settle(place.layout, place.ledger, RULE, place.plan, 1)
    assert place.ledger.retry_failed() == 1
    settle(place.layout, place.ledger, RULE, place.plan, 1)
    assert place.states()["set_aside"] == {failed}
    settle(place.layout, place.ledger, RULE, place.plan, 0)
    place.ledger.retry_failed()
    settle(place.layout, place.ledger, RULE, place.plan, 0)
    assert failed in place.states()["pending"], "training comes to it again"


def test_a_store_that_was_filled_without_a_bound_is_refused(place: Place) -> None:
    counter = itertools.count(1)
    commit_samples(place.layout.segments, place.ledger, RECIPE.hash, list(place.samples.values()), counter)
    before = place.states()
    with pytest.raises(ConfigError, match="without a bound"):
        settle(place.layout, place.ledger, RULE, place.plan, 0)
    assert place.states() == before
    assert len(place.files()) == 1


def test_what_was_captured_for_other_waves_is_captured_again(place: Place) -> None:
    """Another bound makes other waves, whose batches are others."""
    place.store(0, 1, kept=True)
    settle(place.layout, place.ledger, RULE, place.plan, 0)
    rule = replace(RULE, max_bytes=RULE.max_bytes + 10_000)
    plan = plan_waves(place.ledger.entries(), rule)
    assert plan.digest != place.plan.digest
    assert len(plan) > 1
    settle(place.layout, place.ledger, rule, plan, 0)
    assert place.states()["stored"] == set(plan.kept)
    place.plan = plan
    place.store(0, 1)
    settle(place.layout, place.ledger, rule, plan, 0)
    assert place.states()["stored"] == place.ids(0, 1) | set(plan.kept)


def test_without_a_bound_everything_is_needed_again(place: Place) -> None:
    place.store(0, 1, kept=True)
    settle(place.layout, place.ledger, RULE, place.plan, 1)
    assert recall_released(place.ledger) == len(place.ids(0))
    assert recall_released(place.ledger) == 0
    assert "released" not in place.states()


OLD_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE samples (
    id TEXT PRIMARY KEY, length INTEGER NOT NULL, num_supervised INTEGER NOT NULL, split TEXT NOT NULL,
    source TEXT NOT NULL, state TEXT NOT NULL DEFAULT 'pending'
        CHECK (state IN ('pending', 'in_flight', 'stored', 'failed', 'set_aside')),
    segment TEXT, failures INTEGER NOT NULL DEFAULT 0, reason TEXT, attempt INTEGER,
    listed INTEGER NOT NULL DEFAULT 1, CHECK ((state = 'stored') = (segment IS NOT NULL))
) WITHOUT ROWID;
CREATE INDEX samples_by_state ON samples (listed, state, length);
CREATE INDEX samples_by_segment ON samples (segment) WHERE segment IS NOT NULL;
CREATE TABLE segments (
    name TEXT PRIMARY KEY, bytes INTEGER NOT NULL, num_samples INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    recipe TEXT NOT NULL, committed_at TEXT NOT NULL, verified_at TEXT, verified_boot TEXT,
    verified_mount TEXT,
    state TEXT NOT NULL DEFAULT 'present' CHECK (state IN ('present', 'set_aside'))
) WITHOUT ROWID;
CREATE TABLE failures (sample TEXT NOT NULL, attempt INTEGER, reason TEXT NOT NULL, at TEXT NOT NULL);
CREATE TABLE attempts (
    number INTEGER PRIMARY KEY, started_at TEXT NOT NULL, ended_at TEXT, outcome TEXT, detail TEXT NOT NULL
);
CREATE TABLE stages (
    name TEXT PRIMARY KEY, recipe_hash TEXT NOT NULL, recipe TEXT NOT NULL, state TEXT NOT NULL,
    started_at TEXT, finished_at TEXT, detail TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE events (at TEXT NOT NULL, attempt INTEGER, kind TEXT NOT NULL, detail TEXT NOT NULL);
CREATE TABLE todos (
    id TEXT PRIMARY KEY, content TEXT NOT NULL, priority TEXT NOT NULL, status TEXT NOT NULL,
    depends_on TEXT NOT NULL, evidence TEXT NOT NULL, changed_at TEXT NOT NULL
) WITHOUT ROWID;
INSERT INTO meta VALUES ('format', '1'), ('listed', '{}');
INSERT INTO samples VALUES
    ('aa', 5, 2, 'train', 'x', 'stored', 'seg-1', 0, NULL, NULL, 1),
    ('bb', 6, 3, 'train', 'x', 'failed', NULL, 2, 'poison', 4, 1);
INSERT INTO segments VALUES ('seg-1', 100, 1, 5, 'r', '2026-11-01T00:00:00Z', NULL, NULL, NULL, 'present');
INSERT INTO events VALUES ('2026-11-01T00:00:00Z', 4, 'sample_failed', '{}');
"""


def test_a_ledger_of_format_1_is_read_as_it_is_and_brought_up_to_date_for_writing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    connection = sqlite3.connect(path)
    connection.executescript(OLD_TABLES)
    connection.close()
    with Ledger.open_read_only(path) as ledger:
        assert ledger.counts()["stored"].samples == 1
        assert ledger.meta("format") == "1"
    with Ledger.open(path) as ledger:
        assert ledger.meta("format") == "2"
        assert ledger.meta("listed") == "{}"
        assert ledger.state_of("aa") == "stored"
        assert ledger.samples_of("seg-1") == ["aa"]
        [failed] = ledger.failed_samples()
        assert (failed.id, failed.failures, failed.reason) == ("bb", 2, "poison")
        assert [event.kind for event in ledger.events()] == ["sample_failed"]
        with ledger.transaction() as writing:
            writing.execute("UPDATE samples SET state = 'released', segment = NULL WHERE id = 'aa'")
            writing.execute("UPDATE segments SET state = 'released'")
        with ledger.reading() as reading:
            indexes = {row[1] for row in reading.execute("PRAGMA index_list(samples)")}
        assert {"samples_by_state", "samples_by_segment"} <= indexes
        assert ledger.integrity_faults() == []
    with Ledger.open(path) as ledger:
        assert ledger.counts()["released"].samples == 1
