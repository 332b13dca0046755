"""What sessions on several hosts leave, and lose: ranks, hosts, an upload; each test has a session of its own."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import nbddp
from tests.hosts.conftest import BACK_S, power_on
from tests.hosts.rig import Machine, Rig
from tests.hosts.test_lost import Login
from tests.support import wait_until
from tests.test_session import quiet, total

pytestmark = pytest.mark.slow


def test_a_rank_that_dies_on_a_host_is_named_and_restarted(warm: nbddp.Cluster) -> None:
    with nbddp.session(hosts=warm, nprocs=1, device="cpu") as session:
        session["x"] = torch.ones(3)
        with pytest.raises(nbddp.RankDied, match="rank 1 of 2") as raised:
            quiet(session, lambda: nbddp.rank() and os.kill(os.getpid(), signal.SIGKILL))
        assert "gpu2" in str(raised.value)
        with pytest.raises(nbddp.LaunchError, match="rank 1 is lost"):
            quiet(session, total)
        assert session["x"].tolist() == [1.0] * 3
        before = session.pids
        session.restart(names=["x"])
        assert session.pids[0] == before[0]
        assert session.pids[1] != before[1]
        assert quiet(session, total).values == [2.0] * 2
        assert [value.tolist() for value in session.values("x")] == [[1.0] * 3] * 2


def test_after_the_loss_of_a_host_names_can_be_pulled_and_when_it_is_back_restart_works(
    cluster: Login, gpu2: Machine
) -> None:
    hosts = cluster(returning=True)
    with nbddp.session(hosts=hosts, nprocs=1, device="cpu") as session:
        session["x"] = torch.ones(3)
        going = quiet(session, time.sleep, 100, wait=False)
        wait_until(lambda: going.state == "running", 20)
        gpu2.power_off()
        with pytest.raises(nbddp.HostLost, match="gpu2"):
            going.wait(30)
        assert session["x"].tolist() == [1.0] * 3
        with pytest.raises(nbddp.LaunchError, match=r"rank 1 is lost: .*connection"):
            quiet(session, total)
        with pytest.raises(nbddp.LaunchError, match="Until it is back"):
            session.restart()
        power_on(gpu2)
        wait_until(lambda: hosts.present() == ["gpu1", "gpu2"], BACK_S)
        session.restart(names=["x"])
        assert quiet(session, total).values == [2.0] * 2
        assert [value.tolist() for value in session.values("x")] == [[1.0] * 3] * 2


def test_stop_during_a_long_upload_leaves_the_session_usable(cluster: Login, rig: Rig) -> None:
    with nbddp.session(hosts=cluster(), nprocs=1, device="cpu") as session:
        rig.limit("gpu2", "20mbit")
        data = torch.rand(20 << 20)
        try:
            going = quiet(session, lambda x: x.sum(), data, wait=False)
            wait_until(lambda: "sending" in going._viewable.summary(), 20)
            began = time.monotonic()
            going.stop()
            assert time.monotonic() - began < 20  # all of it takes 32 s
        finally:
            rig.limit("gpu2")
        assert quiet(session, total).values == [2.0] * 2


def test_two_sessions_on_one_cluster_are_refused_and_the_hosts_are_free_after_the_first(
    warm: nbddp.Cluster,
) -> None:
    with nbddp.session(hosts=warm, nprocs=1, device="cpu") as session:
        with pytest.raises(nbddp.LaunchError, match="these hosts are busy with session"):
            nbddp.session(hosts=warm, nprocs=1, device="cpu")
        assert quiet(session, total).values == [2.0] * 2
    assert warm.run(total, nprocs=1, device="cpu", show=False).values == [2.0] * 2
    with nbddp.session(hosts=warm, nprocs=1, device="cpu") as session:
        assert quiet(session, total).values == [2.0] * 2


def test_a_closed_session_leaves_nothing_on_the_hosts(warm: nbddp.Cluster, rig: Rig) -> None:
    with nbddp.session(hosts=warm, nprocs=2, device="cpu"):
        assert [len(rig.hosts[name].ranks()) for name in ("gpu1", "gpu2")] == [2, 2]
    wait_until(lambda: not any(host.ranks() for host in rig.hosts.values()), 10)
