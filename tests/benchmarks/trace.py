"""When each step of a run begins and ends: wraps nbddp's functions, in the kernel and in a fork server's ranks.

Imported in a kernel whose environment names the file to write to, before the first run.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

FILE = "NBDDP_BENCHMARK_TRACE"

_spans: list[str] = []


def timed(owner: Any, name: str, label: str) -> None:
    """Have a function of nbddp's tell when it began and ended."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return original(*args, **kwargs)
        finally:
            add(label, began, time.monotonic())

    setattr(owner, name, wrapper)


def add(label: str, began: float, ended: float) -> None:
    _spans.append(f"{began} {ended} {label}\n")


def write() -> None:
    """In one piece: several processes share the file."""
    text, _spans[:] = "".join(_spans), []
    fd = os.open(os.environ.get(FILE) or _path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, text.encode())
    os.close(fd)


def in_kernel() -> None:
    """Wrap the kernel side, and have the fork server wrap the ranks'."""
    from nbddp.forkserver import server as forkserver
    from nbddp.forkserver import server_process
    from nbddp.kernel import attempt, runner, site, supervisor, views
    from nbddp.launch import crew, rank

    server_process.IMPORTS.append("tests.benchmarks.trace")
    if forkserver.pid() is not None:  # importing nbddp has started one, without this
        forkserver.shut_down()
    timed(runner, "make_plan", "kernel: check the arguments")
    timed(runner, "_pickle_call", "kernel: pickle")
    timed(site.LocalSite, "copy_data", "kernel: copy the data")
    timed(views.RunViews, "open", "kernel: open the panel")
    timed(site.NotebookCrew, "jobs", "kernel: make the jobs")
    timed(crew.LocalCrew, "_start_one", "kernel: start a process")
    timed(attempt.Attempt, "_result_of", "kernel: unpack a result")
    timed(crew.LocalCrew, "__exit__", "kernel: see that all are gone")
    timed(crew.LocalCrew, "close", "kernel: close all fds")
    timed(attempt.Attempt, "_follow", "kernel: follow the ranks")
    timed(supervisor.Supervisor, "_run", "kernel: the run's thread")
    timed(views.RunViews, "update", "kernel: redraw the panel")
    original = site.open_rendezvous

    def open_rendezvous(world_size: int) -> Any:
        manager = original(world_size)
        timed_enter = type(manager).__enter__

        class Timed:
            def __enter__(self) -> Any:
                began = time.monotonic()
                value = timed_enter(manager)
                add("kernel: open the store", began, time.monotonic())
                return value

            def __exit__(self, *exc_info: Any) -> Any:
                began = time.monotonic()
                value = manager.__exit__(*exc_info)
                add("kernel: close the store", began, time.monotonic())
                return value

        return Timed()

    site.open_rendezvous = open_rendezvous  # type: ignore[assignment]
    handle = rank.LocalRank._handle

    def _handle(self: Any, message: Any) -> None:
        now = time.monotonic()
        add(f"kernel: hears {type(message).__name__}", now, now)
        handle(self, message)

    rank.LocalRank._handle = _handle  # type: ignore[method-assign]


def in_ranks() -> None:
    """Wrap the worker side; runs in the fork server."""
    from torch import distributed

    from nbddp import payload
    from nbddp.worker import dead_man_switch, entry, main_module, metrics, output, process_group, setup

    for owner, name, label in (
        (dead_man_switch, "arm", "arm the switch"),
        (output, "redirect", "redirect the output"),
        (entry, "_detach_from_fork_server", "detach from the fork server"),
        (setup, "_set_environ", "set the environment"),
        (main_module, "install", "make __main__"),
        (metrics, "enter", "open metrics"),
        (setup, "_draw_fresh_seeds", "draw seeds"),
        (process_group, "TCPStore", "connect to the store"),
        (distributed, "init_process_group", "make the group"),
        (process_group, "open_group", "store and group"),
        (process_group, "wrap_init_process_group", "wrap init_process_group"),
        (setup, "set_up", "set up, all of it"),
        (payload, "unpack", "unpack"),
        (payload, "pack", "pack the result"),
        (entry, "_live", "from job to report"),
    ):
        timed(owner, name, f"rank: {label}")
    whole, leave = entry.main, entry._leave

    @functools.wraps(whole)
    def main(*args: Any, **kwargs: Any) -> None:
        began = time.monotonic()
        add("rank: is there", began, began)
        whole(*args, **kwargs)

    @functools.wraps(leave)
    def _leave(channel: Any) -> None:
        began = time.monotonic()
        leave(channel)
        add("rank: wait for leave", began, time.monotonic())
        os.environ[FILE] = _path  # a rank has the notebook's environment
        write()

    entry.main, entry._leave = main, _leave


_path = os.environ.get(FILE, "")
if _path and "nbddp.kernel" not in sys.modules:
    in_ranks()
