"""What is left, as flat arrays, and that a resume does not list again what is listed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from eyas.base.errors import DamageFound
from eyas.base.layout import Layout
from eyas.base.seal import sealed_folder
from eyas.store.entry import SampleEntry
from eyas.store.ledger import Ledger
from eyas.store.listing import list_samples, read_listing
from eyas.store.samples import Sample, write_samples
from tests.store.making import captured, text_sample

NUM_SAMPLES = 6


def make_data(count: int) -> list[Sample]:
    return [text_sample(captured(seed, length=12 + seed)) for seed in range(count)]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "p")
    layout.state.mkdir(parents=True)
    with sealed_folder(layout.samples, {}) as folder:
        write_samples(folder, make_data(NUM_SAMPLES))
    return layout


def listings(ledger: Ledger) -> list[int]:
    """How often samples were listed, by a trace of SQLite's own."""
    found: list[int] = []
    with ledger.reading() as connection:
        connection.set_trace_callback(
            lambda text: found.append(1) if text.startswith("UPDATE samples SET listed = 0") else None
        )
    return found


def test_states_become_a_mask(layout: Layout) -> None:
    with Ledger.open(layout.ledger) as ledger:
        listing = list_samples(layout, ledger)
        ids = [sample.id for sample in make_data(NUM_SAMPLES)]
        lengths = {sample.id: len(sample.tokens) for sample in make_data(NUM_SAMPLES)}
        assert listing.id_texts(np.arange(len(listing))) == sorted(ids)
        assert listing.lengths.tolist() == [lengths[name] for name in sorted(ids)]
        assert listing.left() == set(ids)
        ledger.commit_segment("seg", 1, "recipe", [(ids[0], lengths[ids[0]], 1)])
        ledger.fail_sample(ids[1], "no", None, 3)
        ledger.set_aside_sample(ids[2], "never")
        after = list_samples(layout, ledger)
        assert after.left() == set(ids) - {ids[0], ids[2]}
        assert after.left() == set(ledger.pending())
        assert after.digest() == listing.digest()


def test_what_is_listed_is_not_listed_again(layout: Layout) -> None:
    with Ledger.open(layout.ledger) as ledger:
        calls = listings(ledger)
        list_samples(layout, ledger)
        assert len(calls) == 1
        list_samples(layout, ledger)
        assert len(calls) == 1
        with ledger.transaction() as connection:  # a row that is not what was listed
            connection.execute("UPDATE samples SET length = length + 1")
        fresh = list_samples(layout, ledger)
        assert len(calls) == 2
        assert sorted(fresh.lengths.tolist()) == sorted(len(s.tokens) for s in make_data(NUM_SAMPLES))


def test_a_lost_or_strange_row_is_listed_again(layout: Layout) -> None:
    with Ledger.open(layout.ledger) as ledger:
        ids = list_samples(layout, ledger).id_texts(np.arange(NUM_SAMPLES))
        with ledger.transaction() as connection:
            connection.execute("DELETE FROM samples WHERE id = ?", (ids[0],))
        assert list_samples(layout, ledger).id_texts(np.arange(NUM_SAMPLES)) == ids
        with ledger.transaction() as connection:
            connection.execute("UPDATE samples SET id = ? WHERE id = ?", ("f" * 32, ids[1]))
        assert list_samples(layout, ledger).id_texts(np.arange(NUM_SAMPLES)) == ids
        assert ledger.state_of("f" * 32) is None


def test_other_data_is_listed(layout: Layout, tmp_path: Path) -> None:
    with Ledger.open(layout.ledger) as ledger:
        list_samples(layout, ledger)
        layout.samples.rename(tmp_path / "before")
        with sealed_folder(layout.samples, {}) as folder:
            write_samples(folder, make_data(NUM_SAMPLES + 3))
        assert len(list_samples(layout, ledger)) == NUM_SAMPLES + 3


def test_nothing_listed_and_ids_that_are_none(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        assert len(read_listing(ledger)) == 0
        assert read_listing(ledger).left() == set()
        ledger.add_samples([SampleEntry("short", 1, 1, "train", "x")])
        with pytest.raises(DamageFound, match="ledger is damaged"):
            read_listing(ledger)


def test_a_listing_that_fails_changes_nothing(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger.open(layout.ledger) as ledger:
        before = list_samples(layout, ledger)
        ledger.set_meta("listed", "other")

        def torn(*_: object) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(Ledger, "set_meta", torn)
        with pytest.raises(Exception, match="disk I/O error"):
            list_samples(layout, ledger)
        monkeypatch.undo()
        assert ledger.meta("listed") == "other"
        assert read_listing(ledger).digest() == before.digest()
