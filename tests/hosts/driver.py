"""A library that plays the GPUs' driver for programs that are started with it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def build_driver(folder: Path) -> Path:
    """Compile the library; the folder is for ``LD_LIBRARY_PATH``, what it shows is in ``FAKE_GPUS``."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the library that plays the driver")
    source = Path(__file__).with_name("fake_nvml.c")
    words = [compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(source)]
    subprocess.run(words, check=True, timeout=120)
    return folder
