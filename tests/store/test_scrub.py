from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.base.clock import boot_id
from eyas.base.layout import Layout
from eyas.store import scrub
from eyas.store.ledger import Ledger
from eyas.store.place import mount_identity
from eyas.store.reader import StoreReader
from eyas.store.recipe import write_store_recipe
from eyas.store.writer import StoreWriter
from tests.store.making import RECIPE, captured, project, same

SAMPLES = [captured(seed) for seed in range(12)]
IDS = {sample.id for sample in SAMPLES}


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A store of 12 samples in 3 segments of 4."""
    layout = project(tmp_path / "project", SAMPLES)
    fill(layout)
    return layout


def fill(layout: Layout) -> None:
    with Ledger.open(layout.ledger) as ledger:
        left = set(ledger.pending())
        with StoreWriter(layout.segments, ledger, RECIPE.hash) as writer:
            for number, sample in enumerate(sample for sample in SAMPLES if sample.id in left):
                writer.add(sample)
                if number % 4 == 3:
                    writer.flush()


def segments(layout: Layout) -> list[Path]:
    return sorted(layout.segments.glob("seg-*"))


def kinds(faults: list[scrub.Fault]) -> list[str]:
    return [fault.kind for fault in faults]


def assert_whole(layout: Layout) -> None:
    assert scrub.deep(layout) == []
    with Ledger.open_read_only(layout.ledger) as ledger:
        assert ledger.counts()["stored"].samples == len(SAMPLES)
        reader = StoreReader(layout.segments, ledger)
        assert all(same(sample, reader.sample(sample.id, check=True)) for sample in SAMPLES)


def mend_and_fill(layout: Layout, faults: list[scrub.Fault]) -> list[str]:
    with Ledger.open(layout.ledger) as ledger:
        done = scrub.repair(layout, ledger, faults)
    fill(layout)
    return done


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def test_a_whole_store_has_no_faults(layout: Layout) -> None:
    assert len(segments(layout)) == 3
    assert scrub.quick(layout) == []
    assert_whole(layout)


def test_a_project_without_a_store_has_no_faults(tmp_path: Path) -> None:
    assert scrub.quick(Layout(tmp_path)) == []
    assert scrub.deep(Layout(tmp_path)) == []


def test_a_changed_bit_in_data_takes_a_deep_scrub(layout: Layout) -> None:
    path = segments(layout)[1]
    flip(path, path.stat().st_size - 30)
    assert scrub.quick(layout) == []
    (fault,) = scrub.deep(layout)
    assert (fault.path, fault.kind, fault.is_damage) == (path, "content", True)
    assert len(fault.sample_ids) == 1
    assert scrub.deep(layout, names=[segments(layout)[0].name]) == []
    done = mend_and_fill(layout, [fault])
    assert "4 samples pending again" in done[0]
    moved = list(layout.set_aside.glob(f"*{path.name}"))
    assert len(moved) == 1
    assert "content" in json.loads(moved[0].with_name(moved[0].name + ".reason.json").read_text())["reason"]
    assert_whole(layout)


@pytest.mark.parametrize("kind", ["header bit", "short", "long", "missing", "swapped", "zeros", "empty"])
def test_what_a_quick_scrub_finds_and_repair_mends(layout: Layout, kind: str) -> None:
    path, other = segments(layout)[:2]
    content = path.read_bytes()
    expected = {"header bit": "header", "swapped": "header", "zeros": "header", "missing": "missing"}
    if kind == "header bit":
        flip(path, 500)
    elif kind == "missing":
        path.unlink()
    elif kind == "swapped":
        os.rename(path, path.with_name("x"))
        os.rename(other, path)
        os.rename(path.with_name("x"), other)
    else:
        changed = {"short": content[:-1], "long": content + b"\0", "zeros": bytes(len(content)), "empty": b""}
        path.write_bytes(changed[kind])
    faults = scrub.quick(layout)
    assert set(kinds(faults)) == {expected.get(kind, "size")}
    assert faults[0].path == path
    assert len(faults[0].sample_ids) == 4
    assert faults[0].as_dict()["is_damage"] is True
    assert mend_and_fill(layout, faults)
    assert_whole(layout)


def test_foreign_files_and_leftovers(layout: Layout) -> None:
    leftover = layout.segments / ".seg-00000009-01234567.safetensors.77.tmp"
    leftover.write_bytes(b"half")
    foreign = layout.segments / "notes.txt"
    foreign.write_text("mine")
    damaged = layout.segments / "seg-00000009-01234567.safetensors"
    damaged.write_bytes(b"nothing of ours")
    found = {fault.path: fault for fault in scrub.quick(layout)}
    assert {path: fault.kind for path, fault in found.items()} == {
        leftover: "temporary",
        foreign: "foreign",
        damaged: "header",
    }
    assert not found[leftover].is_damage
    mend_and_fill(layout, list(found.values()))
    assert_whole(layout)
    assert len(list(layout.set_aside.glob("*notes.txt"))) == 1


def test_segments_of_another_recipe(layout: Layout) -> None:
    write_store_recipe(layout.store_recipe, replace(RECIPE, aux_layers=(1, 2)))
    assert kinds(scrub.quick(layout)) == ["recipe"] * 3
    with Ledger.open(layout.ledger) as ledger:
        ledger.release_segment(segments(layout)[0].name)
        adoption = scrub.adopt_unknown(layout, ledger)
    assert adoption.segments == []
    assert kinds(adoption.faults) == ["recipe"]


def test_a_lost_or_damaged_recipe_file(layout: Layout) -> None:
    layout.store_recipe.write_text("{")
    (fault,) = scrub.quick(layout)
    assert fault.kind == "recipe_file"
    with Ledger.open(layout.ledger) as ledger:
        scrub.repair(layout, ledger, [fault])
        assert ledger.counts()["stored"].samples == 12
    assert kinds(scrub.quick(layout)) == ["recipe_file"]
    assert not layout.store_recipe.exists()


def test_a_lost_ledger_is_rebuilt_equal(layout: Layout) -> None:
    with Ledger.open(layout.ledger) as ledger:
        before = (list(ledger.entries()), dict(ledger.stored()), [r.name for r in ledger.segments()])
    layout.ledger.unlink()
    assert "ledger" in kinds(scrub.quick(layout))
    ledger, adoption = scrub.open_or_rebuild(layout)
    with ledger:
        assert adoption is not None
        assert adoption.num_samples == 12
        assert (list(ledger.entries()), dict(ledger.stored()), [r.name for r in ledger.segments()]) == before
        assert ledger.unverified(boot_id(), mount_identity(layout.segments)) == []
    assert_whole(layout)


def test_a_damaged_ledger_is_set_aside_and_rebuilt(layout: Layout) -> None:
    layout.ledger.write_bytes(b"no database " * 1000)
    assert kinds(scrub.quick(layout)) == ["ledger"]
    ledger, adoption = scrub.open_or_rebuild(layout)
    ledger.close()
    assert adoption is not None
    assert len(list(layout.set_aside.glob("*ledger.db"))) == 1
    assert_whole(layout)
    ledger, adoption = scrub.open_or_rebuild(layout)
    ledger.close()
    assert adoption is None


def test_a_ledger_older_than_the_segments(tmp_path: Path) -> None:
    layout = project(tmp_path / "project", SAMPLES)
    shutil.copy(layout.ledger, tmp_path / "old.db")
    fill(layout)
    shutil.copy(tmp_path / "old.db", layout.ledger)
    for suffix in ("-wal", "-shm"):
        layout.ledger.with_name(layout.ledger.name + suffix).unlink(missing_ok=True)
    faults = scrub.quick(layout)
    assert kinds(faults) == ["unknown"] * 3
    assert not any(fault.is_damage for fault in faults)
    with Ledger.open(layout.ledger) as ledger:
        adoption = scrub.adopt_unknown(layout, ledger)
        assert len(adoption.segments) == 3
        assert adoption.faults == []
        assert ledger.pending() == []
        assert scrub.adopt_unknown(layout, ledger).segments == []
    assert_whole(layout)


def test_a_damaged_segment_is_not_adopted(layout: Layout) -> None:
    path = segments(layout)[0]
    layout.ledger.unlink()
    flip(path, path.stat().st_size - 30)
    ledger, adoption = scrub.open_or_rebuild(layout)
    with ledger:
        assert adoption is not None
        assert kinds(adoption.faults) == ["content"]
        assert path.exists()
        assert len(ledger.pending()) == 4
    done = mend_and_fill(layout, scrub.quick(layout))
    assert any("not adopted" in line for line in done)
    assert_whole(layout)


def test_duplicates_among_unknown_segments(layout: Layout) -> None:
    copied = segments(layout)[0]
    copy = layout.segments / copied.name.replace("00000001", "00000017")
    shutil.copy(copied, copy)
    with Ledger.open(layout.ledger) as ledger:
        adoption = scrub.adopt_unknown(layout, ledger)
        assert adoption.num_samples == 0
        assert len(adoption.duplicates) == 4
        assert ledger.samples_of(copied.name)
        assert ledger.samples_of(copy.name) == []
    assert_whole(layout)


def test_failures_come_back_from_the_logs(layout: Layout) -> None:
    path = segments(layout)[0]
    with Ledger.open(layout.ledger) as ledger:
        ledger.mirror = layout.logs / "attempt-0004" / "events.jsonl"
        ids = scrub.set_aside_segment(layout, ledger, path.name, "for this test")
        for _ in range(2):
            ledger.fail_sample(ids[0], "nan", 4, limit=5)
        ledger.fail_sample(ids[1], "too long", 4, limit=1)
        ledger.set_aside_sample(ids[2], "by hand")
        before = ledger.failed_samples()
    (layout.logs / "latest").symlink_to("attempt-0004")
    with open(layout.logs / "attempt-0004" / "events.jsonl", "a") as file:
        file.write('{"at": "torn')
    layout.ledger.unlink()
    ledger, _ = scrub.open_or_rebuild(layout)
    with ledger:
        assert ledger.failed_samples() == before
        assert {sample.failures for sample in before} == {0, 1, 2}
        assert [attempt.number for attempt in ledger.attempts()] == [4]
        assert ledger.start_attempt() == 5
        assert len(ledger.pending()) == 2


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE samples SET state = 'pending', segment = NULL WHERE id = (SELECT min(id) FROM samples)",
        "UPDATE samples SET segment = (SELECT max(name) FROM segments)",
        "DELETE FROM samples WHERE id = (SELECT min(id) FROM samples)",
        "UPDATE segments SET recipe = 'other' WHERE name = (SELECT min(name) FROM segments)",
    ],
)
def test_a_ledger_that_disagrees_with_the_segments(layout: Layout, change: str) -> None:
    with Ledger.open(layout.ledger) as ledger, ledger.transaction() as connection:
        connection.execute(change)
    faults = scrub.quick(layout)
    assert set(kinds(faults)) == {"ledger"}
    with Ledger.open(layout.ledger) as ledger:
        scrub.repair(layout, ledger, faults)
        scrub.rebuild_ledger(layout, ledger)
    assert_whole(layout)


@pytest.mark.parametrize(
    "change", ["length = 99", "num_supervised = 0", "split = 'validation'", "source = 'x'"]
)
def test_a_ledger_that_disagrees_with_the_samples(layout: Layout, change: str) -> None:
    with Ledger.open(layout.ledger) as ledger, ledger.transaction() as connection:
        connection.execute(f"UPDATE samples SET {change} WHERE id = (SELECT min(id) FROM samples)")
    (fault,) = scrub.deep(layout)
    assert (fault.kind, fault.sample_ids) == ("ledger", (min(IDS),))
    with Ledger.open(layout.ledger) as ledger:
        scrub.rebuild_ledger(layout, ledger)
    assert_whole(layout)


def test_a_deep_scrub_notes_what_it_verified(layout: Layout) -> None:
    flip(segments(layout)[2], segments(layout)[2].stat().st_size - 30)
    with Ledger.open(layout.ledger) as ledger:
        names = [path.name for path in segments(layout)]
        assert ledger.unverified(boot_id(), mount_identity(layout.segments)) == names
        scrub.deep(layout, ledger)
        assert ledger.unverified(boot_id(), mount_identity(layout.segments)) == names[2:]
        assert ledger.unverified("another boot", mount_identity(layout.segments)) == names


def test_progress_is_in_bytes(layout: Layout) -> None:
    class Listener:
        total = done = 0

        def start(self, label: str, *, total: int, unit: str, done: int = 0) -> None:
            assert unit == "bytes"
            self.total = total

        def advance(self, units: int, **facts: float | int | str) -> None:
            self.done += units

        def say(self, message: str) -> None:
            raise AssertionError(message)

    listener = Listener()
    scrub.deep(layout, progress=listener)
    assert listener.done == listener.total == sum(path.stat().st_size for path in segments(layout))


def test_repair_may_be_interrupted_and_done_again(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    path = segments(layout)[0]
    flip(path, 500)
    faults = scrub.quick(layout)

    def killed(*_: object) -> list[str]:
        raise KeyboardInterrupt

    with Ledger.open(layout.ledger) as ledger, monkeypatch.context() as patch:
        patch.setattr(Ledger, "release_segment", killed)
        with pytest.raises(KeyboardInterrupt):
            scrub.repair(layout, ledger, faults)
    assert not path.exists()
    faults = scrub.quick(layout)
    assert kinds(faults) == ["missing"]
    mend_and_fill(layout, faults)
    assert_whole(layout)


def test_mount_identity(tmp_path: Path) -> None:
    assert mount_identity(tmp_path) == mount_identity(tmp_path / ".")
    assert mount_identity(tmp_path) != mount_identity(Path("/proc"))
    assert len(mount_identity(tmp_path).split(" ")) == 3
    with pytest.raises(OSError, match="nowhere"):
        mount_identity(tmp_path / "nowhere")
