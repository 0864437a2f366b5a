"""``eyas verify`` and ``eyas store``: what is damaged is named, mended, and nothing else is touched."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.base.layout import Layout
from eyas.base.seal import sealed_folder
from eyas.pipeline.lock import hold_lock
from eyas.pipeline.verify import pick
from eyas.stages.regenerate.answers import Answer, write_part
from eyas.store.ledger import Ledger
from eyas.store.writer import StoreWriter
from tests.cli.command import eyas, eyas_process
from tests.store.making import RECIPE, captured, project

SAMPLES = [captured(seed) for seed in range(8)]
CONFIG = '[target]\nmodel = "model"\n[[data.sources]]\npath = "prompts.jsonl"\n'


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A project with samples, 4 segments, answers, a vocabulary, a checkpoint and an export."""
    layout = project(tmp_path / "p", SAMPLES)
    layout.config.write_text(CONFIG)
    with Ledger.open(layout.ledger) as ledger, StoreWriter(layout.segments, ledger, RECIPE.hash) as writer:
        for number, sample in enumerate(SAMPLES):
            writer.add(sample)
            if number % 2:
                writer.flush()
    for path in (
        layout.prompts,
        layout.vocabulary,
        layout.checkpoints / "step-00000003",
        layout.exports / "x",
    ):
        with sealed_folder(path, {}) as folder:
            (folder / "content").write_bytes(b"content")
    write_part(
        layout.answers, 0, [Answer("c", 0, "p", [1, 2], "stop"), Answer("d", 0, "q", [3], "length")], "recipe"
    )
    return layout


def segments(layout: Layout) -> list[Path]:
    return sorted(layout.segments.glob("seg-*"))


def flip(path: Path, place: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def test_a_whole_project(layout: Layout) -> None:
    quick = eyas("verify", "--project", layout.root, "--json")
    assert quick.code == 0
    assert quick.json["findings"] == []
    deep = eyas("verify", "--deep", "--project", layout.root, "--json")
    assert (deep.code, deep.json["hashed"], deep.json["skipped"]) == (0, 4, 0)
    again = eyas("verify", "--deep", "--project", layout.root, "--json")
    assert (again.json["hashed"], again.json["skipped"]) == (0, 4)
    assert eyas("verify", "--deep", "--again", "--project", layout.root, "--json").json["hashed"] == 4
    shown = eyas("verify", "--project", layout.root)
    assert "no damage" in shown.err
    assert "nothing to do" in shown.err


def damages(layout: Layout) -> Iterator[tuple[str, Path, bool]]:
    """Kind of part, damaged file, and whether a quick look is enough."""
    yield "store", segments(layout)[1], False
    yield "prepare", layout.prompts / "content", False
    yield "regenerate", next(layout.samples.glob("part-*")), False
    yield "regenerate", next(layout.answers.iterdir()), False
    yield "train", layout.vocabulary / "content", False
    yield "train", layout.checkpoints / "step-00000003" / "content", False
    yield "export", layout.exports / "x" / "content", False


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("how", ["flip", "truncate", "unlink"])
def test_each_damage_is_named(layout: Layout, number: int, how: str) -> None:
    part, path, _ = list(damages(layout))[number]
    if how == "unlink" and path.parent == layout.answers:
        return  # a missing part is work that is left, not damage
    if how == "flip":
        flip(path, 3 if path.parent == layout.answers else -3)
    elif how == "truncate":
        path.write_bytes(path.read_bytes()[:-2])
    else:
        path.unlink()
    quick = eyas("verify", "--project", layout.root, "--json")
    assert quick.code == (0 if how == "flip" else 14)
    deep = eyas("verify", "--deep", "--again", "--project", layout.root, "--json")
    assert deep.code == 14
    damaged = [finding for finding in deep.json["findings"] if finding["is_damage"]]
    assert (part, str(path.relative_to(layout.root))) in [(f["part"], f["place"]) for f in damaged]
    assert deep.json["next"] == ("eyas store repair" if part == "store" else "eyas run")


def test_a_lost_seal_is_damage(layout: Layout) -> None:
    (layout.checkpoints / "step-00000003" / "seal.json").unlink()
    found = eyas("verify", "--project", layout.root, "--json")
    assert [f["place"] for f in found.json["findings"]] == ["drafter/checkpoints/step-00000003"]


def test_a_share_is_picked_by_seed(layout: Layout) -> None:
    names = [f"s{number}" for number in range(100)]
    assert len(pick(names, 0.05, 0)) == 5
    assert pick(names, 0.05, 0) == pick(list(reversed(names)), 0.05, 0) != pick(names, 0.05, 1)
    result = eyas("verify", "--sample", "30%", "--project", layout.root, "--json")
    assert result.json["hashed"] == 2
    assert eyas("verify", "--sample", "0", "--project", layout.root).code == 2


def test_verify_beside_a_writer_says_so(layout: Layout) -> None:
    with hold_lock(layout.state, "run"):
        result = eyas("verify", "--deep", "--project", layout.root, "--json")
    assert result.code == 0
    assert "without noting" in result.json["notes"][0]
    with Ledger.open_read_only(layout.ledger) as ledger:
        assert all(record.verified_at is None for record in ledger.segments())


def test_verify_finds_then_repair_mends(layout: Layout) -> None:
    assert eyas("verify", "--deep", "--project", layout.root).code == 0
    flip(segments(layout)[1])
    name = segments(layout)[1].name
    (layout.segments / "stray.txt").write_text("x")
    assert eyas("verify", "--deep", "--again", "--project", layout.root).code == 14
    planned = eyas("store", "repair", "--dry-run", "--project", layout.root, "--json").json["would"]
    assert [entry["what"].rpartition("/")[2] for entry in planned] == ["stray.txt", name]
    done = eyas("store", "repair", "--project", layout.root)
    assert done.code == 0
    assert name in done.out
    assert "next: eyas run" in done.err
    assert len(segments(layout)) == 3
    with Ledger.open_read_only(layout.ledger) as ledger:
        assert ledger.counts()["pending"].samples == 2
    assert eyas("store", "repair", "--project", layout.root).out == ""
    assert eyas("verify", "--deep", "--project", layout.root).code == 0
    reasons = [json.loads(path.read_text())["reason"] for path in layout.set_aside.glob("*.reason.json")]
    assert len(reasons) == 2


@pytest.mark.parametrize("how", ["lost", "torn"])
def test_repair_rebuilds_the_ledger(layout: Layout, how: str) -> None:
    for path in layout.state.glob("ledger.db-*"):
        path.unlink()
    if how == "lost":
        layout.ledger.unlink()
    else:
        layout.ledger.write_bytes(b"x" * 100)
    assert eyas("verify", "--project", layout.root).code == 14
    assert (
        "ledger rebuilt: 4 segments with 8 samples" in eyas("store", "repair", "--project", layout.root).out
    )
    assert eyas("verify", "--deep", "--project", layout.root).code == 0


def test_ls_compact_and_gc(layout: Layout) -> None:
    eyas("verify", "--sample", "50%", "--project", layout.root)
    listed = eyas("store", "ls", "--project", layout.root, "--json").json["segments"]
    assert [entry["samples"] for entry in listed] == [2, 2, 2, 2]
    assert sum(entry["verified_since_boot"] for entry in listed) == 2
    assert "4 segments, 8 samples" in eyas("store", "ls", "--project", layout.root).err
    would = eyas("store", "compact", "--dry-run", "--project", layout.root, "--json").json["would"]
    assert [len(group) for group in would] == [4]
    assert len(segments(layout)) == 4
    merged = eyas("store", "compact", "--project", layout.root)
    assert "4 segments became 1" in merged.err
    assert "next: eyas store gc" in merged.err
    assert len(segments(layout)) == 5
    eyas("store", "gc", "--project", layout.root)
    eyas("store", "gc", "--yes", "--dry-run", "--project", layout.root)
    assert len(segments(layout)) == 5
    assert len(eyas("store", "gc", "--yes", "--project", layout.root, "--json").json["removed"]) == 4
    assert len(segments(layout)) == 1
    assert eyas("verify", "--deep", "--project", layout.root).code == 0


def test_changing_verbs_need_the_lock(layout: Layout) -> None:
    with hold_lock(layout.state, "run"):
        for words in (["repair"], ["compact"], ["gc", "--yes"]):
            assert eyas("store", *words, "--project", layout.root).code == 11


def test_verify_loads_no_torch(layout: Layout) -> None:
    code = (
        "import sys; from eyas.cli.main import main\n"
        "try: main()\nexcept SystemExit as end: print('torch' in sys.modules, end.code)"
    )
    words = ["verify", "--deep", "--project", str(layout.root), "--json"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False 0"
    assert eyas_process("store", "ls", "--project", layout.root).wait() == 0
