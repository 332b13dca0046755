"""Measures what needs a CUDA device: starts while the notebook has a context, logging without waiting, transfers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.benchmarks import gpu_work
from tests.benchmarks.kernel import WORK, Kernel, stamps
from tests.benchmarks.measure import Table
from tests.benchmarks.settings import Settings

CONTEXTS = {"no CUDA context in the notebook": "", "a CUDA context in the notebook": "torch.zeros(1, device='cuda')"}
MIB = 256  # of a transfer


def measure(settings: Settings) -> list[Table]:
    if not torch.cuda.is_available():
        return []
    return [start(settings), *logging(settings), transfer(settings)]


def start(settings: Settings, device: str = "cuda") -> Table:
    """One rank, warm, with the device's own backend."""
    table = Table(f"1 rank on {device}, warm", columns=("first all-reduce", "cell's end"))
    run = f"nbddp.run(all_reduce, ({{path!r}},), nprocs=1, device={device!r}, show=False)"
    with stamps() as file:
        for name, context in CONTEXTS.items() if device == "cuda" else [("on the CPU", "")]:
            with Kernel() as kernel:
                for source in ("%load_ext nbddp\nimport nbddp", WORK, context, run.format(path=file.path)):
                    kernel.cell(source)
                for _ in range(settings.rounds):
                    file.clear()
                    done = kernel.cell(run.format(path=file.path))
                    table.add(name, file.last() - done.began, "first all-reduce")
                    table.add(name, done.seconds, "cell's end")
    settings.show(table)
    return table


def logging(settings: Settings, device: str = "cuda") -> list[Table]:
    """A loop that is bound by launches: a wait for the device would show in its time, and in the profiler's list."""
    speed = Table("A step of a launch-bound loop", unit="µs", scale=1e6)
    waits = Table("Waits for the device in 200 such steps, by the profiler", unit="calls", scale=1, ratios=False)
    for _ in range(settings.rounds):
        for name in gpu_work.WAYS:
            seconds, calls = _in_a_rank(device, gpu_work.launch_bound, name, 2000)
            speed.add(name, seconds)
            waits.add(name, calls)
    for table in (speed, waits):
        settings.show(table)
    return [speed, waits]


def transfer(settings: Settings, device: str = "cuda", mib: int = MIB) -> Table:
    """The notebook's tensor, as the rank finds it (mapped, pageable), beside its own memory, pageable and pinned."""
    table = Table(f"{mib} MiB from the host to the device, in a rank", unit="GB/s", scale=1e-9)
    data = torch.rand(mib << 18)
    for _ in range(settings.rounds):
        for name, value in _in_a_rank(device, gpu_work.transfer, data).items():
            table.add(name, value)
    settings.show(table)
    return table


def _in_a_rank(device: str, function: Callable[..., Any], *args: object) -> Any:
    """The value of a function of gpu_work's in one rank."""
    import nbddp

    return nbddp.run(function, args, nprocs=1, device=device, show=False).value
