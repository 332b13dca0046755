"""Reads the memory that the ranks' processes and GPUs use, without a CUDA context in this process."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

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
        by_index = device.isdigit()
        handle = nvml.nvmlDeviceGetHandleByIndex(int(device)) if by_index else nvml.nvmlDeviceGetHandleByUUID(device)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.used), int(memory.total)
    return None


def gpu_names() -> list[str]:
    """Return the names of this machine's NVIDIA GPUs, in the driver's order; none without a driver."""
    if (nvml := _nvml()) is None:
        return []
    with contextlib.suppress(nvml.NVMLError):
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return [str(nvml.nvmlDeviceGetName(handle)) for handle in handles]
    return []


class LocalGauges:
    """Memory of a run's ranks, read at most once a second.

    Attributes:
        processes: resident bytes, by rank, where known.
        gpus: bytes in use and total bytes, by rank, where known.
    """

    def __init__(self, device: str, environ: Mapping[str, str]) -> None:
        self.processes: dict[int, int] = {}
        self.gpus: dict[int, tuple[int, int]] = {}
        self._on_cuda = device == "cuda"
        self._visible = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        self._read_at = float("-inf")

    def read(self, pids: Sequence[int]) -> None:
        """Read the memory of these processes, one per rank; a process that has ended keeps its last numbers."""
        if not pids or time.monotonic() - self._read_at < _READ_INTERVAL_S:
            return
        self._read_at = time.monotonic()
        for rank, pid in enumerate(pids):
            with contextlib.suppress(psutil.Error):
                self.processes[rank] = int(psutil.Process(pid).memory_info().rss)
            gpu = self._visible[rank] if rank < len(self._visible) else str(rank)
            if self._on_cuda and (memory := gpu_memory(gpu)) is not None:
                self.gpus[rank] = memory
