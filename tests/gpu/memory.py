"""The device's memory is back where it was after each kind of end: of the run, of a rank, of the kernel."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.benchmarks.kernel import Kernel, Stamps, stamps
from tests.gpu.machine import gpu_used
from tests.gpu.report import Report
from tests.support import gone

BACK_WITHIN_S = 10.0
CLOSE = 16 << 20
ENDS = ("success", "failure", "interrupt", "kill -9 of a rank", "kill -9 of the kernel")
NBYTES = {"cuda": 2 << 30, "cpu": 64 << 20}


def given_back(report: Report) -> None:
    """On a CPU the same is watched of the ranks' resident memory."""
    for ranks in (1, 2):
        with Kernel() as kernel, stamps() as file:
            kernel.cell("%load_ext nbddp\nimport nbddp\nfrom tests.gpu import work")
            kernel.cell(_source(report, file, ranks, "return"))
            for end in ENDS:
                file.clear()
                _one(report, kernel, file, ranks, end)


def _one(report: Report, kernel: Kernel, file: Stamps, ranks: int, end: str) -> None:
    name = f"{end}, {ranks} rank{'s' * (ranks > 1)}"
    mode = {"success": "return", "failure": "raise"}.get(end, "stay")
    before = _used(report, [])
    going = kernel.begin(_source(report, file, ranks, mode))
    file.wait_for(ranks)
    pids = [int(words[0]) for _, words in file.lines()]
    if mode == "stay":
        taken = _used(report, pids) - before
        report.check(f"{name}: the memory was taken", taken > 0.9 * ranks * NBYTES[report.device], taken / 2**20)
    began = time.monotonic()
    _bring_about(end, kernel, pids)
    if end != "kill -9 of the kernel":
        error = kernel.end_of(going).error.partition(":")[0]
        wanted = {"success": "", "failure": "RankError", "interrupt": "KeyboardInterrupt"}.get(end, "RankDied")
        report.check(f"{name}: the cell's error", error == wanted, error)
    seconds = _seconds_until(began, lambda: _used(report, pids) - before <= CLOSE)
    left = f"{(_used(report, pids) - before) / 2**20:.0f} MiB left"
    report.check(f"{name}: the memory is back", seconds is not None, left)
    report.value(f"{name}: memory back after", None if seconds is None else seconds * 1e3, "ms")
    report.check(f"{name}: the ranks are gone", _seconds_until(began, lambda: all(map(gone, pids))) is not None)


def _seconds_until(began: float, condition: Callable[[], bool]) -> float | None:
    """Seconds from then until it holds; None if it does not in time."""
    while not condition():
        if time.monotonic() > began + BACK_WITHIN_S:
            return None
        time.sleep(0.005)
    return time.monotonic() - began


def _bring_about(end: str, kernel: Kernel, pids: list[int]) -> None:
    if end == "interrupt":
        kernel.interrupt()
    elif end == "kill -9 of a rank":
        os.kill(pids[-1], signal.SIGKILL)
    elif end == "kill -9 of the kernel":
        kernel.kill()


def _source(report: Report, file: Stamps, ranks: int, mode: str) -> str:
    Path(file.path + ".go").unlink(missing_ok=True)
    nbytes = NBYTES[report.device]
    return f"nbddp.run(work.hold, ({file.path!r}, {nbytes}, {mode!r}), {report.options(ranks)}, show=False)"


def _used(report: Report, pids: list[int]) -> int:
    if report.on_cuda:
        return gpu_used()
    used = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            used += psutil.Process(pid).memory_info().rss
    return used
