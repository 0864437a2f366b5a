"""JSON objects that carry a digest of themselves, so that a changed byte in them is found."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from eyas.base.hashing import recipe_hash

CHECK_KEY = "check"


def with_check(value: dict[str, Any]) -> dict[str, Any]:
    """``value`` with the digest of everything else in it. Raises TypeError for what JSON cannot hold."""
    content = {key: entry for key, entry in value.items() if key != CHECK_KEY}
    content = dict(
        json.loads(json.dumps(content))
    )  # as it will be read back: tuples are lists, keys are text
    return content | {CHECK_KEY: recipe_hash(content)}


def require_check(value: object) -> dict[str, Any]:
    """A JSON object after its digest was compared.

    Raises:
        ValueError: it is no object, or its digest is missing or another one.
    """
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    if value != with_check(value):
        raise ValueError("its content is not what its check says")
    return dict(value)


def checked_content(value: object, old_keys: Collection[str]) -> dict[str, Any]:
    """A JSON object without its digest, after that was compared.

    Args:
        old_keys: what an object holds that was written before digests were; exactly these keys and no
            digest are taken as they are.

    Raises:
        ValueError: as `require_check`.
    """
    if isinstance(value, dict) and value.keys() == set(old_keys):
        return dict(value)
    content = require_check(value)
    del content[CHECK_KEY]
    return content
