"""The reference in the docs is what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def generator() -> ModuleType:
    specification = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_reference_is_up_to_date() -> None:
    assert (DOCS / "reference.md").read_text() == generator().reference(), "run: make docs"


def test_every_key_verb_and_error_has_its_place() -> None:
    text = (DOCS / "reference.md").read_text()
    for key in ("train.lr", "data.sources[].path", "regenerate.truncated", "export.min_acceptance_length"):
        assert f"| `{key}` |" in text
    for verb in ("init", "run", "status", "inspect", "config show"):
        assert f"### eyas {verb}\n" in text
    for error in ("RecipeChanged", "SegmentDamaged", "Stopped"):
        assert f"| {error} |" in text
