"""From the call to the last process gone: 4 ranks, one all-reduce each."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection

import cloudpickle
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import nbddp
from tests.benchmarks.measure import Table, in_turn

RANKS = 4

# As from a notebook's cells: by value, else the ranks would import this module and its imports.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def all_reduce() -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size() == RANKS


def all_reduce_by_hand(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    all_reduce()
    dist.destroy_process_group()


def all_reduce_under_accelerate() -> None:
    from accelerate import PartialState

    PartialState(cpu=True)
    all_reduce()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_nbddp() -> None:
    nbddp.run(all_reduce, nprocs=RANKS, device="cpu", show=False)


def run_accelerate() -> None:
    from accelerate import debug_launcher

    debug_launcher(all_reduce_under_accelerate, num_processes=RANKS)


def warm_start(rounds: int) -> Table:
    """Second and later runs of nbddp, beside a fork of the kernel; each in a kernel of its own.

    In a common one, nbddp would pay for the pages that accelerate's forks left to be copied.
    """
    table = Table(f"Start, {RANKS} ranks to all joined: warm, beside a fork of the kernel")
    with contextlib.ExitStack() as stack:
        kernels = {"nbddp.run": stack.enter_context(OwnKernel(run_nbddp))}
        if find_spec("accelerate"):
            kernels["accelerate.debug_launcher"] = stack.enter_context(OwnKernel(run_accelerate))
        else:
            table.notes.append("accelerate is not installed")
        for kernel in kernels.values():
            kernel.seconds()
        for _ in range(rounds):
            for name, kernel in kernels.items():
                table.add(name, kernel.seconds())
    return table


class OwnKernel:
    """A process that runs one candidate whenever it is asked, and tells how long it took."""

    def __init__(self, candidate: Callable[[], object]) -> None:
        self._ours, theirs = mp.get_context("spawn").Pipe()
        self._process = mp.get_context("spawn").Process(target=_serve, args=(candidate, theirs))

    def __enter__(self) -> OwnKernel:
        self._process.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ours.send(False)
        self._process.join()

    def seconds(self) -> float:
        self._ours.send(True)
        return float(self._ours.recv())


def _serve(candidate: Callable[[], object], channel: Connection) -> None:
    warnings.simplefilter("ignore")
    while channel.recv():
        began = time.perf_counter()
        candidate()
        channel.send(time.perf_counter() - began)


def against_spawn(rounds: int) -> Table:
    """nbddp beside fresh interpreters."""
    run_nbddp()
    return in_turn(
        Table(f"Start, {RANKS} ranks to all joined: beside fresh interpreters"),
        rounds,
        {
            "nbddp.run": run_nbddp,
            "torch.multiprocessing.spawn": lambda: mp.spawn(all_reduce_by_hand, (free_port(),), nprocs=RANKS),
        },
    )


def memory() -> Table:
    """Private memory of a rank that has trained one step, by /proc/self/smaps_rollup."""
    table = Table("Private memory of one rank of 4", unit="MB", scale=1e-6)
    for value in nbddp.run(private_bytes, nprocs=RANKS, device="cpu", show=False).values:
        table.add("nbddp.run", value)
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    mp.spawn(_put_private_bytes, (queue,), nprocs=RANKS)
    for _ in range(RANKS):
        table.add("torch.multiprocessing.spawn", queue.get())
    return table


def private_bytes() -> float:
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    with open("/proc/self/smaps_rollup") as file:
        kilobytes = [int(line.split()[1]) for line in file if line.startswith("Private_")]
    return 1024.0 * sum(kilobytes)


def _put_private_bytes(rank: int, queue: mp.SimpleQueue) -> None:
    queue.put(private_bytes())
