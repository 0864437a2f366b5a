"""Threads write; what fails is told; memory that waits is bounded."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas_engine.dump import Provenance
from eyas_engine.settings import EngineSettings
from eyas_engine.writer import DumpWriter


def provenance(name: str) -> Provenance:
    return Provenance(name, "r", "vllm 0", (1, 2), "after-norm", "1")


def settings(folder: Path, **more: int) -> EngineSettings:
    return EngineSettings(folder, (1, 2), 4, "1", **more)


def test_many_at_once_each_get_their_own_states(tmp_path: Path) -> None:
    writer = DumpWriter(settings(tmp_path))
    for i in range(40):
        states = torch.full((i + 1, 2, 3), float(i)), torch.full((i + 1, 3), -float(i))
        writer.submit(provenance(f"dump-{i:04d}"), [i] * (i + 1), 36 * (i + 1), lambda s=states: s)
    writer.close()
    assert len(list(tmp_path.iterdir())) == 40
    for i in range(40):
        tensors = load_file(tmp_path / f"dump-{i:04d}.dump")
        assert tensors["aux"].shape == (i + 1, 2, 3)
        assert bool((tensors["aux"] == i).all())
        assert bool((tensors["last"] == -i).all())
        assert tensors["tokens"].tolist() == [i] * (i + 1)


def test_what_fails_becomes_an_error_file(tmp_path: Path) -> None:
    writer = DumpWriter(settings(tmp_path))

    def broken() -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("the copy failed")

    writer.submit(provenance("dump-broken"), [1], 8, broken)
    short = torch.zeros(1, 2, 3), torch.zeros(1, 3)
    writer.submit(provenance("dump-too-short"), [1, 2], 8, lambda: short)
    whole = torch.zeros(2, 2, 3), torch.zeros(2, 3)
    writer.submit(provenance("dump-whole"), [1, 2], 8, lambda: whole)
    writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "dump-broken.err",
        "dump-too-short.err",
        "dump-whole.dump",
    ]
    told = json.loads((tmp_path / "dump-broken.err").read_text())
    assert told == {"name": "dump-broken", "why": "RuntimeError: the copy failed"}


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "dumps"
    writer = DumpWriter(settings(folder))
    states = torch.zeros(1, 2, 3), torch.zeros(1, 3)
    writer.submit(provenance("dump-nowhere"), [1], 8, lambda: states)
    writer.close()
    assert not folder.exists()
    assert "neither could that be reported" in caplog.text


def test_memory_that_waits_is_bounded(tmp_path: Path) -> None:
    writer = DumpWriter(settings(tmp_path, num_threads=1, pending_bytes=100))
    gate = threading.Event()
    states = torch.zeros(1, 2, 3), torch.zeros(1, 3)

    def held() -> tuple[torch.Tensor, torch.Tensor]:
        gate.wait(60)
        return states

    assert writer.has_room(10**9)  # one may always wait, however large
    writer.submit(provenance("dump-first"), [1], 80, held)
    assert writer.has_room(20)
    assert not writer.has_room(21)
    gate.set()
    writer.close()
    assert writer.has_room(10**9)
