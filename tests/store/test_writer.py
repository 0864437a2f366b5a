from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from eyas.base.errors import CaptureInvalid, DiskFull, EyasError, SegmentDamaged
from eyas.store import writer as writer_module
from eyas.store.commit import CommittedSegment, next_number
from eyas.store.ledger import Ledger
from eyas.store.reader import StoreReader
from eyas.store.segment import CapturedSample
from eyas.store.tensors import StoredTensor
from eyas.store.writer import StoreWriter
from tests.store.making import RECIPE, captured, same, text_sample


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(tmp_path / "ledger.db") as opened:
        opened.add_samples(text_sample(captured(seed)).entry for seed in range(20))
        yield opened


def open_writer(tmp_path: Path, ledger: Ledger, **options: object) -> StoreWriter:
    return StoreWriter(tmp_path / "segments", ledger, RECIPE.hash, **options)  # type: ignore[arg-type]


def test_written_samples_are_read_back(tmp_path: Path, ledger: Ledger) -> None:
    samples = [captured(seed) for seed in range(20)]
    commits: list[CommittedSegment] = []
    with open_writer(
        tmp_path, ledger, segment_bytes=5 * samples[0].nbytes, on_commit=commits.append
    ) as writer:
        assert all(writer.add(sample) for sample in samples)
    assert sum(len(commit.ids) for commit in commits) == 20
    assert len(commits) >= 3
    assert [record.name for record in ledger.segments()] == [commit.name for commit in commits]
    assert ledger.counts()["stored"].samples == 20
    for commit in commits:
        assert (tmp_path / "segments" / commit.name).stat().st_size == commit.num_bytes
        assert commit.num_tokens == 12 * len(commit.ids)

    reader = StoreReader(tmp_path / "segments", ledger, max_open=2)
    assert reader.ids() == sorted(sample.id for sample in samples)
    assert len(reader) == 20
    rng = np.random.default_rng(0)
    for index in rng.permutation(20):
        assert same(samples[index], reader.sample(samples[index].id, check=True))
    assert len(reader._open) == 2
    views = reader.get_many([sample.id for sample in samples])
    reader.close()
    assert all(same(one, other) for one, other in zip(samples, views, strict=True))
    first, again = views[0], reader.sample(samples[0].id)
    assert first.aux.array.dtype == np.uint16
    assert not again.aux.array.flags.owndata


def test_the_same_samples_make_the_same_bytes(tmp_path: Path, ledger: Ledger) -> None:
    contents = []
    for folder in ("a", "b"):
        with Ledger.open(tmp_path / f"{folder}.db") as other:
            with StoreWriter(tmp_path / folder, other, RECIPE.hash) as writer:
                for seed in range(5):
                    writer.add(captured(seed))
            contents.append({path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()})
    assert contents[0] == contents[1]


def test_a_segment_closes_by_age(tmp_path: Path, ledger: Ledger) -> None:
    committed = threading.Event()
    writer = open_writer(tmp_path, ledger, segment_seconds=0.05, on_commit=lambda _: committed.set())
    writer.add(captured(1))
    assert committed.wait(10)
    assert ledger.counts()["stored"].samples == 1
    writer.close()


def test_at_most_two_segments_in_memory(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    real = writer_module.commit_samples

    def slow(*arguments: object) -> CommittedSegment:
        gate.wait()
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(writer_module, "commit_samples", slow)
    size = captured(0).nbytes
    writer = open_writer(tmp_path, ledger, segment_bytes=2 * size)
    added = []

    def produce() -> None:
        for seed in range(8):
            writer.add(captured(seed))
            added.append(seed)

    producer = threading.Thread(target=produce)
    producer.start()
    time.sleep(0.3)
    assert len(added) == 4
    assert writer.num_unwritten == 4
    gate.set()
    producer.join(10)
    writer.close()
    assert ledger.counts()["stored"].samples == 8


def test_a_sample_in_memory_is_not_taken_twice(tmp_path: Path, ledger: Ledger) -> None:
    with open_writer(tmp_path, ledger) as writer:
        assert writer.add(captured(1))
        assert not writer.add(captured(1))
        writer.flush()
        assert writer.add(captured(1))  # a duplicate on disk is the ledger's to tell
    assert ledger.counts()["stored"].samples == 1
    assert len(ledger.segments()) == 2


def test_bad_samples_are_refused_and_the_rest_is_kept(tmp_path: Path, ledger: Ledger) -> None:
    good = captured(1)
    with open_writer(tmp_path, ledger) as writer:
        writer.add(good)
        with pytest.raises(CaptureInvalid, match="fit together"):
            writer.add(CapturedSample("0" * 32, good.tokens, good.spans, good.aux, good.last))
        for other in (captured(2, width=9), captured(3, num_layers=3), captured(4, dtype="F32")):
            with pytest.raises(CaptureInvalid, match="differs"):
                writer.add(other)
    assert ledger.counts()["stored"].samples == 1


def test_arrays_that_are_not_contiguous(tmp_path: Path, ledger: Ledger) -> None:
    sample = captured(1)
    aux = StoredTensor("BF16", np.asfortranarray(sample.aux.array))
    with open_writer(tmp_path, ledger) as writer:
        writer.add(CapturedSample(sample.id, sample.tokens[::1], sample.spans, aux, sample.last))
    assert same(sample, StoreReader(tmp_path / "segments", ledger).sample(sample.id, check=True))


def test_an_error_surfaces_once_and_the_next_call_tries_again(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = writer_module.commit_samples
    failures = [DiskFull("no room"), DiskFull("still no room")]

    def failing(*arguments: object) -> CommittedSegment:
        if failures:
            raise failures.pop(0)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(writer_module, "commit_samples", failing)
    writer = open_writer(tmp_path, ledger)
    writer.add(captured(1))
    with pytest.raises(DiskFull, match=r"^no room"):
        writer.flush()
    assert writer.num_unwritten == 1
    with pytest.raises(DiskFull, match="still"):
        writer.flush()
    writer.flush()
    assert writer.num_unwritten == 0
    writer.add(captured(2))
    writer.close()
    writer.close()
    assert ledger.counts()["stored"].samples == 2
    with pytest.raises(ValueError, match="closed"):
        writer.add(captured(3))


def test_close_raises_and_ends_the_thread(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> CommittedSegment:
        raise EyasError("broken")

    monkeypatch.setattr(writer_module, "commit_samples", failing)
    before = threading.active_count()
    writer = open_writer(tmp_path, ledger)
    writer.add(captured(1))
    with pytest.raises(EyasError, match="broken"):
        writer.close()
    writer.close()
    assert threading.active_count() == before


def test_the_writers_own_failure_does_not_hide_the_cause(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> CommittedSegment:
        raise EyasError("broken")

    def work() -> None:
        with open_writer(tmp_path, ledger) as writer:
            writer.add(captured(1))
            raise RuntimeError("mine")

    monkeypatch.setattr(writer_module, "commit_samples", failing)
    with pytest.raises(RuntimeError, match="mine"):
        work()


def test_an_error_of_the_callback_surfaces_and_the_segment_stays(tmp_path: Path, ledger: Ledger) -> None:
    def broken(_: CommittedSegment) -> None:
        raise RuntimeError("callback")

    writer = open_writer(tmp_path, ledger, on_commit=broken)
    writer.add(captured(1))
    with pytest.raises(RuntimeError, match="callback"):
        writer.flush()
    assert ledger.counts()["stored"].samples == 1
    assert writer.num_unwritten == 0
    writer.close()
    assert len(ledger.segments()) == 1


def test_numbers_are_never_used_again(tmp_path: Path, ledger: Ledger) -> None:
    folder = tmp_path / "segments"
    with open_writer(tmp_path, ledger) as writer:
        writer.add(captured(1))
    name = ledger.segments()[0].name
    (folder / name).unlink()
    ledger.release_segment(name)
    assert next_number(folder, ledger) == 2
    (folder / ".seg-00000007-01234567.safetensors.99.tmp").write_bytes(b"x")
    assert next_number(folder, ledger) == 8
    with open_writer(tmp_path, ledger) as writer:
        assert not list(folder.glob(".*.tmp"))  # swept
        writer.add(captured(1))
    assert ledger.segments()[0].name.startswith("seg-00000002-")


def test_reading_what_is_not_there(tmp_path: Path, ledger: Ledger) -> None:
    with open_writer(tmp_path, ledger) as writer:
        writer.add(captured(1))
        writer.flush()
        writer.add(captured(2))
    first, second = (record.name for record in ledger.segments())
    folder = tmp_path / "segments"
    reader = StoreReader(folder, ledger)
    assert "0" * 32 not in reader
    with pytest.raises(KeyError):
        reader.sample("0" * 32)
    (folder / first).unlink()
    with pytest.raises(SegmentDamaged, match="missing") as caught:
        reader.sample(captured(1).id)
    assert first in str(caught.value.where)
    wrong = StoreReader(folder, {captured(1).id: second})
    with pytest.raises(SegmentDamaged, match="misses a sample"):
        wrong.sample(captured(1).id)
    (folder / second).write_bytes((folder / second).read_bytes()[:-1])
    with pytest.raises(SegmentDamaged):
        reader.sample(captured(2).id)


def test_threads_may_share_a_reader(tmp_path: Path, ledger: Ledger) -> None:
    samples = [captured(seed) for seed in range(20)]
    with open_writer(tmp_path, ledger, segment_bytes=samples[0].nbytes) as writer:
        for sample in samples:
            writer.add(sample)
    reader = StoreReader(tmp_path / "segments", ledger, max_open=3)
    wrong: list[str] = []

    def read(seed: int) -> None:
        for index in np.random.default_rng(seed).integers(0, 20, 200):
            if not same(samples[index], reader.sample(samples[index].id)):
                wrong.append(samples[index].id)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
