"""What the notebook decides for its hosts, and a cluster of this machine alone; none of these tests needs the rig."""

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
from nbddp.hosts import login
from nbddp.kernel.options import complete
from nbddp.kernel.plan import Plan, make_plan
from tests.support import Cells, wait_until

GPUS = {"gpu1": {"cuda": 2}, "gpu2": {"cuda": 2}}


def plan_on_hosts(**options: Any) -> Plan:
    return make_plan("nothing", complete(options), devices=GPUS)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- which devices


def test_a_notebook_without_gpus_can_use_those_of_hosts() -> None:
    plan = plan_on_hosts()
    assert (plan.device, plan.backend, plan.nprocs) == ("cuda", "nccl", 4)
    with pytest.raises(nbddp.LaunchError, match="not known"):
        plan_on_hosts(backend="nickel")


def test_gpu_numbers_are_the_hosts_own_whatever_the_notebook_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm and JupyterHub show the notebook one GPU, or none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    plan = plan_on_hosts(gpus=[0, 1])
    assert plan.gpus == (0, 1)
    assert plan.environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "cuda:1"}, "names one device; use device='cuda', gpus=[1]"),
        ({"device": "cpu", "gpus": [0]}, "exclude each other"),
        ({"device": "gpu"}, "is not a torch device"),
        ({"device": "xpu"}, "torch sees none on gpu1"),
    ],
)
def test_a_bad_device_is_refused_with_hosts_as_on_one_machine(options: dict[str, Any], says: str) -> None:
    with pytest.raises(nbddp.LaunchError) as refused:
        plan_on_hosts(**options)
    assert says in str(refused.value)


# ---------------------------------------------------------------------------- how to log in


@pytest.mark.parametrize("before", [[], ["sshpass", "-e"], ["env", "LC_ALL=C"]])
def test_ssh_is_given_one_command_line_whatever_precedes_it(before: list[str]) -> None:
    words = login.command_for("gpu1", [*before, "/usr/bin/ssh", "{host}"], "python3")
    assert words[: len(before) + 2] == [*before, "/usr/bin/ssh", "gpu1"]
    assert len(words) == len(before) + 3
    assert words[-1].startswith("sh -c 'for p in python3; do")


def test_other_launchers_are_given_separate_words() -> None:
    words = login.command_for("ssh", ["kubectl", "exec", "-i", "{host}", "--"], "python3")
    assert words[:7] == ["kubectl", "exec", "-i", "ssh", "--", "sh", "-c"]
    assert len(words) == 8


# ---------------------------------------------------------------------------- a cluster of this machine


@pytest.fixture
def here() -> Iterator[nbddp.Cluster]:
    with nbddp.cluster(["localhost"]) as hosts:
        yield hosts


@pytest.mark.slow
def test_a_module_beside_the_notebook_takes_precedence_over_an_installed_one(
    cell: Cells, here: nbddp.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hydra.py").write_text("where = 'beside the notebook'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hydra", raising=False)
    names = cell("def train():\n    import hydra\n    return hydra.where")
    assert here.run(names.train, nprocs=1, device="cpu", show=False).value == "beside the notebook"


@pytest.mark.slow
def test_closing_a_cluster_during_a_run_ends_the_run_with_host_lost(cell: Cells, here: nbddp.Cluster) -> None:
    names = cell("def train():\n    import time\n    time.sleep(60)")
    run = here.run(names.train, nprocs=1, device="cpu", show=False, wait=False)
    wait_until(lambda: run.state == "running")
    here.close()
    with pytest.raises(nbddp.HostLost, match="the cluster was closed while train went on: wait"):
        run.wait(20)


def test_a_garbage_collected_cluster_logs_out() -> None:
    """As of a cell that makes one and is run again."""
    before = set(psutil.Process().children())
    hosts = nbddp.cluster(["localhost"])
    (agent,) = [p for p in psutil.Process().children() if p not in before and "nbddp.agent" in " ".join(p.cmdline())]
    del hosts
    gc.collect()
    wait_until(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE)


# ---------------------------------------------------------------------------- asked for stacks


def test_stop_does_not_wait_for_a_thread_that_asks_for_stacks(cell: Cells) -> None:
    """A rank that is suspended answers only when the time for it is over."""
    names = cell("def train():\n    import time\n    time.sleep(60)")
    run = nbddp.run(names.train, nprocs=2, device="cpu", show=False, wait=False)
    wait_until(lambda: run._state.rank_states() == ["running"] * 2)
    os.kill(run.pids[1], signal.SIGSTOP)
    asker = threading.Thread(target=run.stacks)
    asker.start()
    time.sleep(0.2)
    began = time.monotonic()
    run._state.request_stop(60.0)
    assert time.monotonic() - began < 0.5
    wait_until(lambda: not psutil.pid_exists(run.pids[0]) or not asker.is_alive())
    assert asker.is_alive(), "the question was over before the first rank's end"
    run.stop(0.0)
    asker.join()
