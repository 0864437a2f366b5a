"""Everyday settings of all tests."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# a script's background job starts with SIGINT ignored, and so would the programs that tests interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# how long an example takes says more about the machine than about the code
settings.register_profile("eyas", deadline=None)
settings.load_profile("eyas")

SLOW = ("faults", "recovery", "docs", "stages", "cli", "targets")
"""Folders whose files take minutes: given out first, so that no process is left with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(item.config.rootpath).parts[1]
        return SLOW.index(folder) if folder in SLOW else len(SLOW)

    items.sort(key=place)
