"""Hosts that are not reached by ssh: a Slurm allocation, or a command of the user's."""

from __future__ import annotations

import os
import sys

import pytest

import nbddp
from tests.hosts.rig import Rig
from tests.hosts.test_same_run import PLACES
from tests.support import Cells, run

pytestmark = pytest.mark.slow


@pytest.fixture
def allocation(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """``srun`` and ``scontrol`` as in a notebook that was started by ``salloc -N 3``."""
    monkeypatch.setenv("PATH", rig.slurm() + os.pathsep + os.environ["PATH"])
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-3]")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    return rig


def test_hosts_slurm_uses_the_nodes_of_the_allocation(cell: Cells, allocation: Rig) -> None:
    found = run(cell(PLACES).places, hosts="slurm", nprocs=1).values
    assert [place[:5] for place in found] == [("gpu1", 0, 0, 0, 3), ("gpu2", 1, 0, 1, 3), ("gpu3", 2, 0, 2, 3)]
    # Nobody tells here at which address a host was reached; docker0 has the same on all.
    assert {address for _, address, _ in found[0][8]} == {allocation.hosts["gpu1"].address}


def test_a_finished_allocation_is_refused_by_node_list_or_node(
    allocation: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[7-9]")
    with pytest.raises(nbddp.LaunchError, match=r"gpu\[7-9\]"):
        nbddp.cluster("slurm")
    with pytest.raises(nbddp.LaunchError, match=r"gpu7: .*Requested node configuration is not available"):
        nbddp.cluster(["gpu7"], launcher=["srun", "--nodelist={host}"])


def test_a_users_own_launcher_is_given_separate_words(cell: Cells, allocation: Rig) -> None:
    """``kubectl exec -i gpu1 --``: no shell in between, which would take a line."""
    launcher = ["srun", "--nodelist={host}"]
    with nbddp.cluster(["gpu3", "gpu1"], launcher=launcher, python=sys.executable) as hosts:
        found = run(cell(PLACES).places, hosts=hosts, nprocs=1)
    assert [place[0] for place in found.values] == ["gpu3", "gpu1"]
