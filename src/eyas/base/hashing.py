"""One way to hash a recipe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def recipe_hash(recipe: Mapping[str, object]) -> str:
    """Hexadecimal SHA-256 (first 128 bits) of a recipe's canonical JSON.

    Raises:
        TypeError: the recipe holds a value that JSON has no form for.
    """
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def recipe_differences(old: Mapping[str, object], new: Mapping[str, object], prefix: str = "") -> list[str]:
    """One line per field that differs: ``aux_layers: [2, 15, 27] -> [2, 14, 27]``."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, "absent"), new.get(key, "absent")
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += recipe_differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {_short(before)} -> {_short(after)}")
    return lines


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
