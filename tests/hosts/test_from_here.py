"""What the notebook decides for its hosts, and a cluster of this machine alone: no host of the rig is needed."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import nbddp
from nbddp.kernel import login
from nbddp.kernel.plan import make_plan
from tests.support import Cells, wait_until

GPUS = {"gpu1": {"cuda": 2}, "gpu2": {"cuda": 2}}


def nothing() -> None:
    pass


# ---------------------------------------------------------------------------- which devices


def test_a_notebook_without_gpus_can_use_those_of_hosts() -> None:
    plan = make_plan(nothing, (), {}, hosts=GPUS)
    assert (plan.device, plan.backend, plan.nprocs) == ("cuda", "nccl", 4)
    with pytest.raises(nbddp.LaunchError, match="not known"):
        make_plan(nothing, (), {}, hosts=GPUS, backend="nickel")


def test_the_numbers_of_gpus_are_the_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm and JupyterHub show the notebook one GPU, or none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    plan = make_plan(nothing, (), {}, hosts=GPUS, gpus=[0, 1])
    assert plan.gpus == (0, 1)
    assert plan.environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "cuda:1"}, "names one device; say device='cuda', gpus=[1]"),
        ({"device": "cpu", "gpus": [0]}, "exclude each other"),
        ({"device": "gpu"}, "is no torch device"),
        ({"device": "xpu"}, "torch sees none on gpu1"),
    ],
)
def test_a_device_is_refused_as_on_one_machine(options: dict[str, Any], says: str) -> None:
    with pytest.raises(nbddp.LaunchError) as refused:
        make_plan(nothing, (), {}, hosts=GPUS, **options)
    assert says in str(refused.value)


# ---------------------------------------------------------------------------- how to log in


@pytest.mark.parametrize("before", [[], ["sshpass", "-e"], ["env", "LC_ALL=C"]])
def test_ssh_is_given_one_line_whatever_stands_before_it(before: list[str]) -> None:
    words = login.command_for("gpu1", [*before, "/usr/bin/ssh", "{host}"], "python3")
    assert words[: len(before) + 2] == [*before, "/usr/bin/ssh", "gpu1"]
    assert len(words) == len(before) + 3
    assert words[-1].startswith("sh -c 'for p in python3; do")


def test_other_commands_are_given_words() -> None:
    words = login.command_for("ssh", ["kubectl", "exec", "-i", "{host}", "--"], "python3")
    assert words[:7] == ["kubectl", "exec", "-i", "ssh", "--", "sh", "-c"]
    assert len(words) == 8


# ---------------------------------------------------------------------------- a cluster of this machine


@pytest.fixture
def here() -> Iterator[nbddp.Cluster]:
    with nbddp.cluster(["localhost"]) as hosts:
        yield hosts


def test_a_module_beside_the_notebook_hides_an_installed_one(
    cell: Cells, here: nbddp.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hydra.py").write_text("where = 'beside the notebook'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hydra", raising=False)
    names = cell("def train():\n    import hydra\n    return hydra.where")
    assert here.run(names.train, nprocs=1, device="cpu", show=False).value == "beside the notebook"


def test_a_cluster_that_is_closed_too_early_says_so(cell: Cells, here: nbddp.Cluster) -> None:
    names = cell("def train():\n    import time\n    time.sleep(60)")
    run = here.run(names.train, nprocs=1, device="cpu", show=False, wait=False)
    wait_until(lambda: run.state == "running")
    here.close()
    with pytest.raises(nbddp.HostLost, match="the cluster was closed while train went on: wait"):
        run.wait(20)


def test_a_cluster_that_nobody_has_any_more_is_logged_out() -> None:
    """As of a cell that makes one and is run again."""
    before = set(psutil.Process().children())
    hosts = nbddp.cluster(["localhost"])
    (agent,) = [p for p in psutil.Process().children() if p not in before and "nbddp.host" in " ".join(p.cmdline())]
    del hosts
    gc.collect()
    wait_until(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE)


# ---------------------------------------------------------------------------- asked for stacks


def test_stop_does_not_wait_for_who_asks_for_stacks(cell: Cells) -> None:
    """A rank that is suspended answers only when the time for it is over."""
    names = cell("def train():\n    import time\n    time.sleep(60)")
    run = nbddp.run(names.train, nprocs=2, device="cpu", show=False, wait=False)
    wait_until(lambda: run._supervisor.rank_states() == ["running"] * 2)
    os.kill(run._supervisor.pids()[1], signal.SIGSTOP)
    asker = threading.Thread(target=run.stacks)
    asker.start()
    time.sleep(0.2)
    began = time.monotonic()
    run._supervisor.request_stop(60.0)
    assert time.monotonic() - began < 0.5
    wait_until(lambda: not psutil.pid_exists(run._supervisor.pids()[0]) or not asker.is_alive())
    assert asker.is_alive(), "the question was over before the first rank's end"
    run.stop(0.0)
    asker.join()
