"""What a rank makes goes with the run, however either ends: processes that it detached, segments, semaphores."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import nbddp
from nbddp.kernel import forkserver
from tests.support import Cells, Notebook, gone, run, script, start, wait_until

# How a process leaves the session or group of the rank that starts it. Each notes its pid in the current folder.
DETACHED = {
    "a session of its own": "subprocess.Popen(SLEEP, start_new_session=True)",
    "a group of its own": "subprocess.Popen(SLEEP, preexec_fn=os.setpgrp)",
    "started by one that ended": "subprocess.run(['setsid', 'sh', '-c', 'exec ' + ' '.join(SLEEP) + ' &'])",
    "no mark in its environment": "subprocess.Popen(SLEEP, start_new_session=True, env={})",
    "forked twice": "daemon()",
    "with children of its own": "subprocess.Popen(['setsid', 'sh', '-c', 'sleep 1000 & setsid sleep 1000 & wait'])",
}
_CELL = """
import os, signal, subprocess, sys, time, nbddp
SLEEP = ["sleep", "1000"]
def daemon():
    if os.fork():
        return os.wait()
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(1000)
def end_by(how):
    detach()
    time.sleep(0.1)
    open(f"rank-{nbddp.rank()}", "w").close()
    if how == "finish": return nbddp.rank()
    if how == "raise": raise ValueError("boom")
    if how == "kill" and nbddp.rank(): os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave" and nbddp.rank(): os._exit(3)
    time.sleep(1000)
"""


def _source(how: str) -> str:
    return f"{_CELL}\ndef detach(): {DETACHED[how]}\n"


def _sleepers(folder: Path) -> set[int]:
    """Processes that were started in this folder: by the ranks of the test, and nothing else."""
    found = set()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and int(entry) != os.getpid() and os.readlink(f"/proc/{entry}/cwd") == str(folder):
                found.add(int(entry))
    return {pid for pid in found if not gone(pid)}


@pytest.mark.parametrize("end", ["finish", "raise", "kill", "leave", "stop"])
@pytest.mark.parametrize("how", DETACHED)
def test_a_process_that_a_rank_detached_ends_with_it(cell: Cells, in_folder: Path, how: str, end: str) -> None:
    names = cell(_source(how))
    before = _sleepers(in_folder)
    if end == "stop":
        going = start(names.end_by, end)
        wait_until(lambda: len(list(in_folder.glob("rank-*"))) == 2)
        assert len(_sleepers(in_folder) - before) >= 4
        going.stop(0)
    else:
        with contextlib.suppress(nbddp.RankError, nbddp.RankDied):
            run(names.end_by, end)
    assert len(list(in_folder.glob("rank-*"))) >= 1
    assert _sleepers(in_folder) == before
