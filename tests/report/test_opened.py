"""The Python interface, against the files read by other libraries."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import eyas
from eyas.base.errors import DataError, NoProject, SegmentDamaged
from tests.cli.command import eyas as command

NOTEBOOK = Path(__file__).parents[2] / "docs" / "project.ipynb"


def test_samples_are_those_of_the_ledger(finished: Path) -> None:
    table = eyas.open(finished).samples()
    with sqlite3.connect(f"file:{finished / 'state' / 'ledger.db'}?mode=ro", uri=True) as ledger:
        expected = dict(ledger.execute("SELECT id, length FROM samples"))
        segments = dict(ledger.execute("SELECT id, segment FROM samples"))
    rows = {row["id"]: row for row in table.to_pylist()}
    assert {name: row["length"] for name, row in rows.items()} == expected
    assert {name: row["segment"] for name, row in rows.items()} == segments
    assert {row["domain"] for row in rows.values()} == {"even", "odd"}
    assert {row["state"] for row in rows.values()} == {"stored"}


def test_states_are_those_in_the_segments(finished: Path) -> None:
    project = eyas.open(finished)
    tensors = {}
    for path in (finished / "store" / "segments").glob("*.safetensors"):
        tensors |= load_file(path)
    ids = project.stored_ids()
    assert sorted(name.removesuffix("/aux") for name in tensors if name.endswith("/aux")) == ids
    for name in ids:
        states = project.states(name)
        np.testing.assert_array_equal(states.aux, tensors[f"{name}/aux"])
        np.testing.assert_array_equal(states.last, tensors[f"{name}/last"])
        np.testing.assert_array_equal(states.tokens, tensors[f"{name}/tokens"])
        supervised = {token for start, end in states.spans for token in range(start, end)}
        assert states.last_rows.tolist() == [t - 1 for t in sorted(supervised) if t >= 1]
    sample = project.sample(ids[0])
    np.testing.assert_array_equal(sample.tokens, tensors[f"{ids[0]}/tokens"])
    np.testing.assert_array_equal(np.array(sample.spans), tensors[f"{ids[0]}/spans"])


def test_training_is_the_metrics_file(finished: Path) -> None:
    lines = (finished / "drafter" / "metrics.jsonl").read_text().splitlines()
    losses = {row["step"]: row["loss"] for row in map(json.loads, lines) if row["kind"] == "train"}
    table = eyas.open(finished).training()
    assert (
        dict(zip(table.column("step").to_pylist(), table.column("loss").to_pylist(), strict=True)) == losses
    )


def test_status_and_events_are_those_of_the_command_line(finished: Path) -> None:
    project = eyas.open(finished)
    stages = command("status", "--project", finished, "--json").json["stages"]
    assert [(s.name, s.state, s.bytes) for s in project.status().stages] == [
        (s["name"], s["state"], s["bytes"]) for s in stages
    ]
    assert project.events(1).num_rows == len(
        (finished / "logs/attempt-0001/events.jsonl").read_text().splitlines()
    )
    assert project.attempts().column("outcome").to_pylist() == ["done"]


def test_errors_say_what_is_missing(fresh: Path, copy: Path, tmp_path: Path) -> None:
    with pytest.raises(NoProject):
        eyas.open(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no samples yet"):
        eyas.open(fresh).samples()
    with pytest.raises(KeyError):
        eyas.open(copy).states("0" * 32)
    project = eyas.open(copy)
    name = project.stored_ids()[0]
    segment = next(row for row in project.samples().to_pylist() if row["id"] == name)["segment"]
    path = copy / "store" / "segments" / segment
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    damaged = 0
    for stored in project.stored_ids():
        try:
            project.states(stored)
        except SegmentDamaged:
            damaged += 1
    assert damaged >= 1


def test_importing_eyas_loads_nothing_heavy() -> None:
    script = "import sys, eyas; print(sorted({'numpy', 'pyarrow', 'torch', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_notebook_of_the_docs_runs(
    finished: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("EYAS_PROJECT", str(finished))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs do not belong into git"
    manager = _here_kernel(tmp_path)
    client = nbclient.NotebookClient(notebook, timeout=600, startup_timeout=300, km=manager)
    client.execute()
    said = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert "10 conversations" in said
    assert "'done'" in said


def _here_kernel(folder: Path) -> object:
    """A kernel of this very Python, whatever kernels the machine has registered."""
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    manager = AsyncKernelManager(kernel_name="python3", connection_file=str(folder / "kernel.json"))
    manager._kernel_spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        display_name="here", language="python",
    )  # fmt: skip
    return manager
