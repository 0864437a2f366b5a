"""Answers on disk: immutable part files, one per finished group of prompts.

A part is JSON lines and ends with a line that counts and checks them, so a part is whole or damaged,
never silently short. Its name tells its turn and how many answers it holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.base.errors import DamageFound
from eyas.base.files import write_atomic

_LAST_LINE_BYTES = 4096


@dataclass(frozen=True)
class Answer:
    """What the target emitted for one turn of one conversation.

    ``prompt`` is the digest of the prompt's token ids: an answer counts only for exactly that prompt.
    ``tokens`` end with the end token when ``finish_reason`` is ``stop``.
    """

    conversation: str
    turn: int
    prompt: str
    tokens: list[int]
    finish_reason: str


def prompt_digest(tokens: Sequence[int]) -> str:
    """Digest of a prompt's token ids, 32 hexadecimal digits."""
    return hashlib.sha256(b"".join(int(t).to_bytes(4, "little") for t in tokens)).hexdigest()[:32]


def part_name(turn: int, answers: Sequence[Answer]) -> str:
    """``turn-00-n000064-<digest>.jsonl``: the same group of the same prompts has the same name."""
    digest = hashlib.sha256("".join(sorted(a.prompt + a.conversation for a in answers)).encode())
    return f"turn-{turn:02d}-n{len(answers):06d}-{digest.hexdigest()[:16]}.jsonl"


def write_part(folder: Path, turn: int, answers: Sequence[Answer], recipe: str) -> Path:
    """Write one group's answers, whole or not at all.

    Args:
        recipe: hash of what they were drawn with, should the folder's recipe be lost.

    Raises:
        OSError: nothing was written.
    """
    lines = [json.dumps(asdict(answer), separators=(",", ":"), ensure_ascii=False) for answer in answers]
    body = "".join(line + "\n" for line in lines)
    check = hashlib.sha256(body.encode()).hexdigest()
    path = folder / part_name(turn, answers)
    end = {"answers": len(lines), "sha256": check, "recipe": recipe}
    write_atomic(path, body + json.dumps(end) + "\n")
    return path


def read_part(path: Path) -> list[Answer]:
    """The answers of one part.

    Raises:
        DamageFound: the part is torn or changed.
    """
    try:
        text = path.read_text(encoding="utf-8")
        body, _, last = text.rstrip("\n").rpartition("\n")
        body += "\n" if body else ""
        end = json.loads(last)
        if end["sha256"] != hashlib.sha256(body.encode()).hexdigest():
            raise ValueError("its checksum does not match")
        answers = [Answer(**json.loads(line)) for line in body.splitlines()]
        if len(answers) != end["answers"]:
            raise ValueError(f"{len(answers)} answers, {end['answers']} written")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamageFound(
            "a file of answers is damaged",
            where=path,
            why=str(error),
            hint="eyas run sets it aside and answers its prompts again",
        ) from error
    return answers


def part_fault(path: Path, *, deep: bool = True) -> str | None:
    """What is wrong with a part; None when it is whole.

    Args:
        deep: check every byte; otherwise that it ends as a finished part does, with as many answers as
            its name says.
    """
    if deep:
        try:
            read_part(path)
        except DamageFound as error:
            return error.why or error.what
        return None
    try:
        end = _last_line(path)
        named = int(path.name.split("-n")[1][:6])
        return None if end["answers"] == named else f"{end['answers']} answers, its name says {named}"
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        return f"it does not end as a finished part does: {error}"


def _last_line(path: Path) -> dict[str, Any]:
    """What a part ends with. Raises OSError or ValueError."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_LINE_BYTES))
        return dict(json.loads(file.read().rstrip(b"\n").rpartition(b"\n")[2]))


def part_recipes(folder: Path) -> set[str]:
    """Recipes that the parts say they were drawn with; damaged and older parts say nothing."""
    found = set()
    for path in part_files(folder):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found.add(str(_last_line(path)["recipe"]))
    return found


def part_files(folder: Path) -> list[Path]:
    """All parts, in order of name."""
    return sorted(folder.glob("turn-*.jsonl")) if folder.is_dir() else []


def count_answers(folder: Path) -> int:
    """Answers in all parts, by their names alone."""
    return sum(int(path.name.split("-n")[1][:6]) for path in part_files(folder))


def read_answers(folder: Path) -> Iterator[tuple[Path, list[Answer] | DamageFound]]:
    """Every part with its answers, or with what is wrong with it."""
    for path in part_files(folder):
        try:
            yield path, read_part(path)
        except DamageFound as error:
            yield path, error
