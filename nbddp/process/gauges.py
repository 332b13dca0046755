"""Reads how much memory a rank and its GPU use, without a CUDA context in this process."""

import contextlib
import functools
import os
from typing import Any, NamedTuple

import psutil

from nbddp.messages import Settings


class Memory(NamedTuple):
    """Bytes of a rank: resident in its process; and of its GPU, if it's known: in use by all processes, and in all."""

    resident: int
    gpu: tuple[int, int] | None = None


def memory(process: psutil.Process | None, gpu: str) -> Memory | None:
    """Return the memory of a process and of a GPU, by :func:`gpu_of`'s name; None if the process has ended."""
    with contextlib.suppress(psutil.Error):
        if process is not None and (resident := process.memory_info().rss):  # a zombie has none
            return Memory(int(resident), _gpu_memory(gpu) if gpu else None)
    return None


def gpu_of(settings: Settings, local_rank: int) -> str:
    """Return the number or UUID by which the driver knows a rank's GPU; "" if it has none."""
    if settings.device != "cuda":
        return ""
    index = settings.indices[local_rank]
    visible = [name.strip() for name in settings.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[index] if index < len(visible) else str(index)


def describe_gpus(count: int) -> list[str]:
    """Return the number, the name, and the memory of each GPU that this process sees, as the driver tells them."""
    settings = Settings("", count, "cuda", tuple(range(count)), environ=dict(os.environ))
    lines = []
    for index in range(count):
        memory, name = _gpu_memory(gpu := gpu_of(settings, index)), ""
        with contextlib.suppress(Exception):
            name = _nvml().nvmlDeviceGetName(_handle(gpu))
        used = f", {memory[0] >> 20:,} of {memory[1] >> 20:,} MiB used" if memory is not None else ""
        lines.append(f"{index}: {name or 'GPU'}{used}")
    return lines


@functools.lru_cache(maxsize=1)
def _nvml() -> Any:
    """NVIDIA's management library, which comes with the driver; None without one."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml
    return None


def _handle(gpu: str) -> Any:
    nvml = _nvml()
    return nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdigit() else nvml.nvmlDeviceGetHandleByUUID(gpu)


def _gpu_memory(gpu: str) -> tuple[int, int] | None:
    if (nvml := _nvml()) is None:
        return None
    with contextlib.suppress(nvml.NVMLError):
        handle = _handle(gpu)
        found = nvml.nvmlDeviceGetMemoryInfo(handle)
        with contextlib.suppress(nvml.NVMLError):  # a driver before 510; as nvidia-smi: without what it has reserved
            found = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return int(found.used), int(found.total)
    return None
