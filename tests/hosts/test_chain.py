"""From four hosts on a large payload goes from host to host: equal on all, in the time of one, whatever breaks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import nbddp
from nbddp.agent import secured
from nbddp.hosts import chain, suppliers
from tests.hosts.conftest import Limit
from tests.hosts.rig import NAMES, Rig
from tests.hosts.test_endings import files_left
from tests.hosts.test_lost import within
from tests.support import Cells, run, wait_until
from tests.test_session import quiet

pytestmark = pytest.mark.slow

MB = 1_000_000
TAKE = """
    import hashlib, nbddp
    def take(data): return hashlib.sha256(data).hexdigest(), nbddp.world_size()
"""


@pytest.fixture(scope="module")
def four(rig: Rig) -> Iterator[nbddp.Cluster]:
    """All hosts, logged in to for the tests that leave them as they are; they have reached each other."""
    with nbddp.cluster(list(NAMES), launcher=rig.ssh, heartbeat=60.0) as hosts:
        hosts.run(nbddp.rank, nprocs=1, device="cpu", show=False)
        yield hosts


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sending(going: nbddp.Run) -> str:
    """The summary of the run, as soon as it says how far the payload has come."""
    return wait_until(lambda: (found := going._viewable.summary()) and "%" in found and found, 30)


def test_a_large_payload_leaves_the_notebook_once_and_is_equal_on_all_hosts(
    cell: Cells, four: nbddp.Cluster, rig: Rig
) -> None:
    data = os.urandom(20 * MB)
    before = {name: rig.passed(name) for name in (*NAMES, "notebook")}
    found = run(cell(TAKE).take, data, hosts=four, nprocs=1)
    sent = {name: rig.passed(name)[1] - before[name][1] for name in before}
    assert found.values == [(digest(data), 4)] * 4
    assert 20 * MB < sent["notebook"] < 30 * MB
    assert all(20 * MB < sent[name] < 30 * MB for name in NAMES[:3])
    assert sent["gpu4"] < 5 * MB


def test_a_restart_sends_nothing_again(cell: Cells, four: nbddp.Cluster, rig: Rig) -> None:
    names = cell("""
        import nbddp, os
        def take(data):
            nbddp.barrier()
            if nbddp.restart_count() == 0 and nbddp.rank() == 2: os._exit(3)
            return len(data)
    """)
    before = rig.passed("notebook")[1]
    assert run(names.take, os.urandom(20 * MB), hosts=four, nprocs=1, max_restarts=1).values == [20 * MB] * 4
    assert rig.passed("notebook")[1] - before < 30 * MB


def test_a_firewall_between_two_neighbours_costs_seconds_and_not_the_run(
    cell: Cells, four: nbddp.Cluster, rig: Rig
) -> None:
    data = os.urandom(20 * MB)
    before = rig.passed("notebook")[1]
    rig.isolate("gpu2", "gpu3")
    try:
        with within(30):
            found = run(cell(TAKE).take, data, hosts=four, nprocs=1, init=False)
    finally:
        rig.isolate("gpu2", "gpu3", state="off")
    assert [value for value, _ in found.values] == [digest(data)] * 4
    assert "[gpu3: gpu2 cannot send the payload here (timed out); the notebook sends the rest]" in found.logs(2)
    assert not any("cannot send" in found.logs(rank) for rank in (0, 1, 3))
    assert 40 * MB < rig.passed("notebook")[1] - before < 50 * MB


def test_stop_in_a_long_upload_ends_it_on_all_hosts_and_closes_their_ports(
    cell: Cells, four: nbddp.Cluster, rig: Rig, limit: Limit
) -> None:
    idle = {name: rig.hosts[name].listening() for name in NAMES}
    limit("10mbit")
    going = run(cell(TAKE).take, os.urandom(40 * MB), hosts=four, nprocs=1, wait=False)
    shown = sending(going)
    listening = {name: rig.hosts[name].listening() - idle[name] for name in NAMES}
    assert re.search(r" . sending 40 MB to gpu\d: \d+ %(, [\d.:]+( s)? left)? \(and 3 more\)$", shown), shown
    # On the address that the ranks use, and nowhere else; nobody fetches from the last one.
    assert [[address for address, _ in listening[name]] for name in NAMES] == [
        *([rig.hosts[name].address] for name in NAMES[:3]),
        [],
    ]
    with within(8):
        going.stop(0.5)
    assert going.state == "stopped"
    limit("")  # what was under way to the first host is still to arrive there
    wait_until(lambda: {name: rig.hosts[name].listening() for name in NAMES} == idle, 10)
    data = os.urandom(20 * MB)
    assert run(cell(TAKE).take, data, hosts=four, nprocs=1).values == [(digest(data), 4)] * 4


def test_hosts_stay_usable_when_the_notebook_runs_out_of_file_descriptors(cell: Cells, four: nbddp.Cluster) -> None:
    names, data = cell(TAKE), os.urandom(9 * MB)
    for spare in range(0, 40, 2):
        with within(20), contextlib.suppress(nbddp.NbddpError, OSError), files_left(spare):
            run(names.take, data, hosts=four, nprocs=1)
            break
        assert four.present() == list(NAMES), f"with {spare} files to open"
    assert 8 < spare < 39
    assert run(names.take, data, hosts=four, nprocs=1).values == [(digest(data), 4)] * 4


def test_strangers_get_nothing_and_disturb_nothing(cell: Cells, four: nbddp.Cluster, rig: Rig, limit: Limit) -> None:
    idle, data = rig.hosts["gpu1"].listening(), os.urandom(20 * MB)
    limit("20mbit")
    going = run(cell(TAKE).take, data, hosts=four, nprocs=1, wait=False)
    sending(going)
    assert len(rig.hosts["gpu1"].listening() - idle) == 1
    words = rig.hosts["gpu1"].run("ss", "-Hltn").split()
    address = rig.hosts["gpu1"].address
    (port,) = (int(word.rpartition(":")[2]) for word in words if word.startswith(address) and not word.endswith(":22"))
    silent = socket.create_connection((address, port), 10)
    with socket.create_connection((address, port), 10) as connection:
        connection.sendall(os.urandom(10_000))
        answer = _all_of(connection)
        assert len(answer) < 100
    with socket.create_connection((address, port), 10) as connection, pytest.raises(OSError):
        secured.secure(connection, b"a guess", serves=False)
    limit("")
    assert going.wait(60).values == [(digest(data), 4)] * 4
    with silent:
        assert _all_of(silent) == b""


def _all_of(connection: socket.socket) -> bytes:
    received = b""
    try:
        while more := connection.recv(1 << 16):
            received += more
    except ConnectionError:
        pass
    return received


def test_a_call_of_a_session_takes_the_same_road_and_can_be_stopped(
    four: nbddp.Cluster, rig: Rig, limit: Limit
) -> None:
    def take(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    with nbddp.session(hosts=four, nprocs=1, device="cpu") as session:
        for _ in range(2):
            data, before = os.urandom(20 * MB), rig.passed("notebook")[1]
            assert quiet(session, take, data).values == [digest(data)] * 4
            assert rig.passed("notebook")[1] - before < 30 * MB
        limit("10mbit")
        going = quiet(session, take, os.urandom(40 * MB), wait=False)
        sending(going)
        with within(10):
            going.stop()
        limit("")
        assert going.state == "stopped"
        data = os.urandom(20 * MB)
        assert quiet(session, take, data).values == [digest(data)] * 4
        assert quiet(session, nbddp.world_size).values == [4] * 4


@pytest.mark.parametrize(
    ("hosts", "nbytes", "expected"), [(4, 8 << 20, True), (3, 1 << 30, False), (8, 4 << 20, False)]
)
def test_few_hosts_and_small_payloads_are_sent_to_directly(hosts: int, nbytes: int, expected: bool) -> None:
    packed: Any = SimpleNamespace(nbytes=nbytes)
    assert chain.pays([None] * hosts, packed, suppliers.CHAIN_FROM) == expected  # type: ignore[list-item]
