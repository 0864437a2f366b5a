"""Every verb, key, exit code and error has its place in the docs; what is named there is there."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from cyclopts import App
from pydantic import BaseModel
from rich.console import Console

from eyas.cli.main import build_app
from eyas.config.schema import EyasConfig

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
SOURCE = REPOSITORY / "src" / "eyas"
PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted((REPOSITORY / "examples").rglob("*.md")),
]
REFERENCE = (DOCS / "reference.md").read_text()
PROSE = "\n".join(page.read_text() for page in PAGES if page.name != "reference.md")


def verbs(app: App, before: str = "") -> Iterator[str]:
    """What can be called, by the command line's own tree."""
    for name in app:
        if not name.startswith("-"):
            inner = list(verbs(app[name], f"{before}{name} "))
            yield from inner or [before + name]


def keys(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """Dotted names of all keys, by the schema's types."""
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *_inside(field.annotation)]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            yield before + name
            continue
        many = "[]" if any(kind in (tuple, list) for kind in map(_origin, kinds)) else ""
        yield from keys(inner[0], f"{before}{name}{many}.")


def _inside(kind: Any) -> Iterator[Any]:
    for part in get_args(kind):
        yield part
        yield from _inside(part)


def _origin(kind: Any) -> Any:
    return getattr(kind, "__origin__", None)


def error_classes() -> dict[str, int | None]:
    """Every class below EyasError with its exit code (None: computed), by the source."""
    found: dict[str, int | None] = {"EyasError": 1}
    paths = [SOURCE / "base" / "errors.py", *sorted(SOURCE.rglob("*.py"))]
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef) or node.name in found:
                continue
            bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in found]
            if not bases:
                continue
            code = found[bases[0]]
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "exit_code":
                    assert isinstance(line.value, ast.Constant)
                    code = int(str(line.value.value))
                if isinstance(line, ast.FunctionDef) and line.name == "exit_code":
                    code = None
            found[node.name] = code
    del found["EyasError"]
    return found


VERBS, KEYS, ERRORS = sorted(verbs(build_app())), sorted(keys(EyasConfig)), error_classes()


def test_enough_was_found_to_look_for() -> None:
    assert {"init", "store gc", "serve patch apply", "config show"} <= set(VERBS)
    assert {"train.lr", "data.sources[].path", "hosts[].ways[].ssh", "serve.patches[].diff"} <= set(KEYS)
    assert {"SegmentDamaged", "CodeRefused", "Stopped"} <= set(ERRORS)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_its_heading_and_is_told_of(verb: str) -> None:
    assert f"### eyas {verb}\n" in REFERENCE
    assert re.search(rf"\beyas {verb}\b", PROSE), f"no page but the reference says eyas {verb}"


@pytest.mark.parametrize("key", KEYS)
def test_a_key_has_its_row_with_a_meaning(key: str) -> None:
    row = next((line for line in REFERENCE.splitlines() if line.startswith(f"| `{key}` |")), None)
    assert row is not None
    assert len(row.split(" | ", 2)[2].removesuffix(" |").strip()) > 5


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_has_its_row_with_its_exit_code(error: str) -> None:
    code = ERRORS[error]
    assert f"| {error} | {'130, 143' if code is None else code} | " in REFERENCE


def test_exit_codes_are_all_explained_and_no_others() -> None:
    section = REFERENCE.partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    told = {
        int(code) for codes in re.findall(r"^\| ([\d, ]+) \|", section, re.M) for code in codes.split(", ")
    }
    assert told == {0, 1, 3, 130, 143} | {code for code in ERRORS.values() if code is not None}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles]
            assert anchor in slugs, f"{page.name} links to {target}; headings: {slugs}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_pages_name_only_verbs_and_keys_that_are_there(page: Path) -> None:
    text = page.read_text()
    first = {verb.split()[0] for verb in VERBS}
    for word in re.findall(
        r"(?<![\w./-])eyas ([a-z]+)\b(?= |`|\n|$)", "\n".join(re.findall(r"`([^`\n]+)`", text))
    ):
        assert word in first, f"{page.name} says `eyas {word}`"
    sections = {key.split(".")[0].removesuffix("[]") for key in KEYS if "." in key}
    plain = {key.replace("[]", "") for key in KEYS}
    for section, key in re.findall(r"`([a-z_]+)\.([a-z_]+)(?:[ `=])", text):
        if section in sections and key not in ("json", "jsonl"):
            named = f"{section}.{key}"
            assert any(k == named or k.startswith(f"{named}.") for k in plain), f"{page.name} says `{named}`"


def commands(text: str) -> Iterator[str]:
    """Every command that a page shows: in its blocks, and between backticks."""
    blocks = re.findall(r"^```.*?^```$", text, re.M | re.S)
    for block in blocks:
        joined = re.sub(r"\\\n[> ]*", " ", block)
        yield from re.findall(r"^(?:\$ )?(eyas .+)$", joined, re.M)
    yield from re.findall(r"`(eyas [^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def help_of(verb: str) -> str:
    text = io.StringIO()
    build_app()([*verb.split(), "--help"], console=Console(file=text, width=400))
    return text.getvalue()


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "reference.md"],
    ids=lambda page: str(page.relative_to(REPOSITORY)),
)
def test_commands_have_only_options_and_keys_that_are_there(page: Path) -> None:
    known = {key.replace("[]", "") for key in KEYS}
    for command in commands(page.read_text()):
        words = command.partition(" # ")[0].split()[1:]
        verb = next((v for n in (3, 2, 1) if (v := " ".join(words[:n])) in VERBS), "")
        assert verb or words[0].startswith("-") or words[0] in {v.split()[0] for v in VERBS}, command
        shown = help_of(verb)
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", " ".join(words)):
            assert re.search(rf"{option}\b(?!-)", shown), f"{page.name}: {command}"
        for key in re.findall(r"--set '?([a-z_.]+)=", command):
            assert key in known or any(k.startswith(f"{key}.") for k in known), f"{page.name}: {command}"


def test_enough_commands_are_looked_at() -> None:
    assert sum(len(list(commands(page.read_text()))) for page in PAGES) > 120
