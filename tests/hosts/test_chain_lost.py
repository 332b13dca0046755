"""A host that is lost while a large payload goes from host to host: it is named, and the others begin again."""

from __future__ import annotations

import os

import pytest

from tests.hosts.conftest import Limit
from tests.hosts.rig import NAMES, Rig
from tests.hosts.test_chain import MB, TAKE, digest, sending
from tests.hosts.test_lost import Login, within
from tests.support import Cells, run, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ends", ["killed", "silent"])
def test_the_loss_of_a_host_in_the_middle_is_named_and_the_others_go_on(
    cell: Cells, cluster: Login, rig: Rig, limit: Limit, ends: str
) -> None:
    data, hosts = os.urandom(20 * MB), cluster(*NAMES, heartbeat=3.0 if ends == "silent" else 60.0)
    run(cell("def nothing(): pass").nothing, hosts=hosts, nprocs=1)
    limit("20mbit")
    going = run(cell(TAKE).take, data, hosts=hosts, nprocs=1, max_restarts=1, min_hosts=3, wait=False)
    sending(going)
    agent = rig.hosts["gpu2"].agent()
    agent.kill() if ends == "killed" else agent.suspend()
    with within(15):
        wait_until(lambda: going.restarts, 20)
    limit("")
    if ends == "silent":
        agent.resume()
    assert going.wait(60).values == [(digest(data), 3)] * 3
    reason = going._viewable.status().restart_reason
    assert "gpu2" in reason
    assert ("sent nothing for 3 s" if ends == "silent" else "connection ended") in reason
    assert hosts.present() == ["gpu1", "gpu3", "gpu4"]
