"""Faults of a project's own files, of its target and of what it needs outside."""

from __future__ import annotations

import json
import os
import shutil

from eyas.recovery.doctor import diagnose
from eyas.stages.regenerate.answers import part_files
from tests.recovery.conftest import scene_of
from tests.recovery.planted import World, fault, flip, truncate


@fault("segment-damaged")
def segment_truncated(world: World) -> None:
    truncate(world.segment())


@fault("segment-damaged")
def segment_emptied(world: World) -> None:
    os.truncate(world.segment(1), 0)


@fault("segment-damaged")
def segment_header_flipped(world: World) -> None:
    flip(world.segment(), 40)


@fault("segment-damaged")
def segment_content_flipped(world: World) -> None:
    flip(world.segment())
    world.options["deep"] = True


@fault("store-changed")
def segment_changed_by_somebody(world: World) -> None:
    world.segment().write_bytes(world.segment().read_bytes())


@fault("segment-found-damaged")
def segment_found_damaged_by_an_earlier_look(world: World) -> None:
    flip(world.segment())
    assert "segment-damaged" in {f.code for f in diagnose(scene_of(world.root, deep=True)).findings}


@fault("segment-missing")
def segment_gone(world: World) -> None:
    world.segment().unlink()


@fault("segment-unknown")
def segment_unknown(world: World) -> None:
    name = world.segment().name
    world.sql(
        f"UPDATE samples SET state = 'pending', segment = NULL WHERE segment = '{name}'",
        f"DELETE FROM segments WHERE name = '{name}'",
    )


@fault("foreign-file")
def foreign_file(world: World) -> None:
    (world.root / "store" / "segments" / "notes.txt").write_text("mine")


@fault("store-recipe-damaged")
def store_recipe_gone(world: World) -> None:
    (world.root / "store" / "store.json").unlink()


@fault("store-recipe-damaged")
def store_recipe_changed(world: World) -> None:
    path = world.root / "store" / "store.json"
    path.write_text(path.read_text().replace("post_norm", "pre_norm"))


@fault("older-layout")
def older_layout(world: World) -> None:
    folder = world.root / "store" / "rows_0-4"
    folder.mkdir()
    for name in ("0.pt", "1.pt", "2.pt"):
        (folder / name).write_bytes(b"" if name == "2.pt" else b"x")


@fault("store-unhashed")
def written_before_this_boot(world: World) -> None:
    world.sql("UPDATE segments SET committed_at = '2020-01-01T00:00:00.000Z'")


@fault("store-moved")
def store_on_another_disk(world: World) -> None:
    world.sql("UPDATE meta SET value = '9:9 abc /dev/sdz' WHERE key = 'store_place'")


@fault("store-not-mounted")
def store_not_mounted(world: World) -> None:
    world.sql("UPDATE meta SET value = '9:9 abc /dev/sdz' WHERE key = 'store_place'")
    shutil.rmtree(world.root / "store")
    (world.root / "store" / "segments").mkdir(parents=True)


@fault("ledger-missing")
def ledger_gone(world: World) -> None:
    (world.root / "state" / "ledger.db").unlink()


@fault("ledger-damaged")
def ledger_overwritten(world: World) -> None:
    (world.root / "state" / "ledger.db").write_bytes(b"not a ledger" * 400)


@fault("samples-missing")
def two_samples_missing(world: World) -> None:
    name = world.segment().name
    world.sql(f"DELETE FROM samples WHERE id IN (SELECT id FROM samples WHERE segment <> '{name}' LIMIT 2)")


@fault("samples-damaged")
def prompts_damaged(world: World) -> None:
    truncate(next((world.root / "data" / "prompts").glob("*.jsonl")))


@fault("answers-damaged")
def samples_flipped(world: World) -> None:
    flip(world.root / "data" / "samples" / "part-00000.parquet", 60)
    world.options["deep"] = True


@fault("answers-damaged")
def answers_damaged(world: World) -> None:
    truncate(part_files(world.root / "data" / "answers")[0])


@fault("statistics-damaged")
def statistics_gone(world: World) -> None:
    (world.root / "data" / "stats.json").unlink()


@fault("statistics-damaged")
def statistics_do_not_add_up(world: World) -> None:
    path = world.root / "data" / "stats.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"kept": values["kept"] - 1}))


@fault("drafter-damaged")
def checkpoint_truncated(world: World) -> None:
    truncate(world.checkpoint() / "model.safetensors")


@fault("drafter-damaged")
def checkpoint_without_seal(world: World) -> None:
    (world.root / "drafter" / "checkpoints" / "step-00000001").mkdir()


@fault("drafter-damaged")
def vocabulary_file_gone(world: World) -> None:
    next(p for p in (world.root / "drafter" / "vocabulary").iterdir() if p.name != "seal.json").unlink()


@fault("evaluation-damaged")
def evaluation_changed(world: World) -> None:
    path = world.root / "reports" / "evaluation.json"
    path.write_text(path.read_text().replace('"rounds"', '"round5"'))


@fault("export-damaged")
def export_truncated(world: World) -> None:
    truncate(world.root / "exports" / "eagle3" / "model.safetensors")


@fault("weights-missing")
def weights_gone(world: World) -> None:
    (world.root.parent / "model" / "model.safetensors").unlink()


@fault("weights-changed")
def weights_flipped(world: World) -> None:
    flip(world.root.parent / "model" / "model.safetensors")
    world.options["deep"] = True


@fault("recipe-changed")
def recipe_changed(world: World) -> None:
    world.configure("[extract]\n", "[extract]\naux_layers = [1, 2, 3]\n")


@fault("file-missing")
def script_wiped(world: World) -> None:
    (world.root.parent / "outside" / "extract-helper.py").unlink()


@fault("file-changed")
def script_changed(world: World) -> None:
    (world.root.parent / "outside" / "extract-helper.py").write_text("something else\n")


@fault("file-source-lost")
def script_and_its_copy_gone(world: World) -> None:
    (world.root / "helper.py").unlink()


@fault("source-missing")
def source_gone(world: World) -> None:
    (world.root / "prompts.jsonl").unlink()
