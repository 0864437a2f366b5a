"""Numbers with units, for people."""

from __future__ import annotations

import re
from collections.abc import Mapping

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_BYTE_FACTORS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def format_bytes(num_bytes: float) -> str:
    """Bytes in decimal units: ``2.3 TB``."""
    value = float(num_bytes)
    for unit in _BYTE_UNITS:
        if abs(value) < 1000 or unit == _BYTE_UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def parse_bytes(text: str) -> int:
    """Bytes from ``2.3TB``, ``64 MiB`` or ``1000``.

    Raises:
        ValueError: the text is no size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    factor = _BYTE_FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"not a size: {text!r} (write it like 200GB or 64MiB)")
    return int(float(match[1]) * factor)


def format_count(count: float) -> str:
    """A count with thousands separators, or in millions from ten million on."""
    if count >= 10_000_000:
        return f"{count / 1e6:.1f}M"
    return f"{count:,.0f}"


def format_amount(count: float, unit: str) -> str:
    """A count with its unit: ``1,234 tokens``; bytes as people read them: ``6.9 MB``."""
    return format_bytes(count) if unit == "bytes" else f"{format_count(count)} {unit}"


def format_rate(rate: float, unit: str) -> str:
    """Units per second: ``9,768/s``, ``0.42/s``; of bytes ``210.4 MB/s``."""
    if unit == "bytes":
        return f"{format_bytes(rate)}/s"
    return f"{format_count(rate) if rate >= 10 else f'{rate:.2f}'}/s"


def format_numbers(numbers: Mapping[str, object]) -> str:
    """Named numbers as one line: ``captured 79, tokens 4,373, 3.6 MB, 9,768 tokens/s, set aside 0``.

    A name says its unit: ``bytes`` and ``X_per_second``; any other stands before its number.
    """
    return ", ".join(_named(name, value) for name, value in numbers.items())


def _named(name: str, value: object) -> str:
    words = name.replace("_", " ")
    if isinstance(value, Mapping):
        return f"{words} {' '.join(_named(key, count) for key, count in value.items())}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{words} {value}"
    if name == "bytes":
        return format_bytes(value)
    if name.endswith("_per_second"):
        unit = words.removesuffix(" per second")
        return f"{format_rate(value, unit).removesuffix('/s')} {unit}/s"
    if isinstance(value, int) or value.is_integer() or abs(value) >= 1000:
        return f"{words} {format_count(value)}"
    return f"{words} {value:.4g}"


def counted(count: int, noun: str, nouns: str = "") -> str:
    """A count with its noun: ``1 file``, ``3 files``; ``nouns`` where an s is not all."""
    return f"{format_count(count)} {noun if count == 1 else nouns or f'{noun}s'}"


def format_seconds(seconds: float) -> str:
    """A duration: ``0.8 s``, ``42 s``, ``3 min 5 s``, ``4 h 42 min``, ``2 d 3 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
