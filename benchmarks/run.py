"""Measure one number side by side with its baseline: ``python benchmarks/run.py NAME``, or ``--list``.

Every other file of this folder is a benchmark: it has NAME, DESCRIPTION, ``add_arguments(parser)`` and
``run(arguments)``, which returns ``{"name", "value", "unit", "baseline", "ratio", "details"}``. What it
says on the way goes to stderr; that object is the last line of stdout.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER.parent / "src"
FIELDS = ("name", "value", "unit", "baseline", "ratio", "details")


def load_benchmarks() -> dict[str, ModuleType]:
    """The benchmarks of this folder by name; loading one is cheap."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.name in ("run.py", "__init__.py"):
            continue
        spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        found[module.NAME] = module
    return found


def main(words: list[str] | None = None) -> int:
    """Run what the command line names; returns the exit code."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if str(SOURCE) not in sys.path:
        sys.path.insert(0, str(SOURCE))
    benchmarks = load_benchmarks()
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--list", action="store_true", help="name all benchmarks")
    names = parser.add_subparsers(dest="name", metavar="NAME")
    for name, module in benchmarks.items():
        module.add_arguments(names.add_parser(name, help=module.DESCRIPTION, description=module.DESCRIPTION))
    arguments = parser.parse_args(words)
    if arguments.list or arguments.name is None:
        for name, module in benchmarks.items():
            print(f"{name:12} {module.DESCRIPTION}")
        return 0
    result = benchmarks[arguments.name].run(arguments)
    print(json.dumps({field: result[field] for field in FIELDS}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
