"""``nbddp.spawn`` behaves as ``torch.multiprocessing.spawn``, and works from a cell."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import signal
import socket
from pathlib import Path

import psutil
import pytest
import torch.multiprocessing

import nbddp
from tests.support import Cells, wait_until


def test_the_signature_is_torchs() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (nbddp.spawn, torch.multiprocessing.spawn))
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


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


def test_an_end_without_an_exception_is_worded_as_torch_does(cell: Cells) -> None:
    names = cell("""
        import os, sys, time
        def leave(i, code): sys.exit(code)
        def die(i, number):
            if i == 1:
                os.kill(os.getpid(), number)
            time.sleep(60)
    """)
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match=r"^process 0 .* exit code 123$") as caught:
        nbddp.spawn(names.leave, args=(123,))
    assert (caught.value.error_index, caught.value.exit_code) == (0, 123)
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match=r"^process 1 .* signal SIGKILL$") as caught:
        nbddp.spawn(names.die, args=(int(signal.SIGKILL),), nprocs=2)
    assert isinstance(caught.value, nbddp.RankDied)
    assert (caught.value.error_index, caught.value.exit_code, caught.value.signal_name) == (1, -9, "SIGKILL")


def test_join_false_gives_a_context_whose_join_has_a_timeout(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import os, time
        def train(i, go):
            while not os.path.exists(go): time.sleep(0.01)
            if i == 1 and os.path.getsize(go): raise KeyError("late")
    """)
    for text in ("", "fail"):
        go = tmp_path / f"go{text}"
        context = nbddp.spawn(names.train, (str(go),), nprocs=2, join=False)
        assert context is not None
        assert context.join(timeout=0.1) is False
        pids = context.pids()
        assert len(set(pids)) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        (tmp_path / "written").write_text(text)
        os.rename(tmp_path / "written", go)
        if text:
            with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="-- Process 1 terminated"):
                context.join(timeout=20)
        else:
            assert context.join(timeout=20) is True
            assert context.join() is True
        assert context.pids() == pids
        wait_until(lambda pids=pids: not any(psutil.pid_exists(pid) for pid in pids))


def test_spawn_sets_no_environment_and_makes_no_process_group(cell: Cells) -> None:
    names = cell("""
        import os, torch.distributed as dist
        def train(i, wanted):
            assert not dist.is_initialized()
            assert not [key for key in wanted if key in os.environ]
    """)
    wanted = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"]
    nbddp.spawn(names.train, args=(wanted,), nprocs=2)


def test_the_official_tutorial_trains_after_changing_one_word(cell: Cells, tmp_path: Path) -> None:
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


def test_what_cannot_work_is_refused_by_name(cell: Cells) -> None:
    names = cell("import threading\ndef train(i, lock=None): pass\nlock = threading.Lock()")
    with pytest.raises(nbddp.LaunchError, match="device_count"):  # torch "succeeds" having done nothing
        nbddp.spawn(names.train, nprocs=0)
    with pytest.raises(nbddp.LaunchError, match="cannot be called with these arguments"):
        nbddp.spawn(names.train, (1, 2))
    with pytest.raises(nbddp.PayloadError, match=r"args\[0\]"):
        nbddp.spawn(names.train, (names.lock,))


def test_a_stopped_spawn_is_no_success_and_its_errors_can_be_pickled(cell: Cells) -> None:
    names = cell("import time\ndef wait(rank): time.sleep(60)\ndef fail(rank): raise ValueError('boom')")
    going = nbddp.spawn(names.wait, nprocs=2, join=False)
    assert going is not None
    going.pids()
    going.run.stop(0)
    with pytest.raises(nbddp.NbddpError, match="is stopped"):
        going.join()
    with pytest.raises(nbddp.RankError) as caught:
        nbddp.spawn(names.fail)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.error_pid) == (type(caught.value), str(caught.value), caught.value.error_pid)
