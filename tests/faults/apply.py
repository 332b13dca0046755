"""Applies a case's fault to a driver's run at its moment, and notes in ``case.applied`` what it did.

Every function returns when the harm is done, or when the run is over and there was nothing to harm.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.faults.cases import Case
from tests.faults.kernels import DriverKernel

_LEAVE_ALONE_S = 0.4  # a stopped rank's run, before somebody presses Stop


def harm(kernel: DriverKernel, case: Case) -> None:
    """Called at the moment."""
    _HARMS[case.fault](kernel, case)


def harm_before(kernel: DriverKernel, case: Case) -> None:
    """What is in place before the run begins."""
    if case.fault == "few fds, from the start":
        _limit_fds(kernel, case)
    if case.fault == "/dev/shm of 64 kB":
        case.applied["at"] = time.monotonic()


def heal(kernel: DriverKernel, case: Case) -> None:
    """Give the kernel back what it needs for the next case."""
    if "fds" in case.fault:
        resource.prlimit(kernel.pid, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
    for name in ("tmp", "snapshots"):
        with contextlib.suppress(FileNotFoundError):
            (kernel.seen(name) / "filler").unlink()


# ---------------------------------------------------------------------------- ranks


def _find_rank(kernel: DriverKernel, case: Case) -> tuple[int, int] | None:
    """A rank of the run that is hurt, and its pid, as soon as there is one; None when the run is over."""
    wanted = case.rank % case.runs[case.target]["nprocs"]
    while not kernel.has_answered(0.001):
        told = kernel.ask("pids", index=case.target)
        pids = told.get("pids", [])
        if len(pids) > wanted and told["state"] in ("starting", "running"):
            if not kernel.owns(pids[wanted]):
                return None  # it has ended already
            case.applied |= {"rank": wanted, "pid": pids[wanted], "rank_state": (told["states"] + ["?"] * 9)[wanted]}
            return wanted, pids[wanted]
    return None


def _send(kernel: DriverKernel, case: Case, pid: int, number: int) -> None:
    """To that very process, and no other that may get its number."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            if kernel.owns(pid):
                signal.pidfd_send_signal(fd, number)
                case.applied.setdefault("at", time.monotonic())
        finally:
            os.close(fd)


def _signal_rank(number: int) -> Callable[[DriverKernel, Case], None]:
    def harm(kernel: DriverKernel, case: Case) -> None:
        if found := _find_rank(kernel, case):
            _send(kernel, case, found[1], number)

    return harm


def _stop_rank(kernel: DriverKernel, case: Case) -> None:
    """A rank that stands still is no failure: somebody has to press Stop."""
    if not (found := _find_rank(kernel, case)):
        return
    _send(kernel, case, found[1], signal.SIGSTOP)
    if "at" not in case.applied or kernel.has_answered(_LEAVE_ALONE_S):
        return
    case.applied |= {"stopped_at": case.applied["at"], "at": time.monotonic()}
    kernel.ask("stop", index=case.target, grace_s=case.grace_s)


def _stop_and_continue(kernel: DriverKernel, case: Case) -> None:
    if found := _find_rank(kernel, case):
        _send(kernel, case, found[1], signal.SIGSTOP)
        kernel.has_answered(sum(case.pauses_s))
        _send(kernel, case, found[1], signal.SIGCONT)


def _limit_rank_memory(kernel: DriverKernel, case: Case) -> None:
    if found := _find_rank(kernel, case):
        with contextlib.suppress(OSError, ProcessLookupError):
            pages = int(Path(f"/proc/{found[1]}/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + case.number * 100_000
            if kernel.owns(found[1]):
                resource.prlimit(found[1], resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
                case.applied["at"] = time.monotonic()


def _kill_worker(kernel: DriverKernel, case: Case) -> None:
    """A DataLoader worker of that rank, once it has one."""
    if not (found := _find_rank(kernel, case)):
        return
    while not kernel.has_answered(0.002):
        with contextlib.suppress(psutil.Error):
            if children := psutil.Process(found[1]).children():
                _send(kernel, case, children[case.number % len(children)].pid, signal.SIGKILL)
                return


def _kill_fork_server(kernel: DriverKernel, case: Case) -> None:
    case.applied["pid"] = kernel.fork_server()
    if case.applied["pid"] is not None:
        _send(kernel, case, case.applied["pid"], signal.SIGKILL)


# ---------------------------------------------------------------------------- the kernel


def _kill_kernel(kernel: DriverKernel, case: Case) -> None:
    case.applied["at"] = time.monotonic()
    kernel.kill()


def _interrupt(times: int, how: Callable[[int, int], None]) -> Callable[[DriverKernel, Case], None]:
    def harm(kernel: DriverKernel, case: Case) -> None:
        for number in range(times):
            case.applied["sent"] = number + 1
            how(kernel.pid, signal.SIGINT)
            if number == min(1, times - 1):  # the second interrupt skips the grace
                case.applied["at"] = time.monotonic()
            if number < times - 1:
                time.sleep(case.pauses_s[number])

    return harm


def _ask_stop(kernel: DriverKernel, case: Case) -> None:
    _ask(kernel, case, "stop", grace_s=case.grace_s)


def _ask_panel_stop(kernel: DriverKernel, case: Case) -> None:
    _ask(kernel, case, "panel_stop")


def _ask(kernel: DriverKernel, case: Case, what: str, **arguments: Any) -> None:
    while not kernel.has_answered(0.001):
        case.applied["at"] = time.monotonic()
        if kernel.ask(what, index=case.target, **arguments)["stopped"]:
            return


def _limit_fds(kernel: DriverKernel, case: Case) -> None:
    limit = len(os.listdir(f"/proc/{kernel.pid}/fd")) + case.number
    resource.prlimit(kernel.pid, resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    case.applied |= {"at": time.monotonic(), "limit": limit}


# ---------------------------------------------------------------------------- the machine


def _fill(name: str) -> Callable[[DriverKernel, Case], None]:
    def harm(kernel: DriverKernel, case: Case) -> None:
        case.applied["at"] = time.monotonic()
        block = b"\0" * (64 << 10)
        with contextlib.suppress(OSError), open(kernel.seen(name) / "filler", "wb", buffering=0) as file:
            while block:
                if file.write(block) < len(block):
                    block = block[: len(block) // 2]

    return harm


def _nothing(kernel: DriverKernel, case: Case) -> None:
    """It is done already, or by the program itself."""


def _by_the_program(kernel: DriverKernel, case: Case) -> None:
    run = case.runs[case.target]
    case.applied |= {"at": time.monotonic() + run["seconds"], "rank": run["token"] % run["nprocs"]}


_HARMS: dict[str, Callable[[DriverKernel, Case], None]] = {
    "none": _nothing,
    "rank SIGKILL": _signal_rank(signal.SIGKILL),
    "rank SIGTERM": _signal_rank(signal.SIGTERM),
    "rank SIGSTOP": _stop_rank,
    "rank SIGSTOP, SIGCONT": _stop_and_continue,
    "rank RLIMIT_AS": _limit_rank_memory,
    "fork server SIGKILL": _kill_fork_server,
    "DataLoader worker SIGKILL": _kill_worker,
    "kernel SIGKILL": _kill_kernel,
    "interrupt, kill": _interrupt(1, os.kill),
    "interrupt, killpg": _interrupt(1, os.killpg),
    "5 interrupts, kill": _interrupt(5, os.kill),
    "5 interrupts, killpg": _interrupt(5, os.killpg),
    "interrupt at a line": _nothing,
    "run.stop()": _ask_stop,
    "panel's Stop": _ask_panel_stop,
    "few fds, from the start": _nothing,
    "few fds, from some moment": _limit_fds,
    "disk full for snapshots": _fill("snapshots"),
    "disk full for output": _fill("tmp"),
    "/dev/shm of 64 kB": _nothing,
    "memory.max of a cgroup": _by_the_program,
    "memory, RLIMIT_AS in the function": _by_the_program,
}
