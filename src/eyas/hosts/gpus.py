"""GPUs of a machine: their memory, and which process holds how much of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Protocol

from eyas.hosts.host import Host


@dataclass(frozen=True)
class GpuUser:
    """A process on a GPU; ``used_bytes`` is None where the driver does not say."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One GPU; ``busy_percent`` is None where the driver does not say."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    busy_percent: int | None
    users: tuple[GpuUser, ...]


class GpuReader(Protocol):
    """Reads the GPUs of one machine."""

    def read(self) -> list[Gpu] | None:
        """All GPUs; an empty list when there are none; None when there is no driver to ask.

        Raises:
            OSError: there is a driver, and it does not answer.
        """
        ...


class NvmlGpus:
    """GPUs of this machine through NVIDIA's management library."""

    def read(self) -> list[Gpu] | None:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError_LibraryNotFound:
            return None
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
                return None
            raise OSError(5, f"NVML: {error}") from error
        try:
            return [_read_one(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            raise OSError(5, f"NVML: {error}") from error
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()


def _read_one(library: Any, index: int) -> Gpu:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    users: dict[int, int | None] = {}
    for processes in (
        library.nvmlDeviceGetComputeRunningProcesses,
        library.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        with contextlib.suppress(library.NVMLError):  # graphics processes are not listed everywhere
            users |= {int(process.pid): process.usedGpuMemory for process in processes(handle)}
    busy = None
    with contextlib.suppress(library.NVMLError):
        busy = int(library.nvmlDeviceGetUtilizationRates(handle).gpu)
    name = library.nvmlDeviceGetName(handle)
    return Gpu(
        index=index,
        name=name.decode() if isinstance(name, bytes) else str(name),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        busy_percent=busy,
        users=tuple(GpuUser(pid, used) for pid, used in sorted(users.items())),
    )


class GpuMeter:
    """How busy this machine's GPUs are, asked often: the driver is opened once and kept open."""

    def __init__(self) -> None:
        self._nvml, self._handles = None, []  # type: Any, list[Any]
        with contextlib.suppress(ImportError):
            self._open()

    def _open(self) -> None:
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._handles = [
                pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
            ]
            self._nvml = pynvml

    def read(self) -> tuple[float, int, int] | None:
        """Mean use in percent, bytes used and bytes of all GPUs; None without a GPU or an answer."""
        if not self._handles:
            return None
        try:
            percents = [self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in self._handles]
            memory = [self._nvml.nvmlDeviceGetMemoryInfo(handle) for handle in self._handles]
        except self._nvml.NVMLError:
            return None
        used, total = sum(int(m.used) for m in memory), sum(int(m.total) for m in memory)
        return sum(percents) / len(percents), used, total


class SmiGpus:
    """GPUs of another machine through ``nvidia-smi``."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def read(self) -> list[Gpu] | None:
        query = "--query-gpu=index,uuid,name,memory.total,memory.used,utilization.gpu"
        result = self._host.run(["nvidia-smi", query, "--format=csv,noheader,nounits"])
        if result.code == 127:
            return None
        if not result.ok:
            raise OSError(5, result.explain())
        apps = self._host.run(
            ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"]
        )
        users: dict[str, list[GpuUser]] = {}
        for cells in _rows(apps.out, 3):
            if cells[1].isdigit():
                users.setdefault(cells[0], []).append(GpuUser(int(cells[1]), _mib(cells[2])))
        return [
            Gpu(
                index=int(cells[0]),
                name=cells[2],
                total_bytes=_mib(cells[3]) or 0,
                used_bytes=_mib(cells[4]) or 0,
                busy_percent=int(cells[5]) if cells[5].isdigit() else None,
                users=tuple(users.get(cells[1], ())),
            )
            for cells in _rows(result.out, 6)
        ]


def _rows(text: str, num_cells: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == num_cells]


def _mib(text: str) -> int | None:
    return int(text) << 20 if text.isdigit() else None
