"""Hashes of what turns conversations into tokens: a tokenizer and its chat template."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def tokenizer_hash(tokenizer: Any) -> str:
    """32 hexadecimal digits over everything that decides how text becomes ids.

    A tokenizer with a backend is hashed by the backend's own JSON, without its truncation and
    padding, which callers change; another by its class, vocabulary and added tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        content = json.loads(backend.to_str())
        content.pop("truncation", None)
        content.pop("padding", None)
    else:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        content = {
            "class": type(tokenizer).__name__,
            "vocabulary": dict(tokenizer.get_vocab()),
            "added": {str(i): [str(t), bool(getattr(t, "special", True))] for i, t in added.items()},
        }
    return _hash(content)


def chat_template_hash(tokenizer: Any) -> str | None:
    """32 hexadecimal digits of the chat template's text (or texts); None when there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return _hash(template) if template else None


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
