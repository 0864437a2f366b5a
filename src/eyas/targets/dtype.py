"""Which device and arithmetic a target or drafter runs with, and why."""

from __future__ import annotations

from pathlib import Path

import torch

from eyas.base.errors import ConfigError

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_NATIVE_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16", "svebf16")
"""Words of /proc/cpuinfo: x86 with AVX-512 or AMX, ARM with NEON or SVE."""


def resolve_device(device: str) -> tuple[str, str]:
    """The device to use and the reason: ``auto`` is the first CUDA device, or else the CPU.

    Raises:
        ConfigError: the device is unknown or not there.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return "cuda", f"a CUDA device is here: {torch.cuda.get_device_name()}"
        return "cpu", "no CUDA device is here"
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"unknown device {device!r}", why=str(error).splitlines()[0], hint="use auto, cpu or cuda:0"
        ) from error
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"the device {device!r} is not here",
            why=f"{torch.cuda.device_count()} CUDA devices are visible",
            hint="use auto or cpu",
        )
    return device, "as configured"


def resolve_dtype(dtype: str, device: str, *, cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, str]:
    """The arithmetic to use and the reason: ``auto`` is bfloat16 where the device multiplies it natively.

    On a CPU without such instructions bfloat16 products can be a hundred times slower than float32.

    Returns:
        A name that `torch_dtype` knows, and one sentence.

    Raises:
        ConfigError: the name is unknown.
    """
    if dtype != "auto":
        torch_dtype(dtype)
        return dtype, "as configured"
    if torch.device(device).type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16", "the CUDA device multiplies bfloat16 natively"
        return "float32", "the CUDA device does not multiply bfloat16 natively"
    flag = _bf16_flag(cpuinfo)
    if flag is not None:
        return "bfloat16", f"the CPU multiplies bfloat16 natively ({flag})"
    return "float32", "the CPU does not multiply bfloat16 natively"


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name such as ``bfloat16``. Raises ConfigError for an unknown one."""
    if name not in _DTYPES:
        raise ConfigError(f"unknown dtype {name!r}", hint=f"use one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _bf16_flag(cpuinfo: Path) -> str | None:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
            return next((flag for flag in _NATIVE_BF16_FLAGS if flag in flags), None)
    return None
