from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.base.errors import DamageFound, FormatTooNew, RecipeChanged
from eyas.store.recipe import StoreRecipe, read_store_recipe, require_store_recipe, write_store_recipe

RECIPE = StoreRecipe("weights", (2, 15, 27), 576, "float32", "BF16")


def test_round_trip_and_refusal(tmp_path: Path) -> None:
    path = tmp_path / "store" / "store.json"
    with pytest.raises(FileNotFoundError):
        read_store_recipe(path)
    require_store_recipe(path, RECIPE)
    assert read_store_recipe(path) == RECIPE
    require_store_recipe(path, RECIPE)
    with pytest.raises(RecipeChanged, match=r"aux_layers: \[2, 15, 27\] -> \[2, 14, 27\]"):
        require_store_recipe(path, replace(RECIPE, aux_layers=(2, 14, 27)))
    assert read_store_recipe(path) == RECIPE


def test_every_field_changes_the_hash() -> None:
    changes = {
        "target_fingerprint": "other",
        "aux_layers": (2, 15),
        "hidden_size": 577,
        "compute_dtype": "bfloat16",
        "store_dtype": "F32",
        "last": "pre_norm",
        "format": 2,
    }
    assert set(changes) == set(RECIPE.as_dict())
    hashes = {replace(RECIPE, **{name: value}).hash for name, value in changes.items()}
    assert len(hashes | {RECIPE.hash}) == 8


def test_a_lost_file_does_not_let_another_recipe_in(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    with pytest.raises(RecipeChanged, match="is lost"):
        require_store_recipe(path, RECIPE, present={"something else"})
    assert not path.exists()
    require_store_recipe(path, RECIPE, present={RECIPE.hash})
    assert read_store_recipe(path) == RECIPE


def test_damage_and_newer_formats(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    write_store_recipe(path, RECIPE)
    whole = path.read_text()
    for broken in (
        whole[:-20],
        "",
        "[]",
        "null",
        whole.replace("576", "577"),
        whole.replace('"last"', '"lost"'),
    ):
        path.write_text(broken)
        with pytest.raises(DamageFound):
            read_store_recipe(path)
    path.write_text(json.dumps(json.loads(whole) | {"format": 2}))
    with pytest.raises(FormatTooNew):
        read_store_recipe(path)
