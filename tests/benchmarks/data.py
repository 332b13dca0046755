"""1 GiB of notebook data to 4 ranks, and back."""

from __future__ import annotations

import os
import sys
import time

import cloudpickle
import torch

import nbddp
from nbddp import payload
from tests.benchmarks.measure import Table

RANKS = 4
NBYTES = 1 << 30

# As from a notebook's cells: by value, else the ranks would import this module and its imports.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def measure(rounds: int) -> list[Table]:
    """Pack, and a whole run that reads the tensor in every rank, beside ``clone()``; then memory; then the way back."""
    tensor = torch.randn(NBYTES // 4)
    into = Table(f"{NBYTES >> 30} GiB tensor in")
    memory = Table("New memory while 4 ranks hold 1 GiB", unit="GiB", scale=1 / 2**30)
    back = Table(f"{NBYTES >> 30} GiB tensor back from one rank")
    for _ in range(rounds):
        began = time.perf_counter()
        copy = tensor.clone()
        into.add("tensor.clone()", time.perf_counter() - began)
        back.add("tensor.clone()", into.rows["tensor.clone()"][-1])
        del copy
        into.add("pack into the block", _pack(tensor))
        empty = _timed(_first, torch.zeros(1))
        before = _used()
        began = time.perf_counter()
        run = nbddp.run(_first, (tensor,), nprocs=RANKS, device="cpu", show=False, wait=False)
        run.wait()
        into.add("run() with it, less a run without", time.perf_counter() - began - empty)
        memory.add("the block and all ranks", max(run.values) - before)
        began = time.perf_counter()
        value = nbddp.run(_make, (NBYTES // 4,), nprocs=1, device="cpu", show=False).value
        back.add("run() that returns it (and makes it)", time.perf_counter() - began)
        assert value.numel() == NBYTES // 4
        del value
    return [into, memory, back]


def _pack(tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    fd = payload.open_block("benchmark")
    payload.pack(tensor, fd)
    seconds = time.perf_counter() - began
    os.close(fd)
    return seconds


def _timed(fn: object, *args: object) -> float:
    began = time.perf_counter()
    nbddp.run(fn, args, nprocs=RANKS, device="cpu", show=False)
    return time.perf_counter() - began


def _first(tensor: torch.Tensor) -> float:
    assert torch.isfinite(tensor[:: 1 << 10]).all()  # touches every page
    nbddp.barrier()
    return _used()


def _make(count: int) -> torch.Tensor:
    return torch.zeros(count)


def _used() -> float:
    """Memory in use on this machine, as /proc/meminfo counts it (the block is Shmem)."""
    with open("/proc/meminfo") as file:
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in file}
    return 1024.0 * (kilobytes["MemTotal"] - kilobytes["MemAvailable"])
