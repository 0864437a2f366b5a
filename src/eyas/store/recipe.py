"""The recipe of a store: all that determines what a captured sample's states are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.base.clock import utc_now_text
from eyas.base.errors import DamageFound, FormatTooNew, RecipeChanged
from eyas.base.files import read_json, write_json
from eyas.base.hashing import recipe_differences, recipe_hash

STORE_FORMAT = 1

_CHANGED_HINT = "undo the change, or move store/ away to capture anew"


@dataclass(frozen=True)
class StoreRecipe:
    """What the states in a store were captured with; stores of two recipes are never mixed.

    Args:
        target_fingerprint: hash of the target's weights.
        aux_layers: k means the residual stream after k decoder layers.
        hidden_size: width of the states.
        compute_dtype: what the target computed in.
        store_dtype: safetensors dtype of the states on disk.
        last: which last state is kept; ``post_norm`` is what the target's head takes.
        format: of samples, segments and captured states.
    """

    target_fingerprint: str
    aux_layers: tuple[int, ...]
    hidden_size: int
    compute_dtype: str
    store_dtype: str
    last: str = "post_norm"
    format: int = STORE_FORMAT

    def as_dict(self) -> dict[str, Any]:
        """The recipe as JSON holds it."""
        return asdict(self) | {"aux_layers": list(self.aux_layers)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> StoreRecipe:
        """The inverse of `as_dict`. Raises TypeError or KeyError for other fields."""
        return cls(**(fields | {"aux_layers": tuple(fields["aux_layers"])}))

    @property
    def hash(self) -> str:
        """What segments carry of it."""
        return recipe_hash(self.as_dict())


def write_store_recipe(path: Path, recipe: StoreRecipe) -> None:
    """Write ``store.json`` atomically. Raises OSError."""
    write_json(
        path,
        {
            "format": STORE_FORMAT,
            "recipe_hash": recipe.hash,
            "recipe": recipe.as_dict(),
            "created_at": utc_now_text(),
        },
    )


def read_store_recipe(path: Path) -> StoreRecipe:
    """Read ``store.json``.

    Raises:
        FileNotFoundError: there is none.
        DamageFound: it cannot be read, or its recipe is not what its hash says.
        FormatTooNew: a newer eyas wrote it.
    """
    try:
        content = read_json(path)
        found = int(content["format"])
        if found <= STORE_FORMAT:
            recipe = StoreRecipe.from_dict(content["recipe"])
            if recipe.hash != content["recipe_hash"]:
                raise ValueError("the recipe is not what its hash says")
            return recipe
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamageFound(
            "the recipe of the store cannot be read", where=path, why=str(error), hint="eyas run"
        ) from error
    raise FormatTooNew(
        f"the store has format {found}",
        where=path,
        why=f"this eyas reads up to format {STORE_FORMAT}",
        hint="pip install --upgrade eyas",
    )


def require_store_recipe(path: Path, recipe: StoreRecipe, present: Collection[str] = ()) -> None:
    """Write ``store.json`` when there is none; refuse a store of another recipe.

    Args:
        present: recipe hashes of the segments that are there; they count when ``store.json`` is lost.

    Raises:
        RecipeChanged: names the fields that differ, as far as they are known.
        DamageFound, FormatTooNew, OSError: as reading and writing do.
    """
    try:
        found = read_store_recipe(path)
    except FileNotFoundError:
        if others := sorted(set(present) - {recipe.hash}):
            raise RecipeChanged(
                "segments were captured with another recipe",
                where=path.parent,
                why=f"store.json is lost; segments carry {', '.join(others)}, not {recipe.hash}",
                hint=_CHANGED_HINT,
            ) from None
        write_store_recipe(path, recipe)
        return
    if found != recipe:
        raise RecipeChanged(
            "the store was captured with another recipe",
            where=path,
            why="; ".join(recipe_differences(found.as_dict(), recipe.as_dict())),
            hint=_CHANGED_HINT,
        )
