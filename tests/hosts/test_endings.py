"""Rounds end quickly and completely on healthy hosts, and the hosts stay usable."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nbddp
from nbddp.hosts import crew
from nbddp.hosts.rank import RemoteRank
from tests.hosts.conftest import GONE_S, HEARTBEAT_S
from tests.hosts.rig import Rig
from tests.hosts.test_lost import SLEEPING, Login, begin, within
from tests.support import Cells, open_fds, run, wait_until

pytestmark = pytest.mark.slow

BOTH = "<Cluster of gpu1, gpu2>"


def still_there(cell: Cells, hosts: nbddp.Cluster) -> None:
    """The hosts are, and run."""
    assert repr(hosts) == BOTH
    assert run(cell("def fine(): return 1").fine, hosts=hosts).values == [1] * 4


# ---------------------------------------------------------------------------- a round that cannot begin


@pytest.mark.parametrize("restarts", [0, 1])
def test_hosts_stay_usable_after_an_error_before_the_round(
    cell: Cells, warm: nbddp.Cluster, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    rounds = itertools.count()

    def choose(facts: Any) -> Any:
        if next(rounds) == restarts:
            raise OSError("no way to meet")
        return choose_addresses(facts)

    choose_addresses = crew.choose_addresses
    monkeypatch.setattr(crew, "choose_addresses", choose)
    names = cell("import nbddp\ndef train():\n    nbddp.barrier()\n    raise ValueError")
    with within(4), pytest.raises(nbddp.NbddpError, match="no way to meet"):
        run(names.train, hosts=warm, max_restarts=1)
    still_there(cell, warm)


@contextlib.contextmanager
def files_left(spare: int) -> Iterator[None]:
    """This process may open so many more."""
    taken = open_fds()
    free = (fd for fd in itertools.count() if fd not in taken)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, spare, None)), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_hosts_stay_usable_when_the_notebook_runs_out_of_file_descriptors(cell: Cells, warm: nbddp.Cluster) -> None:
    names = cell("def train(): return 1")
    for spare in range(30):
        with within(4), contextlib.suppress(nbddp.NbddpError, OSError), files_left(spare):
            run(names.train, hosts=warm)
            break
        assert repr(warm) == BOTH, f"with {spare} files to open"
    assert 8 < spare < 29  # a run on two hosts opens some of them
    still_there(cell, warm)


# ---------------------------------------------------------------------------- a host that is not heard any more


@pytest.mark.parametrize(
    ("error", "says"),
    [(OSError(errno.ENOSPC, "No space left on device"), "No space left"), (KeyError("rank"), "KeyError: 'rank'")],
)
def test_a_message_the_notebook_cannot_handle_ends_the_run_with_host_lost(
    cell: Cells,
    warm: nbddp.Cluster,
    rig: Rig,
    in_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    says: str,
) -> None:
    receive = RemoteRank.receive

    def refuse(self: RemoteRank, head: Any, body: bytes, offset_s: float) -> None:
        if head["kind"] == "output" and self.host == "gpu2":
            raise error
        receive(self, head, body, offset_s)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteRank, "receive", refuse)
        names = cell(SLEEPING.replace("time.sleep(1000)", "print(flush=True); time.sleep(1000)"))
        with within(20), pytest.raises(nbddp.HostLost, match="gpu2") as raised:
            run(names.train, hosts=warm)
    assert says in str(raised.value)
    rig.hosts["gpu2"].wait_until_clean(GONE_S)


def test_a_notebook_silent_past_the_heartbeat_gets_an_error_that_names_a_longer_one(
    cell: Cells, cluster: Login, rig: Rig, in_folder: Path
) -> None:
    going = begin(cell(SLEEPING).train, cluster(heartbeat=2.0), 4)
    ctypes.PyDLL(None).sleep(4)  # with the GIL: no thread of this process runs
    with within(2), pytest.raises(nbddp.HostLost, match=r"the notebook sent nothing for 2 s .*heartbeat=8\)"):
        going.wait()
    for name in ("gpu1", "gpu2"):
        rig.hosts[name].wait_until_clean(GONE_S)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "with max_restarts=1, min_hosts=1 the others would have started again"),
        ({"max_restarts": 2}, "with min_hosts=1 the others would have started again"),
    ],
)
def test_host_lost_names_the_options_that_would_have_restarted(
    cell: Cells, warm: nbddp.Cluster, rig: Rig, in_folder: Path, options: dict[str, int], says: str
) -> None:
    going = begin(cell(SLEEPING).train, warm, 2, nprocs=1, **options)
    rig.hosts["gpu2"].agent().kill()
    with within(3), pytest.raises(nbddp.HostLost, match=says):
        going.wait()


# ---------------------------------------------------------------------------- a result on its way


SENDING = """
    import nbddp, os, time
    def train():
        nbddp.barrier()
        if nbddp.restart_count():
            return nbddp.restart_count()
        if nbddp.rank() == 2:
            return bytes(300_000_000)
        while not os.path.exists("comes"):
            time.sleep(0.05)
        if nbddp.rank() == 0:
            raise ValueError
        time.sleep(1000)
"""


@pytest.fixture
def _slow_results(monkeypatch: pytest.MonkeyPatch, in_folder: Path) -> None:
    """20 MB/s at most, and there is a file when the first has come."""
    receive = RemoteRank.receive

    def receive_slowly(self: RemoteRank, head: Any, body: bytes, offset_s: float) -> None:
        if head["kind"] == "result":
            (in_folder / "comes").touch()
            time.sleep(0.05)
        receive(self, head, body, offset_s)

    monkeypatch.setattr(RemoteRank, "receive", receive_slowly)


@pytest.mark.usefixtures("_slow_results")
def test_a_restart_succeeds_while_a_host_sends_a_slow_result(cell: Cells, warm: nbddp.Cluster) -> None:
    with within(8):
        found = run(cell(SENDING).train, hosts=warm, max_restarts=1)
    assert found.values == [1] * 4
    assert repr(warm) == BOTH


@pytest.mark.usefixtures("_slow_results")
def test_a_failure_is_reported_before_a_slow_result_of_the_same_host(cell: Cells, warm: nbddp.Cluster) -> None:
    names = cell(SENDING.replace("rank() == 0", "rank() == 3"))
    with within(5), pytest.raises(nbddp.RankError, match="rank 3"):
        run(names.train, hosts=warm)
    still_there(cell, warm)


@pytest.mark.usefixtures("_slow_results")
def test_a_stop_does_not_wait_for_a_slow_result(cell: Cells, warm: nbddp.Cluster) -> None:
    going = run(cell(SENDING.replace("raise ValueError", "pass")).train, hosts=warm, wait=False)
    wait_until(lambda: os.path.exists("comes"))
    with within(3):
        going.stop()
    assert going.state == "stopped"
    still_there(cell, warm)


# ---------------------------------------------------------------------------- somebody who prints for ever


PRINTING = """
    import nbddp, os, subprocess, threading
    def print_for_ever():
        while True:
            os.write(1, b"x\\n")
    def returns():
        print("the end of", nbddp.rank(), flush=True)
        threading.Thread(target=print_for_ever, daemon=True).start()
        return 1
    def dies():
        subprocess.Popen(["timeout", "6", "sh", "-c", "while :; do echo x; done"], start_new_session=True)
        os._exit(3)
"""


def test_a_run_ends_while_a_child_of_its_rank_keeps_printing(cell: Cells, warm: nbddp.Cluster) -> None:
    with within(5):
        found = run(cell(PRINTING).returns, hosts=warm, nprocs=1)
    assert found.values == [1, 1]
    assert found.logs(1).startswith("the end of 1\n")
    assert repr(warm) == BOTH


def test_exit_code_3_is_reported_while_a_child_keeps_printing(cell: Cells, warm: nbddp.Cluster) -> None:
    with within(5), pytest.raises((nbddp.RankDied, nbddp.LaunchError), match="exit code 3"):
        run(cell(PRINTING).dies, hosts=warm, nprocs=1)
    assert repr(warm) == BOTH


# ---------------------------------------------------------------------------- a slow host


def test_a_round_ends_while_a_hosts_fork_server_imports_and_the_next_one_has_that_host(
    cell: Cells, cluster: Login, rig: Rig
) -> None:
    names = cell("import nbddp\ndef where(): return nbddp.world_size(), nbddp.restart_count()")
    hosts = cluster(heartbeat=60.0)
    server = next(p for p in rig.hosts["gpu2"].agent().children() if "the fork server" in " ".join(p.cmdline()))
    server.suspend()  # as an import from a slow file system
    try:
        going = run(names.where, hosts=hosts, nprocs=1, max_restarts=1, wait=False)
        (rank,) = wait_until(rig.hosts["gpu1"].ranks, 30)
        rank.kill()
        with within(3):
            wait_until(lambda: going.restarts, 10)
        time.sleep(7)
    finally:
        server.resume()
    assert going.wait().values == [(2, 1)] * 2
    still_there(cell, hosts)


@pytest.fixture(scope="module")
def lively(rig: Rig) -> Iterator[nbddp.Cluster]:
    """Hosts that are lost after 3 s of silence, for the tests at the end of this module."""
    with nbddp.cluster(["gpu1", "gpu2"], launcher=rig.ssh, heartbeat=HEARTBEAT_S) as hosts:
        hosts.run(nbddp.rank, nprocs=2, device="cpu", show=False)  # there is then what a cluster keeps
        yield hosts


def test_a_stop_does_not_wait_for_a_flood_of_output_over_a_slow_line(
    cell: Cells, lively: nbddp.Cluster, rig: Rig, in_folder: Path
) -> None:
    """16 MB wait on the host, which take 13 s at 10 Mbit/s."""
    names = cell("""
        import nbddp, sys
        def train():
            nbddp.barrier()
            open(f"there-{nbddp.rank()}", "w").close()
            try:
                while True:
                    sys.stdout.write("x" * 99 + "\\n")
            finally:
                print("the last line of", nbddp.rank(), flush=True)
    """)
    rig.limit("gpu2", "10mbit")
    try:
        going = begin(names.train, lively, 2, nprocs=1)
        time.sleep(3)
        with within(10):
            going.stop(0.5)
    finally:
        rig.limit("gpu2")
    assert going.state == "stopped"
    assert going.logs(1).endswith("the last line of 1\n")
    assert "output was left out here" in going.logs(1)
    still_there(cell, lively)


def test_a_payload_on_a_slow_line_shows_its_progress_and_ranks_that_do_not_exist_do_nothing(
    cell: Cells, lively: nbddp.Cluster, rig: Rig
) -> None:
    rig.limit("gpu2", "10mbit")
    try:
        going = run(cell("def train(big): pass").train, os.urandom(20_000_000), hosts=lively, nprocs=1, wait=False)
        shown = wait_until(lambda: (found := going._viewable.summary()) and "sending" in found and found, 20)
        assert re.fullmatch(r"2 processes . gloo . 2 hosts . sending 20 MB to gpu2: \d+ %(, [\d.:]+( s)? left)?", shown)
        assert "rank 1 has not been started yet" in going.stacks()
        going.stop(0.5)
    finally:
        rig.limit("gpu2")
    still_there(cell, lively)
