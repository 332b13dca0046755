"""What a rank makes goes with the run, however either ends: processes that it detached, segments, semaphores."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil
import pytest

import nbddp
from nbddp import leftovers
from nbddp.kernel import forkserver
from tests.support import Cells, Notebook, marked_pids, run, script, start, wait_until

SHM = Path("/dev/shm")
_DETACH = """
import os, signal, subprocess, time, nbddp
def daemon():
    if os.fork():
        return os.wait()
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(1001)
def detach():
    subprocess.Popen(["sleep", "1002"], start_new_session=True)
    subprocess.Popen(["sleep", "1003"], preexec_fn=os.setpgrp)
    subprocess.run(["setsid", "sh", "-c", "exec sleep 1004 &"])
    subprocess.Popen(["setsid", "sh", "-c", "sleep 1005 & setsid sleep 1006 & wait"])
def detach_all():
    detach()
    subprocess.Popen(["sleep", "1007"], start_new_session=True, env={})
    daemon()
def end_by(how, detach):
    detach()
    time.sleep(0.2)
    open(f"rank-{nbddp.rank()}", "w").close()
    if how == "finish": return nbddp.rank()
    nbddp.barrier()
    if how == "raise": raise ValueError("boom")
    if how == "kill" and nbddp.rank(): os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave" and nbddp.rank(): os._exit(3)
    time.sleep(1000)
"""


def _in_folder(folder: Path) -> list[str]:
    """The command lines of the processes that were started in this folder: the ranks of a test, and what they start."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if os.getpid() not in (process.pid, process.ppid()) and process.cwd().startswith(str(folder)):
                found.append(" ".join(process.cmdline()))
    return sorted(found)


def _ready(folder: Path) -> bool:
    return len(list(folder.glob("rank-*"))) == 2


# ---------------------------------------------------------------------------- processes


@pytest.mark.parametrize("end", ["finish", "raise", "kill", "leave", "stop"])
def test_processes_that_a_rank_detached_end_with_it(cell: Cells, in_folder: Path, end: str) -> None:
    names = cell(_DETACH)
    going = start(names.end_by, end, names.detach_all)
    if end == "stop":
        wait_until(lambda: _ready(in_folder))
        sleeps = [line for line in _in_folder(in_folder) if line.startswith("sleep")]
        assert sleeps == sorted(2 * [f"sleep {1000 + i}" for i in range(2, 8)])
        going.stop(0)
    with contextlib.suppress(nbddp.RankError, nbddp.RankDied):
        going.wait()
    assert _ready(in_folder)
    assert _in_folder(in_folder) == []


@pytest.mark.parametrize("end", ["finish", "kill"])
def test_processes_that_a_spawned_rank_detached_end_with_it(cell: Cells, in_folder: Path, end: str) -> None:
    names = cell(_DETACH)
    with contextlib.suppress(nbddp.RankDied):
        run(names.end_by, end, names.detach, start_method="spawn")
    assert _ready(in_folder)
    assert _in_folder(in_folder) == []


def test_processes_that_a_rank_detached_end_with_it_when_the_fork_server_is_gone(cell: Cells, in_folder: Path) -> None:
    names = cell(_DETACH)
    going = start(names.end_by, "stop", names.detach)
    wait_until(lambda: _ready(in_folder))
    server = forkserver.pid()
    assert server is not None
    psutil.Process(server).kill()
    time.sleep(0.2)
    going.stop(0)
    assert _in_folder(in_folder) == []
    assert run(names.time.time).state == "finished"  # a new server, for the tests that follow


def test_processes_that_a_rank_detached_end_with_a_killed_kernel(in_folder: Path) -> None:
    before = marked_pids()
    with Notebook() as notebook:
        notebook.ok(f"import os; os.chdir({str(in_folder)!r})\n{_DETACH}")
        notebook.begin("nbddp.run(end_by, ('stop', detach_all), nprocs=2, device='cpu')")
        wait_until(lambda: _ready(in_folder))
        notebook.kill()
        wait_until(lambda: [line for line in _in_folder(in_folder) if "sleep" in line] == [], 5)
    wait_until(lambda: marked_pids() <= before)


def test_a_living_ranks_detached_processes_are_left_alone(cell: Cells, in_folder: Path) -> None:
    """Also when another rank, or a child of its own, ends meanwhile."""
    names = cell(
        _DETACH
        + """
def lives():
    detach_all()
    time.sleep(0.2)
    open(f"rank-{nbddp.rank()}", "w").close()
    while not os.path.exists("go"): time.sleep(0.01)
"""
    )
    going = start(names.lives)
    wait_until(lambda: _ready(in_folder))
    before = _in_folder(in_folder)
    assert run(names.time.time).state == "finished"
    assert _in_folder(in_folder) == before
    (in_folder / "go").touch()
    assert going.wait(20).state == "finished"
    assert _in_folder(in_folder) == []
