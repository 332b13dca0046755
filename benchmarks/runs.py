"""Figures of runs: warm, in a new kernel, with data, when the kernel is killed, and on two nodes of Ray."""

from __future__ import annotations

import contextlib
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.kernel import HERE, LIMIT_S, Kernel, kept
from benchmarks.measure import Sizes, Table, version_of
from benchmarks.ways import ACCELERATE, FORK, NBDDP, ON_RAY, SILENT, WAYS, WORK, Way, installed


def warm(table: Table, sizes: Sizes, ways: Sequence[Way] = WAYS) -> None:
    """A run with an all-reduce in a kernel that had one before; ipyparallel keeps its engines and their group."""
    figure = f"warm run of {sizes.ranks} ranks"
    with kept(lambda way: way.prepared(sizes.ranks)) as kernels:

        def turn(way: Way) -> None:
            table.add(figure, way.name, kernels(way).cell(way.cell("together", sizes.ranks)).seconds)

        table.turns(figure, sizes.rounds, ways, turn)


def first(table: Table, sizes: Sizes, ways: Sequence[Way] = tuple(installed([NBDDP, SILENT, ACCELERATE]))) -> None:
    """From the imports in a new kernel to the end of a run that trains one step."""
    figure = f"first run in a new kernel, with imports: DDP and SGD on {sizes.ranks} ranks"

    def turn(way: Way) -> None:
        with Kernel() as kernel:
            cells = (way.imports, WORK, way.cell("train_a_step", sizes.ranks))
            table.add(figure, way.name, sum(kernel.cell(source).seconds for source in cells))

    table.turns(figure, sizes.rounds, ways, turn)


def data(table: Table, sizes: Sizes, ways: Sequence[Way] = (SILENT,)) -> None:
    """A run whose ranks read each page of a tensor, less a run without; against a copy of the tensor."""
    figure = f"send {sizes.mib:,} MiB to {sizes.ranks} ranks"
    copy = "began = time.perf_counter(); copy = data.clone(); print(time.perf_counter() - began); del copy"
    with kept(lambda way: way.prepared(sizes.ranks)) as kernels:

        def turn(way: Way) -> None:
            kernel = kernels(way)
            kernel.cell(f"data = torch.rand({sizes.mib} << 18)")  # 4 bytes each
            copied = float(kernel.cell(copy).shown)
            without = kernel.cell(way.cell("together", sizes.ranks)).seconds
            table.add(figure, way.name, kernel.cell(way.cell("touch", sizes.ranks, "data")).seconds - without)
            table.add(figure, "a copy, data.clone()", copied)
            kernel.cell("del data")

        table.turns(figure, sizes.rounds, ways, turn)


def killed(table: Table, sizes: Sizes, ways: Sequence[Way] = (SILENT, FORK)) -> None:
    """From SIGKILL to the kernel to the end of the last process that it had started."""
    figure = f"kernel killed, {sizes.ranks} ranks, until all processes are gone"

    def turn(way: Way) -> None:
        with way.prepared(sizes.ranks) as kernel:
            here, deadline = kernel.folder / "here", time.monotonic() + LIMIT_S
            kernel.begin(way.cell("go_on", sizes.ranks, repr(str(here))))
            while not here.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError("the ranks don't come")
                time.sleep(0.01)
            ends = [os.pidfd_open(process.pid) for process in kernel.started()]
            began = time.monotonic()
            kernel.process.kill()
            for end in ends:
                if not select.select([end], [], [], LIMIT_S)[0]:
                    raise TimeoutError("processes are left")
                os.close(end)
            table.add(figure, way.name, time.monotonic() - began)

    table.turns(figure, sizes.rounds, ways, turn)


def nodes(table: Table, sizes: Sizes, ways: Sequence[Way] = (ON_RAY,)) -> None:
    """The first run of a kernel, and later ones, on two nodes of a Ray that was started for the kernel."""
    first, warm = (f"{which} run of {sizes.ranks} ranks on 2 nodes of Ray" for which in ("first", "warm"))

    def turn(way: Way) -> None:
        with ray() as environ, Kernel(**environ) as kernel:
            for source in (WORK, way.imports):
                kernel.cell(source)
            run = way.cell("together", sizes.ranks)
            table.add(first, way.name, kernel.cell(run).seconds)
            table.add(warm, way.name, statistics.median(kernel.cell(run).seconds for _ in range(5)))

    if version_of("ray"):
        table.turns(first, sizes.rounds, ways, turn)


@contextlib.contextmanager
def ray() -> Iterator[dict[str, str]]:
    """Start a Ray of two nodes; gives the variables that lead to it."""
    with tempfile.TemporaryDirectory(prefix="nbr-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        patient = {"RAY_raylet_start_wait_time_s": "240", "RAY_worker_register_timeout_seconds": "240"}
        given = {**patient, "RAY_TMPDIR": folder, "TMPDIR": folder}
        environ = {**os.environ, **given, "PYTHONPATH": str(HERE)}
        command = [sys.executable, str(HERE / "tests" / "long" / "ray_cluster.py"), "2"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environ, **pipes) as process:  # ends with its stdin
            yield {**given, "RAY_ADDRESS": str(process.stdout and process.stdout.readline()).strip()}
