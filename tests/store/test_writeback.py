from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.store import commit, writeback
from eyas.store.commit import write_segment
from eyas.store.segment import encode_segment
from eyas.store.segment_header import read_header, segment_name
from tests.store.making import captured


def failing(code: int, times: int = 10**9) -> Callable[..., int]:
    left = [times]

    def call(*_: object) -> int:
        left[0] -= 1
        ctypes.set_errno(code)
        return 0 if left[0] < 0 else -1

    return call


def test_a_real_file(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        file.write(bytes(1 << 16))
        file.flush()
        writeback.start_writeback(file.fileno(), 0, 1 << 16)


def test_what_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "_sync_file_range", failing(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        writeback.start_writeback(0, 0, 1)
    for code, times in ((errno.ENOSYS, 10**9), (errno.ESPIPE, 10**9), (errno.EINTR, 3)):
        monkeypatch.setattr(writeback, "_sync_file_range", failing(code, times))
        writeback.start_writeback(0, 0, 1)
    monkeypatch.setattr(writeback, "_sync_file_range", None)
    writeback.start_writeback(0, 0, 1)


def test_ranges_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(commit, "_WRITEBACK_BYTES", 100)
    monkeypatch.setattr(commit, "_MAX_WRITE_BYTES", 64)
    monkeypatch.setattr(commit, "start_writeback", lambda _, start, size: ranges.append((start, size)))
    segment = encode_segment([captured(seed) for seed in range(4)], "r")
    path = tmp_path / segment_name(1, segment.checksum)
    write_segment(path, segment)
    assert read_header(path).num_bytes == segment.num_bytes
    assert len(ranges) > 10
    position = 0
    for start, size in ranges:
        assert start == position
        position += size
    assert segment.num_bytes - position < 100


def test_a_failed_range_abandons_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_WRITEBACK_BYTES", 100)
    monkeypatch.setattr(writeback, "_sync_file_range", failing(errno.ENOSPC))
    segment = encode_segment([captured(1)], "r")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_segment(tmp_path / segment_name(1, segment.checksum), segment)
    assert list(tmp_path.iterdir()) == []
