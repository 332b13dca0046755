"""What several machines do, reached directly or by pickle; all other tests have one."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from typing import Any

import pytest

import nbddp
from nbddp.kernel import session as session_module
from nbddp.process.machine import LocalMachine, _RankProcess
from nbddp.process.server import _Forked
from nbddp.ray.actor import NodeMachine
from tests.machines import PicklingMachine, run_on
from tests.support import Cells, wait_until

Machines = Callable[[], Sequence[Any]]
MACHINES = {
    "two": lambda: [LocalMachine(), LocalMachine()],
    "two nodes of Ray's": lambda: [PicklingMachine(NodeMachine("127.0.0.1"), node) for node in ("gpu1", "gpu2")],
}


@pytest.fixture(params=MACHINES)
def machines(request: pytest.FixtureRequest) -> Machines:
    return MACHINES[request.param]


def test_ranks_meet_and_their_values_metrics_and_output_arrive(cell: Cells, machines: Machines) -> None:
    names = cell("""
        import nbddp, os, torch
        def train(x):
            nbddp.log(loss=x)
            print("hi", nbddp.rank())
            return nbddp.all_reduce(nbddp.rank()), nbddp.local_rank(), int(os.environ["GROUP_RANK"]), torch.ones(2)
    """)
    run = run_on(machines, names.train, 1.5)
    each = 1 + max(value[1] for value in run.values)
    assert [value[:3] for value in run.values] == [(6, rank % each, rank // each) for rank in range(4)]
    assert all(value[3].tolist() == [1, 1] for value in run.values)
    assert run.logs() == "".join(f"[rank {rank}] hi {rank}\n" for rank in range(4))
    assert run.history["loss"].values.tolist() == [1.5]


def test_the_first_failure_has_its_cause(cell: Cells, machines: Machines) -> None:
    names = cell('import nbddp\ndef train():\n    if nbddp.rank() == 3: raise KeyError("missing")\n    nbddp.barrier()')
    error = run_on(machines, names.train).error
    assert (isinstance(error, nbddp.RankError), error.rank, error.cause.args) == (True, 3, ("missing",))


def test_output_and_metrics_come_before_the_report(cell: Cells, machines: Machines) -> None:
    names = cell("""
        import nbddp
        def train():
            for step in range(8_000):
                nbddp.log(loss=step)
                if step % 10 == 0: print(step, "x" * 200)
    """)
    run = run_on(machines, names.train)
    assert run.history["loss"].steps.tolist() == list(range(8_000))
    assert [line.split()[0] for line in run.logs(3).splitlines()] == [str(step) for step in range(0, 8_000, 10)]


def test_a_rank_that_dies_keeps_its_last_words_and_is_restarted(cell: Cells, machines: Machines) -> None:
    names = cell("""
        import nbddp, os
        def train():
            nbddp.log(loss=nbddp.restart_count())
            print("last words", flush=True)
            if nbddp.rank() == 2: os.kill(os.getpid(), 9)
            nbddp.barrier()
    """)
    run = run_on(machines, names.train, max_restarts=1)
    assert (type(run.error), run.error.rank, run.restarts) == (nbddp.RankDied, 2, 1)
    assert "last words" in str(run.error)
    assert run.history["loss"].values[-1] == 1


def test_data_and_results_of_tens_of_megabytes_arrive_whole(cell: Cells, machines: Machines) -> None:
    names = cell("""
        import nbddp, torch
        data = torch.arange(8 << 20, dtype=torch.float32)  # 32 MB
        def train(data): return data + nbddp.rank()
    """)
    values = run_on(machines, names.train, names.data, nprocs=2).values
    assert all((value == names.data + rank).all() for rank, value in enumerate(values))


def test_stacks_say_where_each_rank_is_until_it_is_stopped(cell: Cells, machines: Machines) -> None:
    train = cell("import time\ndef train():\n    while True: time.sleep(0.01)").train
    with ThreadPoolExecutor() as pool:
        before = nbddp.last_run()
        over = pool.submit(run_on, machines, train)
        wait_until(lambda: nbddp.last_run() is not before)
        run = nbddp.last_run()
        wait_until(lambda: run.state == "running")
        wait_until(lambda: run.stacks().startswith("all 4 ranks are in train, line 3\n\nranks 0 to 3 are here"))
        run.stop()
    assert over.result().state == "stopped"


def test_a_session_goes_on_after_a_failure(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "machines_for", lambda *_: machines)
    with nbddp.Session(nprocs=4, device="cpu") as session:
        session.cell("import nbddp\nr = nbddp.rank()\nx = nbddp.all_reduce(r)")
        assert (session.pull("x"), session.run(lambda: nbddp.rank() * 2).values) == (6, [0, 2, 4, 6])
        with pytest.raises(nbddp.NbddpError, match="boom") as caught:
            session.cell("if r == 2: raise ValueError('boom')\nnbddp.barrier()")
        assert type(caught.value).__name__ == "ValueError"
        session.cell("y = nbddp.all_reduce(1)")
        assert session.pull("y", "r") == (4, 0)


def test_what_is_logged_arrives_whole_and_its_memory_is_given_back() -> None:
    rank, fd, data = object.__new__(_RankProcess), os.memfd_create("metrics"), os.urandom(1 << 20) * 40
    rank.number, rank.files, rank._read = 0, {"metrics": fd}, {"metrics": 0}
    os.write(fd, data)
    assert b"".join(event.data for event in rank.written("metrics")) == data
    assert os.fstat(fd).st_blocks * 512 < 20 << 20
    os.close(fd)


def test_another_thread_may_ask_for_a_ranks_exit_code_while_its_pid_is_awaited() -> None:
    """multiprocessing does, whenever it starts a process; a fork server that imports torch takes seconds to answer."""
    sentinel, server = os.pipe()
    process = object.__new__(_Forked)
    process.sentinel, process.returncode, process._reading = sentinel, None, threading.RLock()
    with ThreadPoolExecutor() as pool:
        pid = pool.submit(lambda: process.pid)
        wait_until(lambda: not process._reading.acquire(blocking=False) or process._reading.release())
        assert process.poll() is None
        forkserver.write_signed(server, 4711)
        assert pid.result() == 4711
    forkserver.write_signed(server, -9)
    assert (process.pid, process.poll()) == (4711, -9)
    os.close(sentinel)
    os.close(server)
