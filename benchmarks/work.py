"""What the ranks do: plain torch, the same for all ways. It's run as a cell, and imported where cells can't be sent."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def by_hand(rank: int, nprocs: int, port: int, function: Callable[..., Any], *args: Any) -> None:
    join_group(rank, nprocs, port)
    function(*args)
    dist.destroy_process_group()


def join_group(rank: int, nprocs: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=nprocs)


def under_accelerate(function: Callable[..., Any], *args: Any) -> None:
    from accelerate import PartialState

    PartialState(cpu=True)
    function(*args)


def torchrun(nprocs: int, function: str) -> None:
    """Do what a user does in a terminal. The exit code says nothing: torch 2.13 aborts at exit now and then."""
    rank = f"from benchmarks import work; work.dist.init_process_group('gloo'); work.{function}()"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nprocs}"]
    command += ["--no-python", sys.executable, "-c", f"{rank}; print('done', flush=True)"]
    with tempfile.TemporaryDirectory() as folder:  # in which it leaves a folder
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": folder})
    assert done.stdout.count("done") == nprocs, done.stderr


def together() -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


def train_a_step() -> None:
    """What imports most: DDP and an optimizer."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()


def touch(data: torch.Tensor) -> None:
    """Read a number of each page, and copy nothing."""
    assert torch.isfinite(data[::1024]).all()
    together()


def go_on(path: str) -> None:
    together()
    open(path, "w").close()
    while True:
        time.sleep(0.05)


def log_and_tqdm(calls: int) -> tuple[float, float]:
    """Return the seconds that one step of each takes."""
    from tqdm import tqdm

    import nbddp

    bar = tqdm(total=calls, file=io.StringIO())
    began = time.perf_counter()
    for _ in range(calls):
        nbddp.log(loss=0.5, acc=0.2)
    middle = time.perf_counter()
    for _ in range(calls):
        bar.set_postfix(loss=0.5, acc=0.2, refresh=False)
        bar.update()
    return (middle - began) / calls, (time.perf_counter() - middle) / calls


def draw_curves(steps: int) -> None:
    """Log curves: three quarters of the steps at once, the rest at 50 a second."""
    import nbddp

    for step in range(steps):
        if step > steps * 3 // 4:
            time.sleep(0.02)
        nbddp.log({"train/loss": 2.5 / (step + 1), "train/acc": step % 7 / 7}, reduce="mean")
        if step % 100 == 99:
            nbddp.log({"val/loss": 0.5, "val/acc": 0.8}, reduce="mean")


def watch(view: type[Any]) -> list[float]:
    """Return a list that gets the CPU seconds of each update of a run's view."""
    update, spent = view.update, []

    def timed(self: Any, *given: Any) -> None:
        began = time.thread_time()
        update(self, *given)
        spent.append(time.thread_time() - began)

    view.update = timed
    return spent
