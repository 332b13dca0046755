"""The fallbacks for macOS, on Linux: neither the notebook's process nor the ranks have memfd, /proc or prctl."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import gone, script, wait_until

ENVIRON = {
    "NBDDP_WITHOUT_LINUX": "1",
    "PYTHONPATH": f"{Path(__file__).parent / 'without_linux'}{os.pathsep}{Path(__file__).parent.parent.parent}",
}

BEGIN = """
import os, signal, sys, threading, time
import torch
import nbddp
assert sys.platform == "darwin" and not hasattr(os, "memfd_create")

def train(x, fail=""):
    from nbddp.worker import dead_man_switch
    assert sys.platform == "darwin" and dead_man_switch._prctl is None and not hasattr(os, "memfd_create")
    total = torch.ones(1) * nbddp.rank()
    torch.distributed.all_reduce(total)
    for step in nbddp.progress(range(20)):
        nbddp.log(loss=1 / (step + 1))
    if fail == "raise" and nbddp.rank() == 1:
        raise OSError("no disk")
    if fail == "die" and nbddp.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if fail:
        nbddp.barrier()
    return x.sum() + total

def failing(how, fail):
    try:
        run = nbddp.run(train, (x, fail), nprocs=2, device="cpu", start_method=how)
    except nbddp.NbddpError as error:
        return type(error).__name__, type(getattr(error, "cause", None)).__name__

x = torch.ones(3_000_000)  # larger than what goes through a pipe
"""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_runs_results_failures_and_stops_without_what_linux_has(how: str) -> None:
    done = script(
        BEGIN
        + f"""
run = nbddp.run(train, (x,), nprocs=2, device="cpu", start_method={how!r}, max_restarts=1)
assert [float(value) for value in run.values] == [3_000_001.0] * 2, run.values
assert len(run.history["loss"].steps) == 20
assert failing({how!r}, "raise") == ("RankError", "OSError")
assert failing({how!r}, "die")[0] == "RankDied"
sleeping = nbddp.run(time.sleep, (60,), nprocs=2, device="cpu", start_method={how!r}, wait=False)
while sleeping.state == "starting":
    time.sleep(0.05)
sleeping.stop()
assert sleeping.state == "stopped"
nbddp.shutdown()
print("all of it")
""",
        **ENVIRON,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("all of it")


def test_ranks_end_when_the_notebook_is_killed(tmp_path: Path) -> None:
    """The dead man's switch is a thread there."""
    done = script(
        BEGIN
        + f"""
def note():
    open({str(tmp_path)!r} + f"/{{os.getpid()}}", "w").close()
    time.sleep(60)

nbddp.run(note, nprocs=2, device="cpu", wait=False)
while len(os.listdir({str(tmp_path)!r})) < 2:
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
""",
        **ENVIRON,
    )
    assert done.returncode == -9, done.stderr
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    wait_until(lambda: all(map(gone, ranks)), timeout_s=10, what="the ranks have ended")
