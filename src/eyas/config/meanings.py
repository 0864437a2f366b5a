"""What each key of a section means: docstrings under fields, read from the source when somebody asks."""

from __future__ import annotations

import ast
import inspect
import textwrap

from eyas.config.section import Section


def meanings_of(section: type[Section]) -> dict[str, str]:
    """One line for each field that has a docstring, by name.

    Pydantic can do this while it builds a class, at the price of parsing every class' source at each start.
    """
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(said.value.value.split())
        for field, said in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(said, ast.Expr)
        and isinstance(said.value, ast.Constant)
        and isinstance(said.value.value, str)
    }
