"""Kernel side. How much memory the ranks' processes and GPUs use, without a CUDA context in the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Mapping, Sequence

import psutil

_EVERY_S = 1.0


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``: bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


@functools.lru_cache(maxsize=1)
def _nvml() -> ctypes.CDLL | None:
    """NVIDIA's management library, which comes with the driver; None without one."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() == 0:
            return library
    return None


def gpu_memory(device: str) -> tuple[int, int] | None:
    """Bytes in use, by whatever process, and in all; ``device`` as in CUDA_VISIBLE_DEVICES: a number or a UUID."""
    library = _nvml()
    if library is None:
        return None
    handle, memory = ctypes.c_void_p(), _Memory()
    if device.isdigit():
        found = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(device)), ctypes.byref(handle))
    else:
        found = library.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
    if found != 0 or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    return int(memory.used), int(memory.total)


class Gauges:
    """Memory of a run's ranks, read at most once a second.

    Attributes:
        processes: resident bytes by rank, where known.
        gpus: bytes in use and in all by rank, where known.
    """

    def __init__(self, device: str, environ: Mapping[str, str]) -> None:
        self.processes: dict[int, int] = {}
        self.gpus: dict[int, tuple[int, int]] = {}
        self._on_cuda = device == "cuda"
        self._visible = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        self._read_at = float("-inf")

    def read(self, pids: Sequence[int]) -> None:
        """Look at these processes, one per rank; keeps the last known numbers of one that is gone."""
        if not pids or time.monotonic() - self._read_at < _EVERY_S:
            return
        self._read_at = time.monotonic()
        for rank, pid in enumerate(pids):
            with contextlib.suppress(psutil.Error):
                self.processes[rank] = int(psutil.Process(pid).memory_info().rss)
            if self._on_cuda and (memory := gpu_memory(self._gpu_of(rank))) is not None:
                self.gpus[rank] = memory

    def _gpu_of(self, rank: int) -> str:
        return self._visible[rank] if rank < len(self._visible) else str(rank)
