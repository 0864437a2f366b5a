"""Numbers with units, for people."""

from __future__ import annotations

import re

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


def counted(count: int, noun: str) -> str:
    """A count with its noun: ``1 file``, ``3 files``."""
    return f"{format_count(count)} {noun}{'' if count == 1 else 's'}"


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
