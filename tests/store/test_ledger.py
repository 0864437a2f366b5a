from __future__ import annotations

import json
import secrets
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.base.errors import DamageFound, DataError, FormatTooNew, NotReady
from eyas.store.entry import SampleEntry
from eyas.store.ledger import SAMPLE_STATES, Ledger, StateCount
from eyas.store.ledger_history import Todo


def entry(number: int, length: int = 10, split: str = "train") -> SampleEntry:
    return SampleEntry(f"{number:032x}", length, length // 2, split, "tests")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(tmp_path / "ledger.db") as opened:
        yield opened


def states(ledger: Ledger) -> dict[str, int]:
    return {state: count.samples for state, count in ledger.counts().items() if count.samples}


def ids(*numbers: int) -> list[str]:
    return [f"{number:032x}" for number in numbers]


def test_life_of_a_sample(ledger: Ledger) -> None:
    assert ledger.add_samples([entry(1, 30), entry(2, 10), entry(3, 20)]) == 3
    assert ledger.add_samples([entry(3, 20), entry(4, 5)]) == 1
    assert ledger.pending() == ids(4, 2, 3, 1)
    assert ledger.pending("id") == ids(1, 2, 3, 4)
    assert ledger.pending_lengths()[0] == (ids(4)[0], 5)
    assert set(ledger.counts()) == set(SAMPLE_STATES)

    assert ledger.lease(ids(1, 2, 9), attempt=7) == ids(1, 2)
    assert ledger.lease(ids(1), attempt=8) == []
    assert states(ledger) == {"pending": 2, "in_flight": 2}
    commit = ledger.commit_segment("seg-a", 100, "r", [(ids(1)[0], 30, 15)])
    assert commit.stored == tuple(ids(1))
    assert ledger.counts()["stored"] == StateCount(1, 30)
    assert ledger.release_leases() == 1
    assert states(ledger) == {"pending": 3, "stored": 1}
    assert ledger.lease(ids(1), attempt=8) == []
    assert sum(count.samples for count in ledger.counts().values()) == 4


def test_failures_are_bounded(ledger: Ledger) -> None:
    ledger.add_samples([entry(1), entry(2)])
    sample = ids(1)[0]
    ledger.lease([sample], 1)
    assert ledger.fail_sample(sample, "timeout", 1, limit=3) == "failed"
    assert sample in ledger.pending()
    ledger.lease([sample], 1)
    assert ledger.fail_sample(sample, "nan", 1, limit=3) == "failed"
    ledger.lease([sample], 2)
    ledger.release_leases()
    assert states(ledger) == {"pending": 1, "failed": 1}  # a released lease does not forgive
    assert ledger.fail_sample(sample, "nan", 2, limit=3) == "set_aside"
    assert ledger.pending() == ids(2)
    (failed,) = ledger.failed_samples()
    assert (failed.id, failed.failures, failed.reason) == (sample, 3, "nan")
    ledger.set_aside_sample(ids(2)[0], "by hand")
    assert states(ledger) == {"set_aside": 2}
    assert ledger.retry_failed() == 2
    assert states(ledger) == {"pending": 2}
    assert ledger.fail_sample(sample, "again", 3, limit=3) == "failed"


def test_a_stored_sample_cannot_fail(ledger: Ledger) -> None:
    ledger.add_samples([entry(1)])
    ledger.commit_segment("seg-a", 1, "r", [(ids(1)[0], 10, 5)])
    with pytest.raises(DataError):
        ledger.fail_sample(ids(1)[0], "late", 1, 3)
    with pytest.raises(DataError):
        ledger.set_aside_sample(ids(1)[0], "late")
    with pytest.raises(DataError):
        ledger.fail_sample("unknown", "x", 1, 3)


def test_duplicates_stay_with_the_first_segment(ledger: Ledger) -> None:
    ledger.add_samples([entry(1), entry(2)])
    ledger.commit_segment("seg-a", 1, "r", [(ids(1)[0], 10, 5)])
    commit = ledger.commit_segment("seg-b", 1, "r", [(ids(1)[0], 10, 5), (ids(2)[0], 10, 5)])
    assert commit.duplicates == tuple(ids(1))
    assert commit.stored == tuple(ids(2))
    assert ledger.samples_of("seg-a") == ids(1)
    assert ledger.samples_of("seg-b") == ids(2)
    assert ledger.counts()["stored"].samples == 2
    with pytest.raises(DataError, match="of this name"):
        ledger.commit_segment("seg-b", 1, "r", [])


def test_samples_that_are_not_listed(ledger: Ledger) -> None:
    ledger.add_samples([entry(1), entry(2), entry(3, split="validation")])
    ledger.commit_segment("seg-a", 1, "r", [(i, 10, 5) for i in ids(1, 3, 8)])
    assert ledger.counts()["stored"].samples == 2  # 8 is stored, and nobody asked for it
    assert dict(ledger.stored()) == dict.fromkeys(ids(1, 3), "seg-a")
    assert dict(ledger.stored("validation")) == dict.fromkeys(ids(3), "seg-a")
    assert len(dict(ledger.stored(listed_only=False))) == 3

    assert ledger.replace_samples([entry(2), entry(4), entry(8)]) == 1
    assert states(ledger) == {"pending": 2, "stored": 1}
    assert dict(ledger.stored()) == dict.fromkeys(ids(8), "seg-a")
    ledger.replace_samples([entry(1)])
    assert states(ledger) == {"stored": 1}  # it was captured before and is not captured again


def test_release_segment(ledger: Ledger) -> None:
    ledger.add_samples([entry(1), entry(2)])
    ledger.commit_segment("seg-a", 1, "r", [(i, 10, 5) for i in ids(1, 2, 9)])
    assert ledger.release_segment("seg-a") == ids(1, 2, 9)
    assert states(ledger) == {"pending": 2}
    assert ledger.segments() == []
    assert ledger.segments(state=None)[0].state == "set_aside"
    ledger.commit_segment("seg-a", 1, "r", [(i, 10, 5) for i in ids(1, 2)])  # put back and adopted
    assert states(ledger) == {"stored": 2}


def test_verified_is_of_a_boot_and_a_mount(ledger: Ledger) -> None:
    ledger.commit_segment("seg-a", 1, "r", [])
    ledger.commit_segment("seg-b", 1, "r", [])
    assert ledger.unverified("boot-1", "disk") == ["seg-a", "seg-b"]
    ledger.note_verified(["seg-a"], "boot-1", "disk")
    assert ledger.unverified("boot-1", "disk") == ["seg-b"]
    assert ledger.unverified("boot-2", "disk") == ["seg-a", "seg-b"]
    assert ledger.unverified("boot-1", "other disk") == ["seg-a", "seg-b"]


def test_a_transaction_is_all_or_nothing(ledger: Ledger) -> None:
    def torn() -> Iterator[SampleEntry]:
        yield entry(1)
        raise RuntimeError("the source ended")

    with pytest.raises(RuntimeError):
        ledger.add_samples(torn())
    assert states(ledger) == {}
    with pytest.raises(RuntimeError):
        ledger.replace_samples(torn())
    ledger.add_samples([entry(2)])
    assert states(ledger) == {"pending": 1}


def test_attempts_stages_events_todos(ledger: Ledger, tmp_path: Path) -> None:
    ledger.mirror = tmp_path / "logs" / "events.jsonl"
    assert ledger.start_attempt({"pid": 1}) == 1
    assert ledger.start_attempt(at_least=7) == 7
    ledger.end_attempt(7, "done")
    first, second = ledger.attempts()
    assert first.ended_at is None
    assert first.detail == {"pid": 1}
    assert second.outcome == "done"

    assert ledger.stage_record("extract") is None
    ledger.record_stage("extract", recipe_hash="a", recipe={"x": [1]}, state="running")
    started = ledger.stages()["extract"].started_at
    ledger.record_stage("extract", recipe_hash="a", recipe={"x": [1]}, state="done", detail={"n": 3})
    record = ledger.stage_record("extract")
    assert record is not None
    assert (record.state, record.detail, record.recipe) == ("done", {"n": 3}, {"x": [1]})
    assert record.started_at == started
    assert record.finished_at is not None
    ledger.forget_stage("extract")
    assert ledger.stages() == {}

    ledger.event("canary", {"ok": True}, attempt=7)
    ledger.event("other")
    assert [event.kind for event in ledger.events()] == ["canary", "other"]
    assert ledger.events(kind="canary")[0].detail == {"ok": True}
    assert len(ledger.events(limit=1)) == 1
    lines = [json.loads(line) for line in ledger.mirror.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["canary", "other"]
    assert lines[0]["attempt"] == 7

    todo = Todo("t1", "start the server", "high", "pending", ("t0",), "", "2026-11-29T00:00:00Z")
    ledger.record_todo(todo)
    done = Todo(
        "t1", "start the server", "high", "completed", ("t0",), "health is 200", "2026-11-29T00:01:00Z"
    )
    ledger.record_todo(done)
    assert ledger.todos() == [done]
    assert [event.detail["status"] for event in ledger.events(kind="todo")] == ["pending", "completed"]


def test_a_full_disk_under_the_mirror_ends_nothing(ledger: Ledger) -> None:
    ledger.mirror = Path("/dev/full")
    ledger.event("kept")
    assert ledger.events()[0].kind == "kept"


def test_read_only_while_a_writer_writes(ledger: Ledger) -> None:
    ledger.add_samples([entry(1)])
    with ledger.transaction() as connection:
        connection.execute("DELETE FROM samples")
        with Ledger.open_read_only(ledger.path) as reader:
            assert states(reader) == {"pending": 1}
            with pytest.raises(Exception, match="readonly"):
                reader.add_samples([entry(2)])
    with Ledger.open_read_only(ledger.path) as reader:
        assert states(reader) == {}


def test_read_only_after_the_writer_closed_or_died(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger.open(path) as ledger:
        ledger.add_samples([entry(1)])
    with Ledger.open_read_only(path) as reader:
        assert states(reader) == {"pending": 1}
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom eyas.store.ledger import Ledger\n"
        "from eyas.store.entry import SampleEntry\n"
        "Ledger.open(Path(sys.argv[1])).add_samples([SampleEntry('x', 1, 1, 'train', 's')])\nos._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    with Ledger.open_read_only(path) as reader:
        assert states(reader) == {"pending": 2}


def test_missing_damaged_and_newer_ledgers(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with pytest.raises(NotReady):
        Ledger.open_read_only(path)
    with pytest.raises(NotReady):
        Ledger.open(path, create=False)
    assert not path.exists()

    for content in (b"not a database at all" * 300, b""):
        path.write_bytes(content)
        with pytest.raises(DamageFound) as caught:
            Ledger.open_read_only(path)
        assert caught.value.hint is not None
    path.write_bytes(b"not a database at all" * 300)
    with pytest.raises(DamageFound):
        Ledger.open(path)

    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE strangers (x)")
    with pytest.raises(DamageFound):
        Ledger.open(path)
    path.unlink()

    with Ledger.open(path) as ledger:
        ledger.set_meta("format", "3")
    for opener in (Ledger.open, Ledger.open_read_only):
        with pytest.raises(FormatTooNew):
            opener(path)


def test_damaged_pages_are_found(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger.open(path) as ledger:
        ledger.add_samples(entry(number) for number in range(5000))
        assert ledger.integrity_faults() == []
    content = bytearray(path.read_bytes())
    content[40960:45056] = bytes(4096)
    path.write_bytes(content)
    with Ledger.open(path) as ledger:
        assert ledger.integrity_faults()


def test_imports_only_the_standard_library() -> None:
    code = (
        "import sys\nimport eyas.store.ledger\n"
        "heavy = {'numpy', 'torch', 'pyarrow', 'xxhash', 'safetensors', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_hundred_thousand_samples(ledger: Ledger) -> None:
    started = time.process_time()
    num_samples = 100_000
    ledger.add_samples(
        SampleEntry(secrets.token_hex(16), number % 997 + 1, 1, "train", "s") for number in range(num_samples)
    )
    pending = ledger.pending()
    assert len(pending) == num_samples
    ledger.lease(pending[:1000], 1)
    ledger.commit_segment("seg-a", 1, "r", [(sample, 1, 1) for sample in pending[:1000]])
    assert states(ledger) == {"pending": 99_000, "stored": 1000}
    assert time.process_time() - started < 20  # about 3 s
