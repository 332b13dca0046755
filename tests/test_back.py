"""Results come back whole: large ones without deadlock, instances as instances of the notebook's own classes."""

from __future__ import annotations

import gc
import hashlib
import os

import numpy as np
import pytest
import torch

import nbddp
from tests.support import Cells, open_fds, run


def test_values_are_by_rank_and_value_is_rank_0s(cell: Cells) -> None:
    names = cell("import nbddp\ndef train(): return {'rank': nbddp.rank()}")
    done = run(names.train, nprocs=3)
    assert done.values == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert done.value == {"rank": 0}
    assert (done.state, done.nprocs, done.error) == ("finished", 3, None)
    assert 0 < done.seconds < 60


def test_500_mb_come_back_without_deadlock(cell: Cells) -> None:
    """A queue's pipe holds 64 kB: a launcher that joins before it reads hangs."""
    names = cell("""
        import torch, numpy, nbddp
        def train():
            big = torch.full((125_000_000,), float(nbddp.rank() + 1))
            return (big, big[:10]) if nbddp.rank() == 0 else numpy.arange(1_000_000)
    """)
    done = run(names.train, timeout=120)
    big, part = done.values[0]
    assert big.nbytes == 500_000_000
    assert big.device.type == "cpu"
    assert bool((big == 1).all())
    part.fill_(7)
    assert big[9].item() == 7  # views still share storage
    assert done.values[1].sum() == 499_999_500_000


def test_results_are_the_notebooks_to_write(cell: Cells) -> None:
    names = cell("""
        import torch, numpy
        def train(): return torch.zeros(1 << 20), numpy.zeros(1 << 20), torch.zeros(3), numpy.zeros(3)
    """)
    done = run(names.train)
    for value in done.values[0]:
        value += 1
        assert value.sum() == len(value)
    assert not any(value.any() for value in done.values[1])


def test_large_results_hold_no_file_descriptor(cell: Cells) -> None:
    names = cell("import torch\ndef train(): return torch.ones(1 << 20)")
    before = open_fds()
    kept = [run(names.train).value for _ in range(5)]
    assert len(open_fds()) == len(before)
    assert sum(float(value.sum()) for value in kept) == 5 * (1 << 20)
    del kept
    gc.collect()
    nbddp.run(len, ("",), nprocs=1, device="cpu", show=False)  # last_run() keeps one run's values
    with open("/proc/self/maps") as file:
        assert "nbddp-result" not in file.read()


def test_a_trained_model_is_an_instance_of_the_notebooks_class(cell: Cells) -> None:
    """Unpickled by value it would be an instance of a second class of the same name."""
    names = cell("""
        import torch, torch.distributed as dist
        class Net(torch.nn.Module):
            made = []
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 1)
            def forward(self, x): return super().__repr__() and self.layer(x)
        Config = __import__("dataclasses").make_dataclass("Config", ["lr"])
        import enum
        class Mode(enum.Enum):
            A = 1
        def train():
            Net.made.append("in a rank")
            Net.poison = True
            model = torch.nn.parallel.DistributedDataParallel(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            before = model.module.layer.weight.detach().clone()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            return model, before, Mode.A, [Net], Net
    """)
    identity = id(names.Net)
    for model, before, mode, listed, net in run(names.train, seed=0).values:
        assert type(model) is names.Net  # the DDP wrapper is gone with its group
        assert mode is names.Mode.A
        assert listed == [names.Net]
        assert net is names.Net
        assert not torch.equal(model.layer.weight, before)
        assert model(torch.ones(1, 3)).shape == (1, 1)
    assert id(cell.main.Net) == identity
    assert names.Net.made == []
    assert not hasattr(names.Net, "poison")


def test_an_instance_of_a_class_made_in_the_rank_comes_back(cell: Cells) -> None:
    names = cell("""
        def train():
            class Result:
                def __init__(self, x): self.x = x
                def double(self): return 2 * self.x
            return Result(4), lambda y: y + 1
    """)
    for result, function in run(names.train).values:
        assert result.double() == 8
        assert function(1) == 2


def test_ddp_inside_a_container_comes_back_as_the_model(cell: Cells) -> None:
    names = cell("""
        import torch
        def train():
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
            return {"model": model, "state": model.state_dict()}
    """)
    value = run(names.train).value
    assert type(value["model"]) is torch.nn.Linear
    assert list(value["state"]) == ["module.weight", "module.bias"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_result_that_cannot_travel_fails_that_rank_by_name(cell: Cells, rank: int) -> None:
    names = cell("""
        import threading, nbddp
        def train(bad):
            return {"fine": 1, "lock": threading.Lock()} if nbddp.rank() == bad else "fine"
    """)
    with pytest.raises(nbddp.PayloadError) as caught:
        run(names.train, rank)
    assert caught.value.path == ("the result", "['lock']")
    assert f"returned on rank {rank}" in str(caught.value)
    assert "lock" in str(caught.value)


def test_a_result_that_does_not_unpickle_here_says_so(cell: Cells) -> None:
    names = cell("""
        import os
        class Trap:
            def __reduce__(self): return trap, (os.getpid(),)
        def trap(pid):
            if os.getpid() != pid:
                raise RuntimeError("not here")
        def train(): return Trap()
    """)
    with pytest.raises(nbddp.PayloadError, match="not here"):
        run(names.train)


def test_generators_of_results_and_none(cell: Cells) -> None:
    names = cell("""
        def nothing(): pass
        def bad(): return (i for i in range(3))
    """)
    assert run(names.nothing).values == [None, None]
    with pytest.raises(nbddp.PayloadError, match="generator"):
        run(names.bad)


def test_value_of_a_failed_or_stopped_run_raises(cell: Cells) -> None:
    names = cell("import time\ndef bad(): raise KeyError('k')\ndef slow(): time.sleep(100)")
    with pytest.raises(nbddp.RankError):
        run(names.bad)
    failed = nbddp.last_run()
    assert failed is not None
    with pytest.raises(nbddp.RankError, match="KeyError: 'k'"):
        _ = failed.value
    going = run(names.slow, wait=False)
    with pytest.raises(nbddp.NbddpError, match="wait"):
        _ = going.value
    going.stop(0)
    with pytest.raises(nbddp.NbddpError, match="stopped"):
        _ = going.value


def test_results_of_awkward_shapes(cell: Cells) -> None:
    names = cell("""
        import torch, numpy
        def train():
            base = torch.arange(12.0).view(3, 4)
            frozen = numpy.ones(4); frozen.flags.writeable = False
            return dict(t=base.t(), slice=base[:, 1], sparse=base.to_sparse(), empty=torch.empty(0),
                        half=base.bfloat16(), grad=torch.nn.Parameter(base), frozen=frozen, bytes=b"x" * 3_000_000,
                        fortran=numpy.asfortranarray(base.numpy()))
    """)
    value = run(names.train).value
    base = torch.arange(12.0).view(3, 4)
    assert torch.equal(value["t"], base.t())
    assert value["t"].stride() == base.t().stride()
    assert torch.equal(value["slice"], base[:, 1])
    assert torch.equal(value["sparse"].to_dense(), base)
    assert value["empty"].shape == (0,)
    assert torch.equal(value["half"], base.bfloat16())
    assert value["grad"].requires_grad
    assert not value["frozen"].flags.writeable
    assert hashlib.sha1(value["bytes"]).hexdigest() == hashlib.sha1(b"x" * 3_000_000).hexdigest()
    np.testing.assert_array_equal(value["fortran"], base.numpy())
    assert value["fortran"].flags.f_contiguous


def test_a_run_does_not_pickle_itself_into_a_rank(cell: Cells) -> None:
    names = cell("def train(): return 1")
    cell.main.done = run(names.train)
    with pytest.raises(nbddp.PayloadError, match="stays in the notebook"):
        run(cell("def use(): return done.value").use)


@pytest.mark.gpu
def test_cuda_results_come_back_on_the_cpu_without_a_context_here(cell: Cells) -> None:
    names = cell("""
        import torch, nbddp
        def train(): return torch.ones(1 << 20, device=nbddp.device()), os_pid()
        def os_pid():
            import os
            return os.getpid()
    """)
    before = torch.cuda.is_initialized()
    tensor, pid = nbddp.run(names.train, nprocs=1, show=False).value
    assert tensor.device.type == "cpu"
    assert float(tensor.sum()) == 1 << 20
    assert torch.cuda.is_initialized() == before
    assert pid != os.getpid()
