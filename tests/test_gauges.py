"""Memory of GPUs, from NVIDIA's management library; here a machine of two, whose driver answers as the real one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pynvml
import pytest

from nbddp.launch import gauges
from nbddp.magic import magic

GIB = 1 << 30
UUIDS = ["GPU-11111111-aaaa", "GPU-22222222-bbbb"]
USED = [3 * GIB, 5 * GIB]


class Driver:
    """The functions of ``pynvml`` that are called, with its own types.

    Attributes:
        inits: how often it was initialised.
        missing: functions that this driver is too old for.
    """

    def __init__(self) -> None:
        self.inits = 0
        self.missing: set[str] = set()
        self._devices = [pynvml.c_nvmlDevice_t(pynvml.struct_c_nvmlDevice_t()) for _ in UUIDS]

    def nvmlInit(self) -> None:
        self.inits += 1
        self._answer("nvmlInit")

    def nvmlDeviceGetCount(self) -> int:
        self._answer("nvmlDeviceGetCount")
        return len(self._devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        if ctypes.c_uint(index).value >= len(self._devices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        if uuid not in UUIDS:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self._devices[UUIDS.index(uuid)]

    def nvmlDeviceGetName(self, handle: object) -> str:
        self._answer("nvmlDeviceGetName")
        return f"NVIDIA T{self._devices.index(handle)}"  # type: ignore[arg-type]

    def nvmlDeviceGetMemoryInfo(self, handle: object, version: int = 0) -> object:
        self._answer(f"nvmlDeviceGetMemoryInfo{'_v2' * bool(version)}")
        used = USED[self._devices.index(handle)]  # type: ignore[arg-type]
        if version:
            assert version == pynvml.nvmlMemory_v2
            return pynvml.c_nvmlMemory_v2_t(total=16 * GIB, free=15 * GIB - used, used=used, reserved=GIB)
        return pynvml.c_nvmlMemory_t(total=16 * GIB, free=15 * GIB - used, used=used + GIB)

    def _answer(self, name: str) -> None:
        if name in self.missing:
            code = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND if name == "nvmlInit" else pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
            raise pynvml.NVMLError(code)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    for name in [name for name in dir(Driver) if name.startswith("nvml")]:
        monkeypatch.setattr(pynvml, name, getattr(driver, name))  # fails where the library has no such function
    gauges._nvml.cache_clear()
    yield driver
    gauges._nvml.cache_clear()


def test_a_gpu_is_found_by_its_number_and_by_its_uuid(driver: Driver) -> None:
    assert [gauges.gpu_memory(device) for device in ["0", "1", *UUIDS]] == [(used, 16 * GIB) for used in USED * 2]
    assert driver.inits == 1


def test_the_memory_that_the_driver_reserves_is_not_in_use_where_the_driver_tells_it_apart(driver: Driver) -> None:
    assert gauges.gpu_memory("0") == (3 * GIB, 16 * GIB)
    driver.missing.add("nvmlDeviceGetMemoryInfo_v2")
    assert gauges.gpu_memory("0") == (4 * GIB, 16 * GIB)


@pytest.mark.parametrize("device", ["2", "GPU-3", "MIG-1", "-1", ""])
def test_of_a_gpu_that_is_not_there_nothing_is_known(driver: Driver, device: str) -> None:
    assert gauges.gpu_memory(device) is None


def test_a_rank_shows_the_memory_of_the_gpu_that_it_sees(driver: Driver) -> None:
    seen = gauges.LocalGauges("cuda", {"CUDA_VISIBLE_DEVICES": f"{UUIDS[1]}, 0"})
    seen.read([os.getpid()] * 2)
    assert seen.gpus == {0: (5 * GIB, 16 * GIB), 1: (3 * GIB, 16 * GIB)}
    assert seen.processes.keys() == {0, 1}
    sharing = gauges.LocalGauges("cuda", {}, gpus=[0, 1, 1])
    sharing.read([os.getpid()] * 3)
    assert [used for used, _ in sharing.gpus.values()] == [3 * GIB, 5 * GIB, 5 * GIB]
    on_cpu = gauges.LocalGauges("cpu", {})
    on_cpu.read([os.getpid()])
    assert on_cpu.gpus == {}


def test_without_a_driver_nothing_is_known_and_nothing_is_printed(
    driver: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    driver.missing.add("nvmlInit")
    for _ in range(3):
        assert gauges.gpu_memory("0") is None
    assert gauges.gpu_name("0") == ""
    assert driver.inits == 1  # nobody installs a driver under a running notebook
    assert capfd.readouterr() == ("", "")


def test_the_line_magic_numbers_the_gpus_as_a_run_does(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(magic, "accelerator", lambda: ("cuda", 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert magic._devices_text() == "0, NVIDIA T1, 5120 MiB, 16384 MiB"


def test_the_line_magic_lists_all_gpus(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(magic, "accelerator", lambda: ("cuda", 2))
    lines = ["0, NVIDIA T0, 3072 MiB, 16384 MiB", "1, NVIDIA T1, 5120 MiB, 16384 MiB"]
    assert magic._devices_text().splitlines() == lines
    driver.missing |= {"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"}
    assert magic._devices_text().splitlines() == ["0, NVIDIA T0", "1, NVIDIA T1"]
    driver.missing.add("nvmlDeviceGetName")
    assert magic._devices_text() == "2 × cuda"
    monkeypatch.setattr(magic, "accelerator", lambda: ("xpu", 2))
    assert magic._devices_text() == "2 × xpu"
