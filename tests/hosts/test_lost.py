"""Whatever dies on any host: the error names the host at once, and nothing of the run is left running anywhere."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nbddp
from tests.hosts.conftest import HEARTBEAT_S, bring_back
from tests.hosts.rig import GONE_S, Rig, is_sshd
from tests.support import Cells, run, script, wait_until

pytestmark = pytest.mark.slow

Login = Callable[..., nbddp.Cluster]
SOON_S = 10.0  # at once, on a machine with other work; a heartbeat of 60 s comes later
SLEEPING = """
    import nbddp, time
    def train():
        nbddp.barrier()
        if nbddp.restart_count() == 0:
            open(f"there-{nbddp.rank()}", "w").close()
            time.sleep(1000)
        nbddp.barrier()
        return nbddp.rank(), nbddp.world_size(), nbddp.restart_count()
"""
RESUMING = """
    import nbddp, os, signal, time, torch
    def train(deaths, steps=12):
        found = nbddp.load_snapshot("s.pt") or {"step": -1, "weights": torch.zeros(3)}
        weights, begun = found["weights"], found["step"] + 1
        for step in range(begun, steps):
            weights += 1
            nbddp.log(loss=float(weights[0]))
            nbddp.barrier()
            if step in deaths[nbddp.restart_count():nbddp.restart_count() + 1] and nbddp.rank() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            nbddp.barrier()
            if step % 5 == 4:
                nbddp.save_snapshot("s.pt", step=step, weights=weights)
                nbddp.barrier()
        return float(weights[0]), begun, nbddp.restart_count(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


def begin(train: Callable[..., Any], hosts: nbddp.Cluster, ranks: int, *args: Any, **options: Any) -> nbddp.Run:
    """In the background, once all ranks are in the function and have said so in the current folder."""
    going = run(train, *args, hosts=hosts, wait=False, **options)
    wait_until(lambda: going.error or len([f for f in os.listdir() if f.startswith("there-")]) == ranks, 60)
    assert going.error is None, going.error
    return going


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"{took:.2f} s instead of {seconds}"


# ---------------------------------------------------------------------------- a rank


def test_a_killed_rank_restarts_the_run_from_its_snapshot_on_every_host(
    cell: Cells, warm: nbddp.Cluster, in_folder: Path
) -> None:
    found = run(cell(RESUMING).train, [7], hosts=warm, max_restarts=2)
    assert found.values == [(12.0, 5, 1, 1)] * 4
    assert found.history["loss"].values.tolist() == [float(i + 1) for i in range(12)]
    status = found._viewable.status()
    assert (status.restarts, status.max_restarts) == (1, 2)
    assert "rank 3 of 4" in status.restart_reason
    assert "gpu2" in status.restart_reason


def test_two_restarts_are_counted_alike_on_every_host(cell: Cells, warm: nbddp.Cluster, in_folder: Path) -> None:
    assert run(cell(RESUMING).train, [6, 11], hosts=warm, max_restarts=2).values == [(12.0, 10, 2, 2)] * 4


def test_a_killed_rank_ends_the_other_hosts_ranks_before_the_heartbeat(
    cell: Cells, warm: nbddp.Cluster, in_folder: Path
) -> None:
    names = cell("""
        import nbddp, os, signal, time
        def train():
            nbddp.barrier()
            if nbddp.restart_count():
                return
            if nbddp.rank() == 1:
                time.sleep(0.3)
                open("died", "w").write(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            with open(f"alive-{nbddp.rank()}", "w", buffering=1) as file:
                while True:
                    print(time.time(), file=file)
                    time.sleep(0.01)
    """)
    run(names.train, hosts=warm, max_restarts=1)
    died = float((in_folder / "died").read_text())
    for rank in (0, 2, 3):
        alive = (in_folder / f"alive-{rank}").read_text().rpartition("\n")[0].splitlines()
        assert 0 < float(alive[-1]) - died < SOON_S


def test_after_the_last_restart_the_error_names_the_killed_rank_and_its_host(cell: Cells, warm: nbddp.Cluster) -> None:
    names = cell("""
        import nbddp, os, signal
        def train():
            nbddp.barrier()
            if nbddp.rank() == 2: os.kill(os.getpid(), signal.SIGKILL)
            nbddp.barrier()
    """)
    with pytest.raises(nbddp.RankDied, match=r"rank 2 of 4 .*on gpu2.* was killed by SIGKILL") as raised:
        run(names.train, hosts=warm, max_restarts=1)
    error = raised.value
    assert (error.host, error.rank, error.world_size, error.exitcode, error.restarts) == ("gpu2", 2, 4, -9, 1)


def test_a_remote_exception_arrives_at_once_with_its_class_host_and_lines(cell: Cells, warm: nbddp.Cluster) -> None:
    names = cell("""
        import nbddp, time
        class BadBatch(ValueError):
            pass
        def check(at):
            raise BadBatch(f"{at}: batch of rank {nbddp.rank()}")
        def train():
            nbddp.barrier()
            if nbddp.rank() == 3:
                check(time.time())
            nbddp.barrier()
    """)
    with pytest.raises(nbddp.RankError) as raised:
        run(names.train, hosts=warm)
    now, error = time.time(), raised.value
    assert now - float(str(error.cause).partition(":")[0]) < SOON_S
    assert type(error.cause) is names.BadBatch
    assert (error.host, error.rank, error.world_size) == ("gpu2", 3, 4)
    assert str(error).startswith("rank 3 of 4 ")
    assert "gpu2" in str(error).splitlines()[0]
    shown = "\n".join(error._render_traceback_())
    assert "check(time.time())" in shown
    assert 'raise BadBatch(f"{at}: batch of rank {nbddp.rank()}")' in shown
    assert "nbddp/host" not in shown


def test_remote_sys_exit_is_rank_died_and_an_unpicklable_result_is_payload_error(
    cell: Cells, warm: nbddp.Cluster
) -> None:
    names = cell("""
        import nbddp, sys, threading
        def leave():
            if nbddp.rank() == 2: sys.exit(3)
            nbddp.barrier()
        def lock(): return threading.Lock() if nbddp.rank() == 3 else None
    """)
    with pytest.raises(nbddp.RankDied, match=r"sys\.exit") as raised:
        run(names.leave, hosts=warm)
    assert (raised.value.host, raised.value.exitcode) == ("gpu2", 3)
    with pytest.raises(nbddp.PayloadError, match="lock"):
        run(names.lock, hosts=warm)
    assert run(cell("def fine(): return 1").fine, hosts=warm).values == [1] * 4


# ---------------------------------------------------------------------------- a host


@pytest.mark.parametrize("lost", ["gpu1", "gpu2"])
def test_a_killed_agent_is_host_lost_at_once_and_its_ranks_end(
    cell: Cells, warm: nbddp.Cluster, rig: Rig, in_folder: Path, lost: str
) -> None:
    """The first host has the store, too."""
    going = begin(cell(SLEEPING).train, warm, 4)
    assert len(rig.hosts[lost].ranks()) == 2
    rig.hosts[lost].agent().kill()
    with within(SOON_S), pytest.raises(nbddp.HostLost, match=lost) as raised:
        going.wait()
    assert raised.value.host == lost
    rig.wait_until_clean(lost)
    with pytest.raises(nbddp.HostLost, match=lost):
        run(cell(SLEEPING).train, hosts=warm)


def test_a_killed_agent_is_host_lost_and_not_the_broken_connection_of_another_rank(
    cell: Cells, warm: nbddp.Cluster, rig: Rig, in_folder: Path
) -> None:
    names = cell("""
        import nbddp
        def train():
            nbddp.barrier()
            open(f"there-{nbddp.rank()}", "w").close()
            while True:
                nbddp.barrier()
    """)
    for turn in range(3):
        if turn:
            bring_back(warm)
        going = begin(names.train, warm, 4)
        rig.hosts["gpu2"].agent().kill()
        with within(SOON_S), pytest.raises(nbddp.HostLost, match="gpu2"):
            going.wait()
        for path in in_folder.glob("there-*"):
            path.unlink()


def test_a_killed_login_is_host_lost_at_once_and_its_ranks_end(
    cell: Cells, warm: nbddp.Cluster, rig: Rig, in_folder: Path
) -> None:
    """The sshd of the session, on the host: a scheduler's clean-up, or its OOM killer."""
    going = begin(cell(SLEEPING).train, warm, 4)
    next(process for process in rig.hosts["gpu2"].processes() if is_sshd(process)).kill()
    with within(SOON_S), pytest.raises(nbddp.HostLost, match="gpu2"):
        going.wait()
    rig.wait_until_clean("gpu2")


def test_a_pulled_cable_is_host_lost_after_the_heartbeat_and_its_ranks_end(
    cell: Cells, cluster: Login, rig: Rig, in_folder: Path
) -> None:
    going = begin(cell(SLEEPING).train, cluster(), 4)
    time.sleep(HEARTBEAT_S)  # an idle connection is no silent one
    assert going.state == "running"
    rig.cable("gpu2", "down")
    with within(HEARTBEAT_S + SOON_S), pytest.raises(nbddp.HostLost, match="gpu2") as raised:
        going.wait()
    assert raised.value.host == "gpu2"
    rig.hosts["gpu2"].wait_until_clean(HEARTBEAT_S + GONE_S)


def test_a_frozen_agent_is_host_lost_after_the_heartbeat(
    cell: Cells, cluster: Login, rig: Rig, in_folder: Path
) -> None:
    going = begin(cell(SLEEPING).train, cluster(), 4)
    agent = rig.hosts["gpu2"].agent()
    agent.suspend()
    try:
        with within(HEARTBEAT_S + SOON_S), pytest.raises(nbddp.HostLost, match="gpu2"):
            going.wait()
    finally:
        agent.resume()
    rig.hosts["gpu2"].wait_until_clean(HEARTBEAT_S + GONE_S)


def test_the_remaining_hosts_go_on_when_min_hosts_allows_it(
    cell: Cells, cluster: Login, rig: Rig, in_folder: Path
) -> None:
    hosts = cluster("gpu1", "gpu2", "gpu3", returning=True, heartbeat=60.0)  # when it is brought back
    for lost in ("gpu1", "gpu2"):
        bring_back(hosts)
        going = begin(cell(SLEEPING).train, hosts, 3, nprocs=1, max_restarts=1, min_hosts=2)
        rig.hosts[lost].agent().kill()
        going.wait()
        assert going.values == [(0, 2, 1), (1, 2, 1)]
        status = going._viewable.status()
        assert "HostLost" in status.restart_reason
        assert lost in status.restart_reason
        assert [r.host for r in status.ranks][:2] == [name for name in ("gpu1", "gpu2", "gpu3") if name != lost]
        for path in in_folder.glob("there-*"):
            path.unlink()


def test_without_min_hosts_a_lost_host_ends_the_run_without_a_restart(
    cell: Cells, warm: nbddp.Cluster, rig: Rig, in_folder: Path
) -> None:
    going = begin(cell(SLEEPING).train, warm, 2, nprocs=1, max_restarts=5)
    rig.hosts["gpu2"].agent().kill()
    with within(SOON_S), pytest.raises(nbddp.HostLost, match="gpu2"):
        going.wait()
    assert going._viewable.status().restarts == 0


def test_a_host_lost_while_its_ranks_start_is_named_at_once(cell: Cells, warm: nbddp.Cluster, rig: Rig) -> None:
    names = cell("import nbddp\ndef train(x): return nbddp.world_size()")
    run(names.train, b"", hosts=warm)  # nobody waits for an import of torch any more
    agent = rig.hosts["gpu2"].agent()
    agent.suspend()  # so it is lost before it can start any
    going = run(names.train, b"x" * 10_000_000, hosts=warm, wait=False)
    time.sleep(0.3)
    agent.kill()
    with within(SOON_S), pytest.raises((nbddp.HostLost, nbddp.LaunchError), match="gpu2"):
        going.wait()


# ---------------------------------------------------------------------------- the end that is wanted


def test_a_stop_ends_all_remote_ranks_and_the_cluster_stays_usable(
    cell: Cells, warm: nbddp.Cluster, rig: Rig, in_folder: Path
) -> None:
    names = cell("""
        import nbddp, time
        def train():
            nbddp.barrier()
            try:
                open(f"there-{nbddp.rank()}", "w").close()
                time.sleep(1000)
            finally:
                open(f"closed-{nbddp.rank()}", "w").close()
    """)
    going = begin(names.train, warm, 4)
    with within(SOON_S):
        going.stop(60)
    assert going.state == "stopped"
    assert len([f for f in os.listdir() if f.startswith("closed-")]) == 4
    assert not rig.hosts["gpu1"].ranks() + rig.hosts["gpu2"].ranks()
    assert run(cell("def fine(): return 1").fine, hosts=warm).values == [1] * 4


def test_a_remote_rank_that_ignores_a_stop_is_killed(
    cell: Cells, warm: nbddp.Cluster, rig: Rig, in_folder: Path
) -> None:
    names = cell("""
        import nbddp, os, signal, subprocess, time
        def train():
            nbddp.barrier()
            if nbddp.rank() == 3: subprocess.Popen(["sleep", "1000"])
            open(f"there-{nbddp.rank()}", "w").close()
            if nbddp.rank() == 2: os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                try:
                    time.sleep(1000)
                except BaseException:
                    pass
    """)
    going = begin(names.train, warm, 4)
    with within(SOON_S):
        going.stop(0.5)
    assert not rig.hosts["gpu1"].ranks() + rig.hosts["gpu2"].ranks()


def test_a_timeout_ends_the_ranks_on_every_host(cell: Cells, warm: nbddp.Cluster, rig: Rig) -> None:
    names = cell("import time\ndef train(): time.sleep(1000)")
    with within(3 + SOON_S), pytest.raises(nbddp.RunTimeout):
        run(names.train, hosts=warm, timeout=3)
    assert not rig.hosts["gpu1"].ranks() + rig.hosts["gpu2"].ranks()


def test_a_failed_run_with_a_list_of_hosts_logs_out(cell: Cells, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """``run(hosts=[...])`` logs in for itself, and out at its end."""
    monkeypatch.setenv("PATH", rig.plain_ssh() + os.pathsep + os.environ["PATH"])
    with pytest.raises(nbddp.RankError) as raised:
        run(cell("def train(): raise ValueError").train, hosts=["gpu1", "gpu2"])
    assert raised.value.host in ("gpu1", "gpu2")
    rig.wait_until_clean()


def test_a_cluster_outlives_a_failed_run_and_is_closed_after_its_with_block(cell: Cells, rig: Rig) -> None:
    with nbddp.cluster(["gpu1"], launcher=rig.ssh) as opened:
        with pytest.raises(nbddp.RankError):
            run(cell("def train(): raise ValueError").train, hosts=opened)
        assert run(cell("def fine(): return 1").fine, hosts=opened).values == [1, 1]
    rig.wait_until_clean("gpu1")
    with pytest.raises(nbddp.LaunchError, match="closed"):
        run(cell("def fine(): return 1").fine, hosts=opened)


def test_a_short_heartbeat_loses_no_living_host(cell: Cells, cluster: Login) -> None:
    names = cell("import time, nbddp\ndef train():\n    time.sleep(3)\n    return nbddp.world_size()")
    assert run(names.train, hosts=cluster(heartbeat=1.0)).values == [4] * 4


def test_a_cluster_outlives_a_forked_child_of_the_notebook(rig: Rig) -> None:
    done = script(
        """
        import multiprocessing, os, sys, nbddp
        with nbddp.cluster(["gpu1", "gpu2"], launcher=sys.argv[1:]) as hosts:
            child = multiprocessing.get_context("fork").Process(target=int)
            child.start()
            child.join()
            if os.fork() == 0:
                sys.exit()  # with all exit handlers
            os.wait()
            print(nbddp.run(lambda: nbddp.world_size(), nprocs=1, device="cpu", show=False, hosts=hosts).values)
        """,
        *rig.ssh,
    )
    assert done.stdout == "[2, 2]\n", done.stderr
    rig.wait_until_clean()


def test_sigterm_to_an_agent_is_host_lost_at_once_and_its_ranks_end(
    cell: Cells, warm: nbddp.Cluster, rig: Rig, in_folder: Path
) -> None:
    going = begin(cell(SLEEPING).train, warm, 4)
    rig.hosts["gpu2"].agent().send_signal(signal.SIGTERM)
    with within(SOON_S), pytest.raises(nbddp.HostLost, match="gpu2"):
        going.wait()
    rig.wait_until_clean("gpu2")
