"""What all tables of ``eyas.toml`` are made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from eyas.base.units import parse_bytes

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A table of ``eyas.toml``: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


def _size(text: str) -> str:
    parse_bytes(text)
    return text


Size = Annotated[str, AfterValidator(_size)]
"""Bytes as people write them: ``200GB``, ``1.5TB``, ``64MiB``."""
