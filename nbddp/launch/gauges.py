"""Reads the memory that the ranks' processes and GPUs use, without a CUDA context in this process."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from nbddp.launch.devices import device_index

_READ_INTERVAL_S = 1.0


@functools.lru_cache(maxsize=1)
def _nvml() -> Any:
    """NVIDIA's management library, which comes with the driver; None without one."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml
    return None


def gpu_memory(device: str) -> tuple[int, int] | None:
    """Return the bytes in use by any process, and the total; ``device`` is a number or UUID (CUDA_VISIBLE_DEVICES)."""
    if (nvml := _nvml()) is None:
        return None
    with contextlib.suppress(nvml.NVMLError):
        memory = _memory(nvml, _handle(nvml, device))
        return int(memory.used), int(memory.total)
    return None


def gpu_name(device: str) -> str:
    """Return the name of a GPU, such as ``NVIDIA T4``; "" if it is not known."""
    if (nvml := _nvml()) is not None:
        with contextlib.suppress(nvml.NVMLError):
            return str(nvml.nvmlDeviceGetName(_handle(nvml, device)))
    return ""


def name_for_driver(index: int, environ: Mapping[str, str]) -> str:
    """Return the number or UUID by which the driver knows a process's device of this index."""
    visible = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[index] if index < len(visible) else str(index)


def _handle(nvml: Any, device: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(device)) if device.isdigit() else nvml.nvmlDeviceGetHandleByUUID(device)


def _memory(nvml: Any, handle: Any) -> Any:
    """Return a GPU's memory as nvidia-smi counts it: without what the driver reserves for itself."""
    with contextlib.suppress(nvml.NVMLError):  # a driver before 510
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    return nvml.nvmlDeviceGetMemoryInfo(handle)


class LocalGauges:
    """Memory of a run's ranks, read at most once a second.

    Attributes:
        processes: resident bytes, by rank, where known.
        gpus: bytes in use and total bytes, by rank, where known.
    """

    def __init__(self, device: str, environ: Mapping[str, str], gpus: Sequence[int] | None = None) -> None:
        """
        Args:
            environ: of the ranks; ``CUDA_VISIBLE_DEVICES`` names the GPUs that they see.
            gpus: as in a run's options: two ranks may share one.
        """
        self.processes: dict[int, int] = {}
        self.gpus: dict[int, tuple[int, int]] = {}
        self._on_cuda = device == "cuda"
        self._environ = environ
        self._gpus = gpus
        self._read_at = float("-inf")

    def read(self, pids: Sequence[int]) -> None:
        """Read the memory of these processes, one per rank; a process that has ended keeps its last numbers."""
        if not pids or time.monotonic() - self._read_at < _READ_INTERVAL_S:
            return
        self._read_at = time.monotonic()
        for rank, pid in enumerate(pids):
            with contextlib.suppress(psutil.Error):
                self.processes[rank] = int(psutil.Process(pid).memory_info().rss)
            gpu = name_for_driver(device_index(rank, self._gpus), self._environ) if self._on_cuda else ""
            if gpu and (memory := gpu_memory(gpu)) is not None:
                self.gpus[rank] = memory
