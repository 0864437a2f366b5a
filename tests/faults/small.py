"""The smallest project that goes through all stages, and what the fault tests share."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.projects import make_project

LONG = bool(os.environ.get("EYAS_LONG_FAULTS"))
# the short form repeats one seed, so that a red run means a change; the long form explores
SEED = int(os.environ.get("EYAS_SEED", random.SystemRandom().randrange(10**6) if LONG else 20261129))

NUM_PARTS = 20


def _parts() -> list[int]:
    if not LONG:
        return [0]
    first, _, last = os.environ.get("EYAS_PARTS", f"0-{NUM_PARTS - 1}").partition("-")
    return list(range(int(first), int(last or first) + 1))


PARTS = _parts()
"""The long form is 20 parts that need nothing of each other; ``EYAS_PARTS=3-5`` runs some of them."""


def rng_of(part: int) -> random.Random:
    """Where a part's faults come from: the seed and the part alone."""
    return random.Random(SEED if part == 0 else f"{SEED} {part}")


def numbers_of(part: int, short_stride: int = 1) -> Iterator[int]:
    """1, 2, 3, ... dealt out to the parts; in the short form every ``short_stride``-th."""
    return itertools.count(part + 1, NUM_PARTS if LONG else short_stride)


CHANGES = {
    "epochs = 2": "epochs = 1",
    "validations = 2": "validations = 1",
    "max_new_tokens = 8": "max_new_tokens = 4",
    "segment_seconds = 0.05": "segment_seconds = 0.01",
    "[evaluate]": "[evaluate]\nlimit = 1",
}
DISK = """
[disk]
reserve = "0"
warn = "0"
look_again_seconds = 0.05
"""


def small_project(root: Path, model: Path, *, count: int = 5) -> Path:
    """A project of a few samples that runs through in a second or two."""
    make_project(root, model, count=count, more=DISK)
    text = (root / "eyas.toml").read_text()
    for old, new in CHANGES.items():
        assert old in text
        text = text.replace(old, new)
    (root / "eyas.toml").write_text(text)
    return root


def command(*words: str | Path) -> None:
    """Run a system command. Raises subprocess.CalledProcessError."""
    subprocess.run([str(word) for word in words], check=True, capture_output=True, timeout=120)


@contextmanager
def mounted(folder: Path, *words: str | Path) -> Iterator[Path]:
    """Mount something on ``folder`` (made when missing); skips the test aloud where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        command("mount", *words, folder)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", b"") or str(error).encode()
        pytest.skip(f"mounts are not possible here: {detail.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


@contextmanager
def mounted_image(folder: Path, image: Path) -> Iterator[Path]:
    """A filesystem in an image file, on a block device that owns up to what it could not write.

    The kernel's loop device calls a write done of which its file took a part: on storage that runs full,
    fsync then succeeds for data that is nowhere. A request of one page is written as a whole or not.
    """
    with mounted(folder, "-o", "loop", image):
        source = subprocess.check_output(["findmnt", "--noheadings", "--output", "SOURCE", folder], text=True)
        limit = Path("/sys/block") / Path(source.strip()).name / "queue/max_sectors_kb"
        before = limit.read_text()
        limit.write_text(str(os.sysconf("SC_PAGESIZE") // 1024))
        try:
            yield folder
        finally:
            limit.write_text(before)


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A filesystem in memory with limits."""
    with mounted(folder, "-t", "tmpfs", "-o", options, "none"):
        yield folder


def remount(folder: Path, options: str) -> None:
    """Change the limits of a mounted filesystem."""
    command("mount", "-o", f"remount,{options}", folder)
