"""``nbddp.spawn`` behaves as ``torch.multiprocessing.spawn``, and works from a cell."""

import inspect
import os
import pickle
import re
import signal
from pathlib import Path

import psutil
import pytest
import torch.multiprocessing

import nbddp
from tests.support import Cells, free_port, wait_until


def test_the_signature_is_torchs() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (nbddp.spawn, torch.multiprocessing.spawn))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


def test_an_exception_and_any_other_end_are_worded_as_torch_does(cell: Cells) -> None:
    names = cell("""
        import os, sys, time
        def train(i, arg): raise ValueError(f"legitimate exception from process {i}: {arg}")
        def leave(i, code): sys.exit(code)
        def die(i, number):
            if i == 1: os.kill(os.getpid(), number)
            time.sleep(60)
    """)
    with pytest.raises(torch.multiprocessing.ProcessRaisedException) as caught:
        nbddp.spawn(names.train, args=("x",), nprocs=2)
    error = caught.value
    assert re.search(r"-- Process \d+ terminated with the following error:\nTraceback", str(error))
    assert f"legitimate exception from process {error.error_index}: x" in str(error)
    assert 'raise ValueError(f"legitimate' in str(error)  # the cell's line
    assert (isinstance(error, nbddp.RankError), type(error.cause), error.error_pid > 0) == (True, ValueError, True)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.error_pid) == (type(error), str(error), error.error_pid)
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match=r"^process 0 .* exit code 123$") as ended:
        nbddp.spawn(names.leave, args=(123,))
    assert (ended.value.error_index, ended.value.exit_code) == (0, 123)
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match=r"^process 1 .* signal SIGKILL$") as ended:
        nbddp.spawn(names.die, args=(int(signal.SIGKILL),), nprocs=2)
    assert isinstance(ended.value, nbddp.RankDied)
    assert (ended.value.error_index, ended.value.exit_code, ended.value.signal_name) == (1, -9, "SIGKILL")


def test_join_false_gives_a_context_whose_join_times_out_and_no_stop_is_a_success(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import os, time
        def train(i, go):
            while not os.path.exists(go): time.sleep(0.01)
            if i == 1 and os.path.getsize(go): raise KeyError("late")
    """)
    for text in ("", "fail"):
        go = tmp_path / f"go{text}"
        context = nbddp.spawn(names.train, (str(go),), nprocs=2, join=False)
        assert (context.join(timeout=0.1), context.run.name) == (False, "train")
        pids = context.pids()
        assert [psutil.pid_exists(pid) for pid in {*pids}] == [True, True]
        (tmp_path / "written").write_text(text)
        os.rename(tmp_path / "written", go)
        if text:
            with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="-- Process 1 terminated") as caught:
                context.join(timeout=20)
            assert caught.value.error_pid == caught.value.pid == pids[1]
        else:
            assert context.join(timeout=20) is context.join() is True
        assert context.pids() == pids
        wait_until(lambda pids=pids: not any(psutil.pid_exists(pid) for pid in pids))
    going = nbddp.spawn(names.train, (str(tmp_path / "never"),), nprocs=2, join=False)
    going.pids()
    going.run.stop(0)
    with pytest.raises(nbddp.NbddpError, match="is stopped"):
        going.join()


def test_the_official_tutorial_trains_after_changing_one_word(cell: Cells, tmp_path: Path) -> None:
    """It sets MASTER_PORT and makes its group itself, and finds neither."""
    names = cell("""
        import os, torch, torch.distributed as dist
        wanted = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID".split()
        from torch.nn.parallel import DistributedDataParallel as DDP
        class ToyModel(torch.nn.Linear): ...
        def demo_basic(rank, world_size, port, folder):
            assert not dist.is_initialized()
            assert not [key for key in wanted if key in os.environ]
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
            dist.init_process_group("gloo", rank=rank, world_size=world_size)
            torch.manual_seed(rank)
            model = DDP(ToyModel(10, 5))
            before = model.module.weight.detach().clone()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss = torch.nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5))
            loss.backward(); optimizer.step()
            weight = model.module.weight.detach()
            assert dist.get_world_size() == world_size and not torch.equal(weight, before)
            torch.save(weight, f"{folder}/{rank}.pt")
            dist.destroy_process_group()
    """)
    nbddp.spawn(names.demo_basic, args=(2, free_port(), str(tmp_path)), nprocs=2, join=True)
    assert torch.equal(torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt"))


def test_what_cannot_work_is_refused_by_name(cell: Cells) -> None:
    names = cell("import threading\ndef train(i, lock=None): pass\nlock = threading.Lock()")
    with pytest.raises(nbddp.LaunchError, match="device_count"):  # torch "succeeds" having done nothing
        nbddp.spawn(names.train, nprocs=0)
    with pytest.raises(nbddp.LaunchError, match="can't be called with these arguments"):
        nbddp.spawn(names.train, (1, 2))
    with pytest.raises(nbddp.PayloadError, match=r"args\[0\]"):
        nbddp.spawn(names.train, (names.lock,))
