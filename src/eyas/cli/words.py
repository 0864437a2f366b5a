"""The words of a command line before any verb is loaded."""

from __future__ import annotations

from collections.abc import Sequence

HERE_VERBS = frozenset({"push", "init", "inspect", "mcp", "serve fake"})
"""These are about this machine; those of them that take a host take it for something else."""


def wanted_host(words: Sequence[str]) -> str | None:
    """The host that the words ask for, when their verb is done there; None: done here."""
    if not words or {words[0], " ".join(words[:2])} & HERE_VERBS or {"--help", "-h"} & set(words):
        return None
    return value_of(words, "--host")


def value_of(words: Sequence[str], option: str) -> str | None:
    """The value that an option is given; None when it is not there."""
    for index, word in enumerate(words):
        if word == option and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def without(words: Sequence[str], option: str) -> list[str]:
    """The words without an option and its value."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == option:
            skip = True
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept
