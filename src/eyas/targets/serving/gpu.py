"""Which processes hold GPU memory, by the driver's word."""

from __future__ import annotations

import importlib
from typing import Any


def gpu_processes() -> tuple[set[int], str | None]:
    """Process ids that hold memory of any GPU, and why nothing is known when that is so."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return set(), "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return set(), f"no driver answers ({error})"
    try:
        found: set[int] = set()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found |= {int(entry.pid) for entry in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        return found, None
    except nvml.NVMLError as error:
        return set(), f"the driver does not say ({error})"
    finally:
        nvml.nvmlShutdown()
