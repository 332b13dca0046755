"""``nbddp.spawn`` behaves as ``torch.multiprocessing.spawn``, and works from a cell.

The cases follow torch's own test/test_multiprocessing_spawn.py.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from typing import Any

import psutil
import pytest
import torch.multiprocessing

import nbddp
from nbddp.kernel.spawn import SpawnContext
from tests.support import Cells, wait_until


def test_the_first_argument_is_the_rank(cell: Cells) -> None:
    names = cell("""
        def train(i, queue, offset):
            queue.put((i, offset + i))
    """)
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    assert nbddp.spawn(names.train, args=(queue, 10), nprocs=3) is None
    assert sorted(queue.get() for _ in range(3)) == [(0, 10), (1, 11), (2, 12)]
    queue.close()


def test_one_and_four_processes_succeed(cell: Cells) -> None:
    names = cell("def train(i): pass")
    assert nbddp.spawn(names.train) is None
    assert nbddp.spawn(names.train, nprocs=4) is None


def test_an_exception_is_worded_as_torch_does(cell: Cells) -> None:
    names = cell("""
        def train(i, arg):
            raise ValueError(f"legitimate exception from process {i}: {arg}")
    """)
    with pytest.raises(torch.multiprocessing.ProcessRaisedException) as caught:
        nbddp.spawn(names.train, args=("x",), nprocs=2)
    error = caught.value
    assert re.search(r"-- Process \d+ terminated with the following error:\nTraceback", str(error))
    assert f"legitimate exception from process {error.error_index}: x" in str(error)
    assert 'raise ValueError(f"legitimate' in str(error)  # the cell's line
    assert isinstance(error, nbddp.RankError)
    assert type(error.cause) is ValueError
    assert error.error_pid > 0


def test_the_failing_process_is_named(cell: Cells) -> None:
    names = cell("""
        import time
        def train(i):
            if i == 1:
                raise ValueError("only 1")
            time.sleep(60)
    """)
    began = time.monotonic()
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="-- Process 1 terminated") as caught:
        nbddp.spawn(names.train, nprocs=3)
    assert caught.value.error_index == 1
    assert time.monotonic() - began < 30


def test_an_exit_code_is_worded_as_torch_does(cell: Cells) -> None:
    names = cell("""
        import os, sys, time
        def train(i, code):
            if i == 0:
                os._exit(code)
            time.sleep(60)
        def leave(i, code): sys.exit(code)
    """)
    for function in (names.train, names.leave):
        with pytest.raises(torch.multiprocessing.ProcessExitedException) as caught:
            nbddp.spawn(function, args=(123,), nprocs=1)
        assert caught.value.exit_code == 123
        assert str(caught.value) == "process 0 terminated with exit code 123"
        assert isinstance(caught.value, nbddp.RankDied)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_is_named(cell: Cells, number: signal.Signals) -> None:
    names = cell("""
        import os, time
        def train(i, number):
            if i == 1:
                os.kill(os.getpid(), number)
            time.sleep(60)
    """)
    with pytest.raises(torch.multiprocessing.ProcessExitedException) as caught:
        nbddp.spawn(names.train, args=(int(number),), nprocs=2)
    error = caught.value
    assert str(error) == f"process 1 terminated with signal {number.name}"
    assert (error.error_index, error.exit_code, error.signal_name) == (1, -number, number.name)


def _begin(function: Any, args: tuple[Any, ...] = (), nprocs: int = 2) -> SpawnContext:
    context = nbddp.spawn(function, args=args, nprocs=nprocs, join=False)
    assert context is not None
    return context


def test_join_false_gives_a_context_whose_join_has_a_timeout(cell: Cells) -> None:
    names = cell("""
        def train(i, queue): queue.get()
    """)
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    context = _begin(names.train, (queue,))
    assert context.join(timeout=0.1) is False
    pids = context.pids()
    assert len(set(pids)) == 2
    assert all(psutil.pid_exists(pid) for pid in pids)
    for _ in pids:
        queue.put(None)
    assert context.join(timeout=20) is True
    assert context.join() is True
    assert context.pids() == pids
    queue.close()


def test_join_raises_after_join_false(cell: Cells) -> None:
    names = cell("""
        import time
        def train(i):
            if i == 0:
                raise KeyError("first")
            time.sleep(60)
    """)
    context = _begin(names.train)
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="KeyError: 'first'"):
        while not context.join(timeout=20):
            pass
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in context.pids()))


def test_pids_are_the_processes_own(cell: Cells) -> None:
    names = cell("""
        import os, pathlib
        def train(i, folder): pathlib.Path(folder, str(i)).write_text(str(os.getpid()))
    """)
    import pathlib
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        context = _begin(names.train, (folder,), nprocs=3)
        assert context.join()
        assert [int(pathlib.Path(folder, str(i)).read_text()) for i in range(3)] == context.pids()


def test_an_exception_that_does_not_pickle_keeps_its_text(cell: Cells) -> None:
    names = cell("""
        import threading
        class Odd(Exception):
            def __init__(self, message):
                super().__init__(message)
                self.lock = threading.Lock()
        def train(i): raise Odd("cannot travel")
    """)
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="Odd: cannot travel"):
        nbddp.spawn(names.train)


def test_spawn_sets_no_environment_and_makes_no_process_group(cell: Cells) -> None:
    names = cell("""
        import os, torch.distributed as dist
        def train(i, wanted):
            assert not dist.is_initialized()
            assert not [key for key in wanted if key in os.environ]
    """)
    wanted = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"]
    nbddp.spawn(names.train, args=(wanted,), nprocs=2)


@pytest.mark.timeout(40)
def test_the_official_tutorial_trains_after_changing_one_word(cell: Cells, tmp_path: Any) -> None:
    """The official DDP tutorial: own MASTER_PORT, own init_process_group, mp.spawn(fn, args, nprocs, join)."""
    names = cell("""
        import os, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        def setup(rank, world_size, port):
            os.environ["MASTER_ADDR"] = "localhost"
            os.environ["MASTER_PORT"] = str(port)
            dist.init_process_group("gloo", rank=rank, world_size=world_size)
        class ToyModel(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.net1 = torch.nn.Linear(10, 10)
                self.net2 = torch.nn.Linear(10, 5)
            def forward(self, x): return self.net2(torch.relu(self.net1(x)))
        def demo_basic(rank, world_size, port, folder):
            setup(rank, world_size, port)
            torch.manual_seed(rank)
            model = DDP(ToyModel())
            before = model.module.net2.weight.detach().clone()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss = torch.nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5))
            loss.backward(); optimizer.step()
            weight = model.module.net2.weight.detach()
            assert dist.get_world_size() == world_size and not torch.equal(weight, before)
            torch.save(weight, f"{folder}/{rank}.pt")
            dist.destroy_process_group()
    """)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    nbddp.spawn(names.demo_basic, args=(2, port, str(tmp_path)), nprocs=2, join=True)
    assert torch.equal(torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt"))


def test_a_spawn_inside_a_spawned_process_works(cell: Cells, tmp_path: Any) -> None:
    """Torch tests that a parent's end takes its children along; here nested ranks also do their work."""
    names = cell("""
        import os, pathlib, torch.multiprocessing as mp
        def inner(i, outer, folder):
            pathlib.Path(folder, f"{outer}-{i}").write_text(str(os.getpid()))
        def outer(i, folder):
            mp.start_processes(inner, args=(i, folder), nprocs=2, start_method="fork")
    """)
    nbddp.spawn(names.outer, args=(str(tmp_path),), nprocs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]


def test_children_of_a_killed_rank_end_too(cell: Cells, tmp_path: Any) -> None:
    names = cell("""
        import os, pathlib, subprocess, time
        def train(i, folder):
            child = subprocess.Popen(["sleep", "1000"])
            pathlib.Path(folder, "pid").write_text(str(child.pid))
            os.rename(f"{folder}/pid", f"{folder}/ready")
            time.sleep(1000)
    """)
    context = _begin(names.train, (str(tmp_path),), nprocs=1)
    wait_until(lambda: (tmp_path / "ready").exists())
    os.kill(context.pids()[0], signal.SIGKILL)
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
        context.join()
    wait_until(lambda: not psutil.pid_exists(int((tmp_path / "ready").read_text())))


def test_zero_processes_are_refused(cell: Cells) -> None:
    """``nprocs=torch.cuda.device_count()`` without a GPU: torch "succeeds" having done nothing."""
    names = cell("def train(i): pass")
    with pytest.raises(nbddp.LaunchError, match="device_count"):
        nbddp.spawn(names.train, nprocs=0)


def test_the_signature_is_torchs() -> None:
    import inspect

    ours, theirs = (inspect.signature(f).parameters for f in (nbddp.spawn, torch.multiprocessing.spawn))
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]
