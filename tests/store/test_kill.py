"""kill -9 of a writing process at random instants: what was acknowledged is whole, and a rerun completes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eyas.store import scrub
from eyas.store.ledger import Ledger
from eyas.store.reader import StoreReader
from tests.store.making import captured, project, same

SAMPLES = [captured(seed, length=200, spans=((5, 200),), width=64) for seed in range(120)]
NUM_KILLS = 10

PROGRAM = """
import sys
import time
from pathlib import Path
from eyas.base.layout import Layout
from eyas.store.scrub import open_or_rebuild, quick, repair
from eyas.store.writer import StoreWriter
from tests.store.making import RECIPE, captured

layout = Layout(Path(sys.argv[1]))
ledger, _ = open_or_rebuild(layout)
repair(layout, ledger, quick(layout, ledger))
ledger.release_leases()
left = set(ledger.lease(ledger.pending(), ledger.start_attempt()))

def acknowledge(commit):
    for sample in commit.ids:
        print(sample, flush=True)

print("started", flush=True)
with StoreWriter(layout.segments, ledger, RECIPE.hash, 300_000, on_commit=acknowledge) as writer:
    for seed in range(120):
        sample = captured(seed, length=200, spans=((5, 200),), width=64)
        if sample.id in left:
            time.sleep(0.002)
            writer.add(sample)
"""


def run_and_kill(root: Path, num_lines: int, seconds: float) -> tuple[int, list[str]]:
    """Start the writer, kill it ``seconds`` after it acknowledged so many samples.

    Counting from what it did, not from its start: a busy machine must not make the kills harmless.
    Returns its exit status and what it acknowledged.
    """
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(root)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        acknowledged = [process.stdout.readline().strip() for _ in range(num_lines)]
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.read().split()
        return process.wait(), acknowledged


def test_killed_at_random_instants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    layout = project(tmp_path, SAMPLES)
    by_id = {sample.id: sample for sample in SAMPLES}
    acknowledged: set[str] = set()
    num_killed = 0
    for number in range(NUM_KILLS):
        if number == NUM_KILLS // 2:
            layout.ledger.unlink()
            for suffix in ("-wal", "-shm"):
                layout.ledger.with_name(layout.ledger.name + suffix).unlink(missing_ok=True)
        status, lines = run_and_kill(tmp_path, rng.randrange(20), rng.uniform(0, 0.05))
        num_killed += status == -signal.SIGKILL
        acknowledged |= {line for line in lines if len(line) == 32}
        assert [fault for fault in scrub.quick(layout) if fault.is_damage] == []
        with Ledger.open_read_only(layout.ledger) as ledger:
            reader = StoreReader(layout.segments, ledger)
            assert acknowledged <= set(reader.ids())
            assert all(same(by_id[sample], reader.sample(sample, check=True)) for sample in reader.ids())
    num_before = len(acknowledged)
    assert num_killed > 0
    assert num_before > 0
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.DEVNULL, check=False
    )
    with capsys.disabled():
        print(
            f"\nkill seed {seed}: {num_killed} kills, {num_before} of {len(SAMPLES)} samples before the end"
        )
    assert finished.returncode == 0
    assert scrub.deep(layout) == []
    with Ledger.open_read_only(layout.ledger) as ledger:
        assert ledger.counts()["stored"].samples == len(SAMPLES)
        reader = StoreReader(layout.segments, ledger)
        assert all(same(sample, reader.sample(sample.id, check=True)) for sample in SAMPLES)
        assert sum(record.num_samples for record in ledger.segments()) == len(SAMPLES)
