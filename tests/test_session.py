"""Ranks that stay: calls, names, failures, interrupts, lost ranks, the end; in real processes."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

import nbddp
from nbddp.kernel import state
from nbddp.worker import process_group
from tests.faults.pace import slowness
from tests.support import Surroundings, fresh_main, gone, script, wait_until

SOON_S = 3.0  # times the machine's slowness; a rank that is never released stays for 30 minutes


@pytest.fixture(scope="module")
def shared() -> Iterator[nbddp.Session]:
    """One session for all tests that leave its ranks as they were."""
    with nbddp.session(nprocs=3, device="cpu") as session:
        yield session


@pytest.fixture
def session(shared: nbddp.Session) -> nbddp.Session:
    shared.reset()
    return shared


def quiet(session: nbddp.Session, fn: Any, *args: Any, **options: Any) -> nbddp.Run[Any]:
    return session.run(fn, args, show=False, **options)


def total() -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


# ---------------------------------------------------------------------------- calls and names


def bind(value: Any) -> int:
    import __main__

    __main__.kept = value
    return os.getpid()


def kept() -> Any:
    import __main__

    return __main__.kept, os.getpid()


def test_what_a_call_binds_is_there_for_the_next_call_in_the_same_processes(session: nbddp.Session) -> None:
    pids = quiet(session, bind, "here").values
    assert pids == session.pids
    assert quiet(session, kept).values == [("here", pid) for pid in pids]


def test_each_call_has_its_own_curves_output_and_steps(session: nbddp.Session) -> None:
    def train(name: str, points: int) -> None:
        for _ in range(points):
            nbddp.log({name: 1.0})
        print(name, nbddp.rank())

    first, second = quiet(session, train, "loss", 3), quiet(session, train, "acc", 2)
    assert list(first.history["loss"].steps) == [0, 1, 2]
    assert second.history.names == ["acc"]
    assert list(second.history["acc"].steps) == [0, 1]
    assert first.logs(1) == "loss 1\n"
    assert second.logs(2) == "acc 2\n"


def test_names_are_set_read_listed_and_freed(session: nbddp.Session) -> None:
    session["x"] = torch.arange(6.0).reshape(2, 3)
    session["config"] = {"lr": 0.1}
    assert session["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert session.values("config") == [{"lr": 0.1}] * 3
    names = {each.name: each for each in session.names()}
    assert (names["x"].kind, names["x"].shape, names["x"].dtype, names["x"].nbytes) == ("Tensor", (2, 3), "float32", 24)
    assert session.names().differing == set()
    session.free("x")
    with pytest.raises(nbddp.RankError, match="name 'x' is not defined on rank 0"):
        session["x"]
    assert [each.name for each in session.names()] == ["config"]


def set_own() -> None:
    import __main__

    __main__.own = torch.full((4,), float(nbddp.rank() == 1))
    __main__.word = "ab"[nbddp.rank() == 2]


def test_a_finished_call_tells_the_views_what_rank_0_holds(session: nbddp.Session) -> None:
    session["small"], session["large"], session["text"] = torch.ones(2), torch.ones(1000, 10), "not a tensor"
    run = quiet(session, nbddp.rank)
    assert run._viewable.status().held == (
        ("large", "Tensor 1000 × 10 float32, 40 kB, cpu"),
        ("small", "Tensor 2 float32, 8 B, cpu"),
    )


def test_values_that_differ_between_ranks_are_told_and_synced(session: nbddp.Session) -> None:
    quiet(session, set_own)
    session["equal"] = [{"a": torch.ones(3)}, "b"]
    assert session.names().differing == {"own", "word"}
    assert "own" in repr(session.names())
    assert session.check("own") == [1]
    assert session.check("word") == [2]
    session.sync("own", src=1)
    session.sync("word")
    assert session["own"].tolist() == [1.0] * 4
    assert session.values("word") == ["a"] * 3
    assert session.check("own") == []


def test_a_call_on_some_ranks(session: nbddp.Session) -> None:
    run = quiet(session, nbddp.rank, ranks=[2, 1])
    assert (run.values, run.value) == ([None, 1, 2], 1)

    def make_group() -> None:
        import __main__

        __main__.group = dist.new_group([0, 2])

    def reduce() -> float:
        import __main__

        tensor = torch.full((), nbddp.rank() + 1.0)
        dist.all_reduce(tensor, group=__main__.group)
        nbddp.log(sum=tensor, rank=nbddp.rank(), reduce="mean")
        return tensor.item()

    quiet(session, make_group)
    run = quiet(session, reduce, ranks=[0, 2])
    assert run.values == [4.0, None, 4.0]
    assert run.history["rank"].values.tolist() == [1.0]  # the mean of those that take part
    for ranks in ([3], [-1], [], [True], "0"):
        with pytest.raises(nbddp.LaunchError, match="rank"):
            quiet(session, nbddp.rank, ranks=ranks)


def test_a_collective_of_all_in_a_call_on_some_ranks_is_named_and_stopped(session: nbddp.Session) -> None:
    run = quiet(session, total, ranks=[0, 2], wait=False)
    told = wait_until(lambda: "A collective of all ranks waits for rank 1" in run.stacks() and run.stacks(), 15)
    assert "rank 1 takes no part in this call" in told
    assert "dist.new_group([0, 2])" in told
    run.stop()
    assert quiet(session, total).values == [3.0] * 3


def test_a_failure_in_a_call_on_some_ranks_frees_the_others(session: nbddp.Session) -> None:
    def fail() -> None:
        if nbddp.rank() == 0:
            raise ValueError("on purpose")
        dist.barrier()

    with pytest.raises(nbddp.RankError, match="on purpose"):
        quiet(session, fail, ranks=[0, 1])
    assert quiet(session, total).values == [3.0] * 3


def test_a_large_tensor_goes_out_and_comes_back(session: nbddp.Session) -> None:
    there = torch.rand(8 << 20)
    session["large"] = there
    assert torch.equal(session["large"], there)
    session["large"] = there + 1  # in a block of its own: what was mapped before must not change
    assert torch.equal(session["large"], there + 1)


def test_an_instance_comes_back_as_one_of_the_notebooks_class() -> None:
    with fresh_main() as cells, nbddp.session(nprocs=1, device="cpu") as session:
        here = cells(
            """
            class Net:
                pass

            def build():
                global net
                net = Net()

            def is_one():
                return isinstance(net, Net)
            """
        )
        quiet(session, here.build)
        assert quiet(session, here.is_one).value
        assert type(session["net"]) is here.Net


def test_a_functions_variables_are_sent_once_and_again_when_they_are_bound_anew() -> None:
    with fresh_main() as cells, nbddp.session(nprocs=1, device="cpu") as session:
        here = cells(
            """
            data = [1]

            def add():
                data.append(2)
                return data
            """
        )
        assert quiet(session, here.add).value == [1, 2]
        assert quiet(session, here.add).value == [1, 2, 2]  # the rank's own list, which it has kept
        cells("data = [5]")
        assert quiet(session, here.add).value == [5, 2]


def test_metrics_are_combined_over_ranks_and_background_calls_are_shown_as_running(session: nbddp.Session) -> None:
    def slow() -> int:
        nbddp.log(rank=nbddp.rank(), reduce="mean")
        time.sleep(0.5)
        return nbddp.rank()

    run = quiet(session, slow, wait=False)
    with pytest.raises(nbddp.LaunchError, match=r"slow is still running in this session; wait\(\) for it or stop\(\)"):
        quiet(session, total)
    assert run.wait().values == [0, 1, 2]
    assert run.history["rank"].values.tolist() == [1.0]
    assert quiet(session, total).values == [3.0] * 3


@pytest.mark.parametrize("option", [{"nprocs": 2}, {"device": "cpu"}, {"seed": 1}, {"max_restarts": 1}])
def test_options_of_the_session_are_refused_by_a_call(session: nbddp.Session, option: dict[str, Any]) -> None:
    with pytest.raises(nbddp.LaunchError, match=f"{next(iter(option))} belongs to the session"):
        quiet(session, total, **option)


@pytest.mark.parametrize("option", [{"min_hosts": 1}, {"max_restarts": 1}, {"timeout": 3}])
def test_options_of_a_call_or_of_hosts_are_refused_by_the_session(option: dict[str, Any]) -> None:
    with pytest.raises(nbddp.LaunchError, match=f"session\\({next(iter(option))}=...\\)"):
        nbddp.session(nprocs=1, device="cpu", **option)


def own_group(destroy: bool) -> float:
    dist.init_process_group("gloo")
    found = total()
    if destroy:
        dist.destroy_process_group()
    return found


def test_a_call_may_open_and_destroy_the_group_as_scripts_do(session: nbddp.Session) -> None:
    for destroy in (False, False, True, True):
        assert quiet(session, own_group, destroy).values == [3.0] * 3
    assert quiet(session, total).values == [3.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"start_method": "spawn"}, {"init": False}], ids=str)
def test_spawned_ranks_and_ranks_without_a_group_stay_too(options: dict[str, Any]) -> None:
    with nbddp.session(nprocs=2, device="cpu", **options) as session:
        pids = session.pids
        with pytest.raises(nbddp.RankError, match="the first"):
            quiet(session, fail_while_others, "sleep")
        assert quiet(session, os.getpid).values == pids


def test_a_session_that_no_variable_holds_ends() -> None:
    session = nbddp.session(nprocs=2, device="cpu")
    pids = session.pids
    del session
    gc.collect()
    wait_until(lambda: all(map(gone, pids)))


def test_close_stops_a_call_that_goes_on() -> None:
    session = nbddp.session(nprocs=2, device="cpu")
    run = quiet(session, time.sleep, 300, wait=False)
    began = time.monotonic()
    session.close()
    assert time.monotonic() - began < SOON_S * slowness()
    assert run.state == "stopped"


# ---------------------------------------------------------------------------- failures


def fail_while_others(wait: str) -> None:
    if nbddp.rank() == 0:
        time.sleep(0.1)
        raise ValueError("the first")
    if wait == "all_reduce":
        dist.all_reduce(torch.ones(3))
    elif wait == "barrier":
        nbddp.barrier()
    elif wait == "recv":
        dist.recv(torch.ones(2), 0)
    elif wait == "gather":
        nbddp.gather({"an": "object"})
    elif wait == "loader":
        for _ in torch.utils.data.DataLoader(range(10**9), num_workers=1):  # type: ignore[arg-type]
            pass
    elif wait == "sleep":
        time.sleep(300)
    else:
        while True:
            pass


@pytest.mark.parametrize("wait", ["all_reduce", "barrier", "recv", "gather", "loader", "sleep", "loop"])
def test_a_failure_frees_the_others_and_the_next_call_works(session: nbddp.Session, wait: str) -> None:
    pids = session.pids
    began = time.monotonic()
    with pytest.raises(nbddp.RankError, match=r"rank 0 of 3( on gpu1)? failed: ValueError: the first"):
        quiet(session, fail_while_others, wait)
    assert time.monotonic() - began < SOON_S * slowness()
    assert quiet(session, total).values == [3.0] * 3
    assert session.pids == pids


def build(seed: int) -> None:
    import __main__

    torch.manual_seed(seed)
    net = [torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 4)]
    __main__.model = nbddp.wrap(torch.nn.Sequential(*net))
    __main__.optimizer = torch.optim.SGD(__main__.model.parameters(), 0.01, momentum=0.9)
    __main__.batches = torch.Generator().manual_seed(nbddp.rank())
    __main__.buffers = None


def step(failing: int | None = None, where: str = "") -> float:
    import __main__ as here

    state = here.batches.get_state()
    buffers = {name: buffer.clone() for name, buffer in here.model.named_buffers()}
    try:
        x = torch.randn(8, 16, generator=here.batches)
        here.optimizer.zero_grad()
        if where == "forward" and failing == nbddp.rank():
            raise ValueError("boom")
        loss = here.model(x).square().mean()
        if where == "backward" and failing == nbddp.rank():
            raise ValueError("boom")
        loss.backward()
        here.optimizer.step()
        return loss.item()
    except BaseException:
        here.batches.set_state(state)
        with torch.no_grad():
            for name, buffer in here.model.named_buffers():
                buffer.copy_(buffers[name])
        raise


def weights() -> tuple[list[bytes], tuple[int, int]]:
    import __main__ as here

    tensors = [*here.model.state_dict().values(), *(s["momentum_buffer"] for s in here.optimizer.state.values())]
    held = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return [tensor.numpy().tobytes() for tensor in tensors], held


@pytest.mark.slow
def test_failures_in_ddp_leave_the_training_as_if_they_had_never_been(session: nbddp.Session) -> None:
    """To the bit, with momentum; and no file descriptor or thread more after the first failures."""
    rounds, held = 40, []
    for failures in (False, True):
        quiet(session, build, 3)
        for number in range(rounds):
            if failures:
                with pytest.raises(nbddp.RankError, match="boom"):
                    quiet(session, step, number % 3, ("forward", "backward")[number % 2])
                if number in (5, rounds - 1):
                    held.append([found[1] for found in quiet(session, weights).values])
            quiet(session, step)
        found = [of_rank[0] for of_rank in quiet(session, weights).values]
        if not failures:
            without = found
    assert found == without
    assert all(later <= before for first, last in zip(*held) for before, later in zip(first, last))


def step_on_some() -> None:
    import __main__ as here

    here.model(torch.ones(2, 16)).sum().backward()
    if nbddp.rank() == 1:
        raise ValueError("before the step")
    here.optimizer.step()


def test_a_model_that_differs_after_a_failure_is_told_and_sync_mends_it(session: nbddp.Session) -> None:
    quiet(session, build, 0)
    with pytest.raises(nbddp.RankError, match="before the step"):
        quiet(session, step_on_some)
    last = nbddp.last_run()
    assert last is not None
    assert "model on rank 1 differs from rank 0's; .sync('model') makes them equal" in last.logs(0)
    assert session.check("model") == [1]
    session.sync("model")
    assert session.check("model") == []
    assert len(set(quiet(session, step).values)) == 3  # it trains on


def make_group_and_fail() -> None:
    import __main__

    __main__.mine = dist.new_group([0, 1])
    dist.barrier()
    raise ValueError("all of them")


def test_groups_of_the_users_are_named_as_void_after_a_failure(session: nbddp.Session) -> None:
    with pytest.raises(nbddp.RankError, match="all of them"):
        quiet(session, make_group_and_fail)
    last = nbddp.last_run()
    assert last is not None
    assert "mine: groups of before the failure" in last.logs(0)
    assert quiet(session, total).values == [3.0] * 3


def interrupt_the_next_call(session: nbddp.Session) -> list[float]:
    """Press ■ a moment after all ranks have begun the next call; the list gets the time."""
    pressed: list[float] = []

    def press() -> None:
        wait_until(
            lambda: session._ranks.in_call and all(w.called and w.report is None for w in session._ranks.workers)
        )
        time.sleep(0.3)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    return pressed


def interrupted_in_no_grad() -> None:
    with torch.no_grad():
        dist.all_reduce(torch.ones(1)) if nbddp.rank() else time.sleep(300)


def grad_enabled() -> bool:
    return torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("what", ["all_reduce", "sleep", "loop", "loader", "no_grad"])
def test_an_interrupt_ends_the_call_and_the_session_goes_on(session: nbddp.Session, what: str) -> None:
    pids = session.pids
    pressed = interrupt_the_next_call(session)
    with pytest.raises(KeyboardInterrupt):
        quiet(session, interrupted_in_no_grad) if what == "no_grad" else quiet(session, go_on, what)
    assert time.monotonic() - pressed[0] < SOON_S * slowness()
    assert session.pids == pids
    assert quiet(session, total).values == [3.0] * 3
    assert quiet(session, grad_enabled).values == [True] * 3


def go_on(what: str) -> None:
    if what == "all_reduce" and nbddp.rank():
        dist.all_reduce(torch.ones(3))
    if what == "loader":
        for _ in torch.utils.data.DataLoader(range(10**9), num_workers=1):  # type: ignore[arg-type]
            pass
    while what == "loop":
        pass
    time.sleep(300)


def test_an_interrupt_while_nothing_runs_does_nothing_to_the_ranks(session: nbddp.Session) -> None:
    pids = session.pids
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    assert quiet(session, total).values == [3.0] * 3
    assert session.pids == pids


# ---------------------------------------------------------------------------- lost ranks, the end


def in_c(rank: int) -> None:
    if nbddp.rank() == rank:
        sum(range(10**12))
    time.sleep(300)


def kill_myself(rank: int) -> None:
    if nbddp.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    nbddp.barrier()


def test_a_rank_that_dies_is_named_and_restart_gives_it_anothers_names() -> None:
    with nbddp.session(nprocs=3, device="cpu") as session:
        before = session.pids
        session["config"] = {"lr": 0.1}
        session["other"] = 1
        with pytest.raises(nbddp.RankDied, match="rank 1 of 3 was killed by SIGKILL"):
            quiet(session, kill_myself, 1)
        with pytest.raises(nbddp.LaunchError, match=r"rank 1 is lost: .*restart\(\) starts it again"):
            quiet(session, total)
        assert session["config"] == {"lr": 0.1}  # of a rank that is left
        session.restart(names=["config"])
        assert session.values("config") == [{"lr": 0.1}] * 3
        assert [pid == old for pid, old in zip(session.pids, before)] == [True, False, True]
        assert quiet(session, total).values == [3.0] * 3


def leave_a_child() -> None:
    if nbddp.rank() == 1 and os.fork() == 0:
        time.sleep(1000)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_rank_that_ends_between_calls_is_noticed_although_a_child_holds_its_files_open(start_method: str) -> None:
    with nbddp.session(nprocs=2, device="cpu", start_method=start_method) as session:
        quiet(session, leave_a_child)
        os.kill(session.pids[1], signal.SIGKILL)
        wait_until(lambda: gone(session.pids[1]))
        with pytest.raises((nbddp.LaunchError, nbddp.RankDied), match="rank 1"):  # at the latest when it is called
            quiet(session, total)
        with pytest.raises(nbddp.LaunchError, match="rank 1 is lost: it ended with exit code -9"):
            quiet(session, total)
        session.restart()
        assert quiet(session, total).values == [2.0] * 2


def test_a_rank_that_hears_nothing_is_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "STOP_GRACE_S", 0.3)
    with nbddp.session(nprocs=2, device="cpu") as session:
        interrupt_the_next_call(session)
        with pytest.raises(KeyboardInterrupt):
            quiet(session, in_c, 1)
        with pytest.raises(nbddp.LaunchError, match="rank 1 is lost: it did not come back from the call"):
            quiet(session, total)
        session.restart()
        assert quiet(session, total).values == [2.0] * 2


def test_a_closed_session_leaves_nothing_behind() -> None:
    nbddp.run(total, nprocs=1, device="cpu", show=False)  # the fork server
    around = Surroundings()
    session = nbddp.session(nprocs=2, device="cpu")
    pids = session.pids
    assert quiet(session, total).values == [2.0] * 2
    session.close()
    session.close()
    assert all(map(gone, pids))
    assert around.changed() == {}
    with pytest.raises(nbddp.LaunchError, match="this session is closed"):
        quiet(session, total)


def test_a_session_that_cannot_be_opened_leaves_nothing_behind() -> None:
    nbddp.run(total, nprocs=1, device="cpu", show=False)
    around = Surroundings()
    with pytest.raises(nbddp.LaunchError):
        nbddp.session(nprocs=2, device="cpu", backend="nonsense")
    with pytest.raises(nbddp.LaunchError, match="could not set itself up"):
        nbddp.session(nprocs=2, device="cpu", env={"OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "NONSENSE"})
    assert around.changed() == {}


def test_shutdown_closes_sessions() -> None:
    """In a process of its own: it closes all of them."""
    done = script(
        """
        import nbddp, psutil
        session = nbddp.session(nprocs=1, device="cpu")
        pids = session.pids
        nbddp.shutdown()
        assert session.closed
        print([pid for pid in pids if psutil.pid_exists(pid)])
        """
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_many_calls_take_no_more_memory_fds_or_threads(session: nbddp.Session) -> None:
    def held() -> tuple[float, int, int]:
        process = psutil.Process()
        return process.memory_full_info().uss / 1e6, process.num_fds(), process.num_threads()

    def measured() -> list[tuple[float, int, int]]:
        return [held(), *quiet(session, held).values]

    for _ in range(100):
        quiet(session, bind, np.zeros(10))
    before = measured()
    for _ in range(300):
        quiet(session, bind, np.zeros(10))
    for (mb, fds, threads), (later_mb, later_fds, later_threads) in zip(before, measured()):
        assert later_mb - mb < 3.0 + 1.0  # at most 1 MB per 100 calls, and the noise of an allocator
        assert (later_fds, later_threads) <= (fds, threads)


def test_failures_leave_no_classes_hooks_fds_or_threads(session: nbddp.Session) -> None:
    def held() -> tuple[int, int, int, int]:
        process = psutil.Process()
        return len(Exception.__subclasses__()), id(sys.excepthook), process.num_fds(), process.num_threads()

    def fail() -> None:
        for _ in range(3):
            with pytest.raises(nbddp.RankError):
                quiet(session, fail_while_others, "all_reduce")

    fail()
    before = quiet(session, held).values
    fail()
    assert quiet(session, held).values == before


def test_a_session_stays_in_the_notebook(session: nbddp.Session) -> None:
    with pytest.raises(nbddp.PayloadError, match="a Session stays in the notebook"):
        quiet(session, bind, session)
    assert repr(session).startswith("<Session: 3 ranks on cpu")


def test_a_rank_whose_device_has_failed_is_lost_and_the_others_stay() -> None:
    def break_device() -> None:
        import __main__
        from nbddp.worker import regroup

        __main__.model = nbddp.wrap(torch.nn.Linear(1, 1))  # type: ignore[attr-defined]

        def reads_the_device(model: Any) -> int:
            raise RuntimeError("CUDA error: device-side assert triggered\nFor debugging consider passing ...")

        if nbddp.rank() == 1:
            regroup.fingerprint = reads_the_device
        raise ValueError("on purpose")

    with nbddp.session(nprocs=2, device="cpu") as session:
        pids = quiet(session, os.getpid).values
        with pytest.raises(nbddp.RankError, match="on purpose"):
            quiet(session, break_device)
        with pytest.raises(nbddp.LaunchError, match=r"rank 1.*RuntimeError: CUDA error: device-side assert triggered"):
            quiet(session, os.getpid)
        session.restart()
        assert [pid == before for pid, before in zip(quiet(session, os.getpid).values, pids)] == [True, False]


def test_a_rank_is_released_from_nccls_groups_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        aborted = 0

        def abort(self) -> None:
            self.aborted += 1

    backends = {Group(): "nccl", Group(): "gloo", Group(): "cpu:gloo,cuda:nccl"}
    world = SimpleNamespace(pg_map=backends)
    monkeypatch.setattr(process_group.distributed_c10d, "_world", world)
    monkeypatch.setattr(process_group, "uses_nccl", lambda: True)
    monkeypatch.setattr(dist, "get_backend", backends.get)
    process_group.abort_nccl()
    assert [group.aborted for group in backends] == [1, 0, 1]
