"""Measure one number side by side with its baseline: ``python benchmarks/run.py NAME``, or ``--list``.

Every other file of this folder is a benchmark of its own name, described by the first line of its
docstring. Its ``run`` returns ``{"name", "value", "unit", "baseline", "ratio", "details"}``; where the file
has ``add_arguments(parser)``, ``run`` is given the parsed arguments. What it says on the way goes to
stderr; that object is the last line of stdout.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER.parent / "src"
FIELDS = ("name", "value", "unit", "baseline", "ratio", "details")


def describe() -> dict[str, str]:
    """What each benchmark measures, by name; read from the files, since importing one may load torch."""
    described = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.name not in (Path(__file__).name, "__init__.py"):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            described[path.stem] = text.partition("\n\n")[0].replace("\n", " ").rstrip(".")
    return described


def main(words: list[str] | None = None) -> int:
    """Run what the command line names; returns the exit code."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The script's own folder would let a benchmark hide a package of its name.
    sys.path[:] = [str(SOURCE), str(FOLDER.parent), *(p for p in sys.path if p != str(FOLDER))]
    import_module("eyas.base.threads").wait_briefly()  # as a run does
    described = describe()
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py", description="Measure one number side by side with its baseline."
    )
    parser.add_argument("--list", action="store_true", help="name all benchmarks")
    parser.add_argument("name", nargs="?", choices=[*described], metavar="NAME", help="what to measure")
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="options; NAME --help shows them"
    )
    chosen = parser.parse_args(words)
    if chosen.list or chosen.name is None:
        for name, text in described.items():
            print(f"{name:12} {text}")
        return 0
    module = import_module(f"benchmarks.{chosen.name}")
    own = argparse.ArgumentParser(prog=f"benchmarks/run.py {chosen.name}", description=described[chosen.name])
    takes_arguments = hasattr(module, "add_arguments")
    if takes_arguments:
        module.add_arguments(own)
    arguments = own.parse_args(chosen.rest)
    result = module.run(arguments) if takes_arguments else module.run()
    print(json.dumps({field: result[field] for field in FIELDS}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
