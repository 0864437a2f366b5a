"""Write docs/reference.md and docs/status.schema.json from the code.

Run it after a change (`make docs`); a test compares the file with what this gives.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import sys
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console

from eyas.base import errors
from eyas.cli.main import VERB_NAMES, build_app
from eyas.cli.verbs.config import documented_keys
from eyas.recovery.doctor import CHECKS
from eyas.report.status import ProjectStatus
from eyas.targets.server.faults import FAULTS

SOURCE = Path(__file__).parents[1] / "src" / "eyas"
REFERENCE = Path(__file__).with_name("reference.md")
STATUS_SCHEMA = Path(__file__).with_name("status.schema.json")
_EXIT_CODES = (
    ("0", "done"),
    ("1", "unexpected error; the traceback is saved and its path printed"),
    ("2", "wrong words, configuration, data or recipe"),
    ("3", "done, some samples set aside"),
    ("10", "no project here"),
    ("11", "another writer holds the project"),
    ("12", "not enough disk"),
    ("13", "server unreachable"),
    ("14", "damage found"),
    ("15", "a gate failed"),
    ("130, 143", "stopped by SIGINT or SIGTERM, state saved"),
)


def reference() -> str:
    """The text of the reference."""
    parts = ["# Reference\n\nGenerated from the code by `make docs`.\n"]
    shared = "`--project DIR`, `--json`, `--host NAME` and `--set key=value`"
    parts.append(f"## Verbs\n\nEvery verb about a project takes {shared}.\n")
    parts += [f"### eyas {name}\n\n```\n{help_text(name)}\n```\n" for name in VERB_NAMES]
    parts.append("## Configuration\n\n`eyas.toml`; any key can be set once with `--set`.\n")
    parts.append("| key | default | meaning |\n|---|---|---|")
    parts += [f"| `{key}` | `{default}` | {_cell(meaning)} |" for key, default, meaning in documented_keys()]
    parts.append("\n## Exit codes\n\n| code | meaning |\n|---|---|")
    parts += [f"| {code} | {meaning} |" for code, meaning in _EXIT_CODES]
    parts.append(
        "\n## Errors\n\n`--json` prints the code as `error`.\n\n| code | exit | meaning |\n|---|---|---|"
    )
    parts += [f"| {name} | {code} | {_cell(meaning)} |" for name, code, meaning in error_codes()]
    parts.append(
        "\n## Faults of servers\n\nAs the ledger, `eyas status` and the numbers of a stage count them.\n"
    )
    parts.append("| code | in doubt | meaning |\n|---|---|---|")
    parts += [f"| {code} | {scope} | {meaning} |" for code, (scope, meaning) in sorted(FAULTS.items())]
    parts.append("\n## Checks of doctor\n\nIn the order of its lines.\n\n| check | what it asks |\n|---|---|")
    parts += [f"| {name} | {_cell(question)} |" for name, question in doctor_checks()]
    return "\n".join(parts) + "\n"


def help_text(verb: str) -> str:
    """``--help`` of a verb at 88 columns."""
    text = io.StringIO()
    console = Console(file=text, width=88, force_terminal=False, color_system=None)
    build_app(verb)([*verb.split(), "--help"], console=console)
    return "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines())


def error_codes() -> list[tuple[str, str, str]]:
    """Name, exit code and first sentence of every error; those of single modules after the general ones."""
    rows = []
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.EyasError) and value is not errors.EyasError:
            code = "130, 143" if value is errors.Stopped else str(value.exit_code)
            rows.append((name, code, _first_line(value.__doc__)))
    known = {name: code for name, code, _ in rows}
    for path in sorted(SOURCE.rglob("*.py")):  # read, not imported: some of them need torch
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name not in known:
                bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in known]
                rows += [(node.name, known[base], _first_line(ast.get_docstring(node))) for base in bases[:1]]
    return rows


def doctor_checks() -> list[tuple[str, str]]:
    """Each check and the question that its module asks."""
    looks = ((check.name, getattr(check.look, "func", check.look)) for check in CHECKS)
    return [(name, _first_line(sys.modules[look.__module__].__doc__)) for name, look in looks]


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("``", "`")


def status_schema() -> str:
    """The JSON schema of what ``eyas status --json`` prints."""
    schema = TypeAdapter(ProjectStatus).json_schema(mode="serialization")
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    REFERENCE.write_text(reference(), encoding="utf-8")
    STATUS_SCHEMA.write_text(status_schema(), encoding="utf-8")
