"""Measures what one step of logging costs the training thread, compared with other ways to show a loss."""

from __future__ import annotations

import io
import sys
import tempfile
import time
from collections.abc import Callable

import cloudpickle

import nbddp
from tests.benchmarks.measure import Table, version_of
from tests.benchmarks.settings import Settings

CALLS = 50_000

# As from a notebook's cells: by value, else the ranks would import this module and its imports.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def measure(settings: Settings) -> list[Table]:
    """``log()`` of two floats and of a tensor, beside tqdm and tensorboard; all in one rank, in turn."""
    table = Table("One step of logging, loss and acc", unit="µs", scale=1e6)
    ways: list[Callable[[int], float]] = [_log, _log_a_tensor]
    for needs, way in (("tqdm", _tqdm), ("tensorboard", _tensorboard)):
        if version_of(needs):
            ways.append(way)
        else:
            table.notes.append(f"{needs} is not installed")
    calls = max(100, int(CALLS * settings.steps))
    run = nbddp.run(_in_turn, (ways, settings.rounds, calls), nprocs=1, device="cpu", show=False)
    for name, seconds in run.value:
        table.add(name, seconds)
    settings.show(table)
    return [table]


def _in_turn(ways: list[Callable[[int], float]], rounds: int, calls: int) -> list[tuple[str, float]]:
    return [((way.__doc__ or "").rstrip("."), way(calls) / calls) for _ in range(rounds) for way in ways]


def _log(calls: int) -> float:
    """nbddp.log, floats."""
    began = time.perf_counter()
    for _ in range(calls):
        nbddp.log(loss=0.5, acc=0.2)
    return time.perf_counter() - began


def _log_a_tensor(calls: int) -> float:
    """nbddp.log, loss a tensor."""
    import torch

    loss = torch.tensor(0.5)
    began = time.perf_counter()
    for _ in range(calls):
        nbddp.log(loss=loss, acc=0.2)
    return time.perf_counter() - began


def _tqdm(calls: int) -> float:
    """tqdm set_postfix + update."""
    from tqdm import tqdm

    bar = tqdm(total=calls, file=io.StringIO())
    began = time.perf_counter()
    for _ in range(calls):
        bar.set_postfix(loss=0.5, acc=0.2, refresh=False)
        bar.update()
    return time.perf_counter() - began


def _tensorboard(calls: int) -> float:
    """tensorboard add_scalar, twice."""
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        began = time.perf_counter()
        for step in range(calls):
            writer.add_scalar("loss", 0.5, step)
            writer.add_scalar("acc", 0.2, step)
        return time.perf_counter() - began
