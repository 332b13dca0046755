"""Measures what needs a CUDA device: starts while the notebook has a context, logging without waiting, transfers."""

from __future__ import annotations

import torch

from tests.benchmarks import gpu_work
from tests.benchmarks.kernel import WORK, Kernel, stamps
from tests.benchmarks.measure import Table
from tests.benchmarks.settings import Settings

CONTEXTS = {"no CUDA context in the notebook": "", "a CUDA context in the notebook": "torch.zeros(1, device='cuda')"}


def measure(settings: Settings) -> list[Table]:
    if not torch.cuda.is_available():
        return []
    tables = [_start(settings), *_logging(settings), _transfer(settings)]
    for table in tables:
        settings.show(table)
    return tables


def _start(settings: Settings) -> Table:
    """nccl, one rank; warm."""
    table = Table("nccl, 1 rank, warm", columns=("first all-reduce", "cell's end"))
    run = "nbddp.run(all_reduce_on_gpu, ({path!r},), nprocs=1, device='cuda', backend='nccl', show=False)"
    with stamps() as file:
        for name, context in CONTEXTS.items():
            with Kernel() as kernel:
                for source in ("%load_ext nbddp\nimport nbddp", WORK, _source(), context, run.format(path=file.path)):
                    kernel.cell(source)
                for _ in range(settings.rounds):
                    file.clear()
                    done = kernel.cell(run.format(path=file.path))
                    table.add(name, file.last() - done.began, "first all-reduce")
                    table.add(name, done.seconds, "cell's end")
    return table


def _logging(settings: Settings) -> list[Table]:
    """A loop that is bound by launches: a wait for the device would show in its time, and in the profiler's list."""
    speed = Table("A step of a launch-bound loop", unit="µs", scale=1e6)
    waits = Table("Waits for the device in 200 such steps, by the profiler", unit="calls", scale=1, ratios=False)
    for _ in range(settings.rounds):
        for name in gpu_work.WAYS:
            seconds, calls = _in_a_rank(f"launch_bound({name!r}, 2000)")
            speed.add(name, seconds)
            waits.add(name, calls)
    return [speed, waits]


def _transfer(settings: Settings) -> Table:
    """The notebook's tensor, as the rank finds it (mapped, pageable), beside its own memory, pageable and pinned."""
    table = Table("256 MiB from the host to the device, in a rank", unit="GB/s", scale=1e-9)
    for _ in range(settings.rounds):
        for name, value in _in_a_rank("transfer(torch.rand(64 << 20))").items():
            table.add(name, value)
    return table


def _in_a_rank(call: str) -> object:
    """The value of that call of gpu_work's in one rank."""
    import nbddp

    function, _, rest = call.partition("(")
    args = eval(f"({rest[:-1]},)", {"torch": torch})
    return nbddp.run(getattr(gpu_work, function), args, nprocs=1, device="cuda", show=False).value


def _source() -> str:
    with open(gpu_work.__file__) as file:
        return file.read()
