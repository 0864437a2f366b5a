"""What verbs show people and programs: one JSON object, help that explains, numbers with units."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from eyas.cli.main import VERB_NAMES
from eyas.cli.output import NO_NEXT_VARIABLE
from eyas.cli.verbs.logs import line
from tests.cli.command import eyas
from tests.projects import make_project, tiny_target

LOOKING = (
    "status", "doctor", "doctor --deep", "todo", "todo --all --history", "recover --dry-run", "verify",
    "verify --deep", "store ls", "store repair --dry-run", "store compact --dry-run", "store gc",
    "store export elsewhere --dry-run", "serve status", "serve patch status", "config show",
    "run --dry-run", "prepare --dry-run", "train --redo --dry-run", "stop",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("base")
    root = make_project(base / "p", tiny_target(base / "model"), count=6)
    done = eyas("run", "--project", root)
    assert done.code == 0, done.err
    (root / "summary.txt").write_text(done.err)
    return root


@pytest.mark.parametrize("words", LOOKING)
def test_json_is_one_object_and_nothing_else(words: str, finished: Path) -> None:
    told = eyas(*words.split(), "--project", finished, "--json")
    assert told.code == 0, told.out + told.err
    assert isinstance(json.loads(told.out), dict), told.out
    assert not list((finished / "logs").glob("eyas-traceback*"))


@pytest.mark.parametrize("words", LOOKING)
def test_people_get_the_one_next_command_last(words: str, finished: Path) -> None:
    told = eyas(*words.split(), "--project", finished)
    assert told.code == 0, told.out + told.err
    last = told.err.splitlines()[-1]
    assert last == "nothing to do" or re.fullmatch(r"next: eyas .*", last), told.err


def test_a_caller_that_says_what_is_next_is_not_spoken_over(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert eyas("run", "--project", finished).err.endswith("\n\nnothing to do\n")
    monkeypatch.setenv(NO_NEXT_VARIABLE, "1")
    assert "nothing to do" not in eyas("run", "--project", finished).err


def test_a_look_at_unfinished_work_says_how_it_goes_on(finished: Path, tmp_path: Path) -> None:
    root = make_project(tmp_path / "new", finished.parent / "model", count=2)
    for verb in ("doctor", "status"):
        told = eyas(verb, "--project", root)
        assert (told.code, told.err.splitlines()[-1]) == (0, f"next: eyas run --project {root}")


def test_the_summary_has_units_and_no_names_of_keys(finished: Path) -> None:
    lines = (finished / "summary.txt").read_text().splitlines()
    (captured,) = [line for line in lines if line.startswith("extract: captured")]
    assert re.fullmatch(
        r"extract: captured \d+, tokens [\d,]+, [\d.]+ [kM]B, [\d,.]+ tokens/s, stored \d+, set aside 0",
        captured,
    )
    assert not [line for line in lines if re.search(r"[a-z]_[a-z]", line) and "/" not in line]


@pytest.mark.parametrize("verb", VERB_NAMES)
def test_help_explains_every_option_and_shows_no_empty_default(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = eyas(*verb.split(), "--help")
    assert told.code == 0
    assert not re.search(r"\[default: (False|\(\)|\"\"|None)", told.out)
    assert all(len(line) <= 80 for line in told.out.splitlines())
    wordless = re.findall(r"(?m)^│ [* ]* --[a-z-]+(?: [A-Z]+(?:\.\.\.)?)? +│", told.out)
    assert wordless == []


def test_help_of_a_verb_tells_more_than_its_line_in_the_list() -> None:
    told = " ".join(eyas("recover", "--help").out.split())
    assert "Nothing is deleted: what is damaged moves to set-aside/." in told
    assert "Exit code 14 says that todos are left." in told
    assert "--yes-stop-services" in told
    assert "Mend what doctor finds and bring the run back, step by step." in " ".join(
        eyas("--help").out.split()
    )
    assert "Without --yes it only lists." in eyas("store", "gc", "--help").out


EVENTS = [
    ({"event": "attempt started", "verb": "run", "pid": 7}, "attempt started: eyas run, process 7"),
    (
        {"event": "stage started", "stage": "train", "action": "run", "why": "nothing done yet"},
        "train started (run): nothing done yet",
    ),
    (
        {"event": "progress", "stage": "prepare", "label": "read", "unit": "bytes", "done": 4110,
         "total": 4110, "rate": 427_100.0},
        "prepare: read 4.1 kB of 4.1 kB, 427.1 kB/s",
    ),
    (
        {"event": "progress", "stage": "train", "label": "train", "unit": "tokens", "done": 0,
         "total": 12_000, "rate": 0.0},
        "train: train 0 of 12,000 tokens",
    ),
    (
        {"event": "stage ended", "stage": "extract", "numbers": {"captured": 1479, "bytes": 216_034_912}},
        "extract ended: captured 1,479, 216.0 MB",
    ),
    (
        {"event": "todo", "id": "recovery-2/store", "content": "Mend the store", "priority": "high",
         "status": "in_progress", "depends_on": [], "evidence": "", "who": "me"},
        "todo recovery-2/store in progress: Mend the store",
    ),
    ({"event": "phase", "id": "training-1", "status": "closed", "outcome": "exported", "who": "me"},
     "phase training-1 closed: exported"),
    (
        {"event": "attempt ended", "outcome": "DiskFull", "what": "no room", "hint": "eyas run"},
        "attempt ended: DiskFull; no room; eyas run",
    ),
    ({"event": "stage ended", "stage": "extract"}, 'stage ended stage="extract"'),
    ({"event": "of a later version", "of": [1, 2]}, "of a later version of=[1, 2]"),
]  # fmt: skip


@pytest.mark.parametrize(("event", "text"), EVENTS)
def test_events_are_told_in_words(event: dict[str, object], text: str) -> None:
    assert line({"at": "2026-11-30T01:02:03.004Z", **event}) == f"2026-11-30T01:02:03.004Z  {text}"
