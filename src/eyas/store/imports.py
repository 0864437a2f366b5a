"""What was imported into a store, and which of it still has to prove itself.

Imported states were captured by another tool. Some of them are captured again on the next extract; until then
they are named in ``store/imports.json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.base.checked import checked_content, with_check
from eyas.base.clock import utc_now_text
from eyas.base.errors import DamageFound
from eyas.base.files import read_json, write_json
from eyas.base.layout import Layout

NUM_RECHECKED = 16
"""Imported samples that are captured again before anything trusts the import."""


_OLD_KEYS = frozenset({"imports"})  # before it carried a digest of itself


def imports_path(layout: Layout) -> Path:
    return layout.store / "imports.json"


def read_imports(layout: Layout) -> list[dict[str, Any]]:
    """All imports, oldest first; none when the record is missing.

    Raises:
        DamageFound: the record is not what was written.
    """
    path = imports_path(layout)
    try:
        return list(checked_content(read_json(path), _OLD_KEYS)["imports"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamageFound(
            "the record of imports is damaged", where=path, why=str(error), hint="eyas run (sets it aside)"
        ) from error


def imports_fault(layout: Layout) -> str | None:
    """What is wrong with the record; None when it is whole or missing."""
    try:
        read_imports(layout)
    except DamageFound as error:
        return f"{error.what}: {error.why}"
    return None


def write_import(layout: Layout, entry: dict[str, Any]) -> None:
    """Add an import, or replace the one that began at the same time. Raises OSError."""
    others = [old for old in read_imports(layout) if old["at"] != entry["at"]]
    write_json(imports_path(layout), with_check({"imports": [*others, entry]}))


def to_recheck(layout: Layout) -> list[str]:
    """Imported samples that were not captured again yet."""
    return sorted({sample for entry in read_imports(layout) for sample in entry["recheck"]})


def note_rechecked(layout: Layout, samples: Sequence[str]) -> None:
    """Note that these came out the same. Raises OSError."""
    proven = set(samples)
    entries = read_imports(layout)
    for entry in entries:
        left = [sample for sample in entry["recheck"] if sample not in proven]
        if entry["recheck"] and not left:
            entry["rechecked_at"] = utc_now_text()
        entry["recheck"] = left
    write_json(imports_path(layout), with_check({"imports": entries}))
