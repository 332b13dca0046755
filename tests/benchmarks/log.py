"""What one step of logging costs the training thread, beside tqdm."""

from __future__ import annotations

import io
import sys
import time
from importlib.util import find_spec

import cloudpickle

import nbddp
from tests.benchmarks.measure import Table

CALLS = 50_000

# As from a notebook's cells: by value, else the ranks would import this module and its imports.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def measure(rounds: int) -> Table:
    """``log()`` of two floats, beside tqdm's ``set_postfix`` and ``update``."""
    table = Table("One step of logging, loss and acc", unit="µs", scale=1e6)
    if not find_spec("tqdm"):
        table.notes.append("tqdm is not installed")
    for seconds in nbddp.run(_both, (rounds,), nprocs=1, device="cpu", show=False).value:
        for name, value in seconds.items():
            table.add(name, value)
    return table


def _both(rounds: int) -> list[dict[str, float]]:
    return [{"tqdm set_postfix + update": _tqdm(), "nbddp.log": _log()} for _ in range(rounds)]


def _log() -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        nbddp.log(loss=0.5, acc=0.2)
    return (time.perf_counter() - began) / CALLS


def _tqdm() -> float:
    from tqdm import tqdm

    bar = tqdm(total=CALLS, file=io.StringIO())
    began = time.perf_counter()
    for _ in range(CALLS):
        bar.set_postfix(loss=0.5, acc=0.2, refresh=False)
        bar.update()
    return (time.perf_counter() - began) / CALLS
