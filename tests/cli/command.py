"""The command line as a person calls it, in a process of its own or in this one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.cli.main import main


@dataclass(frozen=True)
class Finished:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def eyas(*words: str | Path) -> Finished:
    """Run a verb in this process (torch stays loaded)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Finished(code, out.getvalue(), err.getvalue())


def eyas_process(*words: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Start a verb in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "eyas", *[str(word) for word in words]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})},
        **options,
    )
