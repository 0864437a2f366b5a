"""Compacting and clearing away: same bits, fewer files, and a kill at any call loses nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from eyas.base.layout import Layout
from eyas.base.seal import sealed_folder
from eyas.store import scrub
from eyas.store.clear import find_removable, remove
from eyas.store.compact import compact, plan_groups
from eyas.store.ledger import Ledger
from eyas.store.ledger_moves import SegmentUse, segment_uses
from eyas.store.reader import StoreReader
from eyas.store.writer import StoreWriter
from tests.faults.forked import KILLED, kill_at_call
from tests.store.making import RECIPE, captured, project, same

SAMPLES = [captured(seed) for seed in range(10)]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A store of 10 samples in 5 segments."""
    layout = project(tmp_path / "p", SAMPLES)
    with Ledger.open(layout.ledger) as ledger, StoreWriter(layout.segments, ledger, RECIPE.hash) as writer:
        for number, sample in enumerate(SAMPLES):
            writer.add(sample)
            if number % 2:
                writer.flush()
    return layout


def names(layout: Layout) -> list[str]:
    return sorted(path.name for path in layout.segments.iterdir())


def assert_whole(layout: Layout) -> None:
    assert [fault for fault in scrub.deep(layout) if fault.is_damage] == []
    with Ledger.open_read_only(layout.ledger) as ledger:
        assert ledger.counts()["stored"].samples == len(SAMPLES)
        reader = StoreReader(layout.segments, ledger)
        assert all(same(sample, reader.sample(sample.id, check=True)) for sample in SAMPLES)


def test_groups_are_runs_of_small_segments_that_fit() -> None:
    sizes = [10, 10, 90, 10, 10, 10, 40]
    uses = [SegmentUse(f"s{number}", size, 1, 1) for number, size in enumerate(sizes)]
    uses[3] = SegmentUse("s3", 10, 1, 0)
    groups = plan_groups(uses, small_bytes=50, target_bytes=40)
    assert [[use.name for use in group] for group in groups] == [["s0", "s1", "s4", "s5"]]


def test_small_segments_become_one_and_the_old_ones_go(layout: Layout) -> None:
    before = names(layout)
    with Ledger.open(layout.ledger) as ledger:
        result = compact(layout, ledger)
        assert result.groups == [before]
        assert set(names(layout)) == {*before, *result.segments}
        assert_whole(layout)
        found = find_removable(layout, ledger, 2)
        assert sorted(item.path.name for item in found) == before
        assert {item.kind for item in found} == {"superseded"}
        assert len(remove(layout, ledger, found)) == 5
        assert find_removable(layout, ledger, 2) == []
        assert compact(layout, ledger).groups == []
    assert names(layout) == result.segments
    assert_whole(layout)


def test_a_rebuilt_ledger_takes_either_copy(layout: Layout) -> None:
    with Ledger.open(layout.ledger) as ledger:
        compact(layout, ledger)
    for path in layout.state.glob("ledger.db*"):
        path.unlink()
    scrub.open_or_rebuild(layout)[0].close()
    assert_whole(layout)
    with Ledger.open(layout.ledger) as ledger:
        assert sum(use.is_superseded for use in segment_uses(ledger)) == 1
        remove(layout, ledger, find_removable(layout, ledger, 2))
    assert_whole(layout)
    assert len(names(layout)) == 5


def test_a_damaged_segment_is_named_and_left_alone(layout: Layout) -> None:
    victim = layout.segments / names(layout)[1]
    content = bytearray(victim.read_bytes())
    content[-3] ^= 4
    victim.write_bytes(content)
    with Ledger.open(layout.ledger) as ledger:
        result = compact(layout, ledger)
        assert [fault.path for fault in result.faults] == [victim]
        assert [len(group) for group in result.groups] == [4]
        assert victim not in [item.path for item in find_removable(layout, ledger, 2)]


def test_a_superseded_segment_stays_when_the_other_is_not_whole(layout: Layout) -> None:
    with Ledger.open(layout.ledger) as ledger:
        (new,) = compact(layout, ledger).segments
        content = bytearray((layout.segments / new).read_bytes())
        content[-3] ^= 4
        (layout.segments / new).write_bytes(content)
        before = names(layout)
        found = find_removable(layout, ledger, 2)
        assert len(remove(layout, ledger, found)) == 0
    assert names(layout) == before


def test_only_what_is_explained_is_removed(layout: Layout) -> None:
    dead = 2**22 + 7  # above the highest number that a process can have
    places = {
        layout.segments / f".seg-00000009-abcdef01.safetensors.{dead}.tmp": True,
        layout.state / f".digests.json.{dead}.tmp": True,
        layout.segments / ".seg-00000009-abcdef01.safetensors.1.tmp": False,
        layout.segments / "notes.txt": False,
        layout.segments / "other.tmp": False,
        layout.state / ".hidden": False,
        layout.set_aside / f".x.{dead}.tmp": False,
    }
    for path in places:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    folder = layout.checkpoints / f".step-00000001.{dead}.tmp"
    folder.mkdir(parents=True)
    (folder / "model").write_text("x")
    with Ledger.open(layout.ledger) as ledger:
        remove(layout, ledger, find_removable(layout, ledger, 2))
    assert {path: path.exists() for path in places} == {path: not gone for path, gone in places.items()}
    assert not folder.exists()
    assert {fault.kind for fault in scrub.deep(layout)} == {"foreign", "temporary"}


@pytest.mark.parametrize(("best", "left"), [(1, [1, 3, 4]), (None, [3, 4]), ("torn", [0, 1, 2, 3, 4])])
def test_checkpoints_beyond_the_kept_ones(layout: Layout, best: int | str | None, left: list[int]) -> None:
    for step in range(5):
        with sealed_folder(layout.checkpoints / f"step-{step:08d}", {"step": step}) as folder:
            text = (
                "{"
                if best == "torn"
                else f'{{"best": {"null" if best is None else f"""{{"step": {best}}}"""}}}'
            )
            (folder / "state.json").write_text(text)
    with Ledger.open(layout.ledger) as ledger:
        remove(layout, ledger, find_removable(layout, ledger, 2))
    steps = sorted(int(path.name[5:]) for path in layout.checkpoints.glob("step-*"))
    assert steps == left


def test_a_newest_checkpoint_that_lacks_its_validation_does_not_count(layout: Layout) -> None:
    """Training goes on from it only to replace it: the one before stands in, as the trainer keeps it."""
    for step in range(5):
        about = {"step": step, "unvalidated": step == 4}
        with sealed_folder(layout.checkpoints / f"step-{step:08d}", about) as folder:
            (folder / "state.json").write_text('{"best": {"step": 0}}')
    with Ledger.open(layout.ledger) as ledger:
        remove(layout, ledger, find_removable(layout, ledger, 1))
    assert sorted(int(path.name[5:]) for path in layout.checkpoints.glob("step-*")) == [0, 3, 4]


def _compact_and_clear(layout: Layout) -> None:
    with Ledger.open(layout.ledger) as ledger:
        scrub.repair(layout, ledger, scrub.quick(layout, ledger))
        compact(layout, ledger)
        remove(layout, ledger, find_removable(layout, ledger, 2))


def test_killed_at_every_call_of_compact_and_clear(layout: Layout, tmp_path: Path) -> None:
    kills = number = 0
    code = KILLED
    while code == KILLED:
        number += 1
        root = tmp_path / f"k{number}"
        shutil.copytree(layout.root, root)
        copy = Layout(root)
        child = os.fork()
        if child == 0:
            try:
                kill_at_call(("fsync", "rename", "unlink", "open"), number)()
                _compact_and_clear(copy)
            finally:
                os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        kills += code == KILLED
        assert_whole(copy)
        _compact_and_clear(copy)
        assert_whole(copy)
        shutil.rmtree(root)
    print(f"{kills} kills")
    assert kills >= 10
