"""Dump folders are swept by owner and age; what belongs to others stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eyas.base.errors import TargetError
from eyas.base.process import ProcessIdentity
from eyas.targets.serving.dumps import (
    OWNER_NAME,
    make_dump_folder,
    new_owner,
    project_id,
    read_owner,
    sweep_dumps,
    sweep_orphans,
)


def ended_process() -> ProcessIdentity:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(child.pid)
    child.communicate(b"\n")
    return identity


def folder_of(base: Path, process: ProcessIdentity, project: str = "mine0000mine0000") -> Path:
    folder = make_dump_folder(base, project, new_owner(project, process, "vllm", "1.5"))
    (folder / "attempt1-abcdef.dump").write_bytes(b"x" * 10)
    (folder / "attempt1-abcdeg.err").write_bytes(b"x")
    return folder


def test_only_folders_of_this_project_with_no_server_are_swept(tmp_path: Path) -> None:
    base, gone, here = tmp_path / "base", ended_process(), ProcessIdentity.of(os.getpid())
    place = base / "eyas-mine0000mine0000"
    dead, alive = folder_of(base, gone), folder_of(base, here)
    foreign = folder_of(base, gone, "other000other000")
    disguised = folder_of(base, gone)  # in our place, with somebody else's owner file
    owner = json.loads((disguised / OWNER_NAME).read_text())
    (disguised / OWNER_NAME).write_text(json.dumps(owner | {"project": "other000other000"}))
    elsewhere = folder_of(base, gone)
    owner = json.loads((elsewhere / OWNER_NAME).read_text())
    (elsewhere / OWNER_NAME).write_text(json.dumps(owner | {"host": "another-machine"}))
    unowned = place / "unowned"
    unowned.mkdir()
    (unowned / "attempt1-abcdef.dump").write_bytes(b"x")
    with_notes = folder_of(base, gone)
    (with_notes / "notes.txt").write_text("mine")
    link = place / "link"
    link.symlink_to(foreign)

    assert sweep_orphans(base, "mine0000mine0000") == 4

    assert not dead.exists()
    for kept in (alive, foreign, disguised, elsewhere):
        assert len(list(kept.glob("attempt1-*"))) == 2
    assert len(list(unowned.iterdir())) == 1
    assert [p.name for p in with_notes.iterdir()] == ["notes.txt"]


def test_a_reused_process_id_is_no_owner(tmp_path: Path) -> None:
    here = ProcessIdentity.of(os.getpid())
    folder = folder_of(tmp_path, ProcessIdentity(here.pid, here.started_ticks - 1, here.boot))
    earlier_boot = folder_of(tmp_path, ProcessIdentity(here.pid, here.started_ticks, "another boot"))
    owner = json.loads((earlier_boot / OWNER_NAME).read_text())
    (earlier_boot / OWNER_NAME).write_text(json.dumps(owner | {"boot_id": "another boot"}))
    assert sweep_orphans(tmp_path, "mine0000mine0000") == 4
    assert not folder.exists()
    assert not earlier_boot.exists()
    assert not (tmp_path / "eyas-mine0000mine0000").exists()


def test_sweeping_by_age_leaves_what_is_waited_for(tmp_path: Path) -> None:
    now = time.time()
    for name, age in (
        ("old-waited-for.dump", 900),
        ("old-left.dump", 900),
        ("old-left.tmp", 900),
        ("new.dump", 5),
    ):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (now - age, now - age))
    (tmp_path / "readme.md").write_text("mine")
    os.utime(tmp_path / "readme.md", (now - 9999, now - 9999))
    assert sweep_dumps(tmp_path, {"old-waited-for"}, 600) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.dump", "old-waited-for.dump", "readme.md"]


def test_an_owner_file_that_is_not_ours(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"eyas_owner": 2}', '{"eyas_owner": 1, "project": "x"}', "\x00\xff"):
        (tmp_path / OWNER_NAME).write_text(text)
        assert read_owner(tmp_path) is None


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    owner = new_owner("p" * 16, ProcessIdentity.of(os.getpid()), "vllm", "1")
    with pytest.raises(TargetError, match="cannot be made"):
        make_dump_folder(tmp_path / "file", "p" * 16, owner)


def test_a_project_keeps_its_identity(tmp_path: Path) -> None:
    first = project_id(tmp_path / "state")
    assert project_id(tmp_path / "state") == first
    assert project_id(tmp_path / "other") != first
