"""GPU memory is asked of the driver; without one, that is said."""

from __future__ import annotations

import os
import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest

import eyas.targets.serving.process as process_module
from eyas.base.errors import ServerNotStopped
from eyas.base.process import ProcessIdentity
from eyas.targets.serving.gpu import gpu_processes
from eyas.targets.serving.process import free_port, port_free, prove_released


class Driver(ModuleType):
    """Stands in for ``pynvml``: two devices, and the processes on each in the order they are asked for."""

    class NVMLError(Exception):
        pass

    def __init__(self, answers: list[list[list[int]]], broken: str = "") -> None:
        super().__init__("pynvml")
        self.answers, self.broken = answers, broken
        self.opened = 0

    def nvmlInit(self) -> None:
        if self.broken == "init":
            raise self.NVMLError("driver not loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        if self.broken == "count":
            raise self.NVMLError("unknown error")
        self.now = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return len(self.now)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self.now[handle]]


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def install(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Driver:
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    return driver


def test_processes_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch, Driver([[[11, 12], [12, 13]]]))
    assert gpu_processes() == ({11, 12, 13}, None)
    assert driver.opened == 0


@pytest.mark.parametrize("broken", ["init", "count"])
def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    driver = install(monkeypatch, Driver([[]], broken))
    found, why = gpu_processes()
    assert found == set()
    assert why is not None
    assert "driver" in why
    assert driver.opened == 0


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_processes() == (set(), "nvidia-ml-py is not installed")


def test_memory_that_is_given_back_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    me, clock = ProcessIdentity.of(os.getpid()), Clock()
    install(monkeypatch, Driver([[[me.pid]], [[me.pid]], [[999999]]]))
    port = free_port("127.0.0.1")
    assert prove_released({me}, "127.0.0.1", port, 60, clock) == "released"
    assert 0.15 < clock.now() < 1


def test_memory_that_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    me, clock = ProcessIdentity.of(os.getpid()), Clock()
    install(monkeypatch, Driver([[[], [me.pid]]]))
    with pytest.raises(ServerNotStopped) as caught:
        prove_released({me}, "127.0.0.1", free_port("127.0.0.1"), 30, clock)
    assert f"process {me.pid} holds GPU memory" in str(caught.value.why)
    assert clock.now() >= 30


def test_a_free_port_is_one_that_nobody_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        other = free_port("127.0.0.1")
        assert 20_000 <= other < 32_768  # below what systems give out by themselves
        monkeypatch.setattr(process_module, "_PORTS", [taken, other])
        assert {free_port("127.0.0.1") for _ in range(30)} == {other}


def test_a_port_that_stays_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Driver([[]]))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not port_free("127.0.0.1", port)
        with pytest.raises(ServerNotStopped, match="not given everything back"):
            prove_released(set(), "127.0.0.1", port, 5, Clock())
    assert port_free("127.0.0.1", port)
