"""Results come back whole: large ones without deadlock, instances as instances of the notebook's own classes."""

import pytest
import torch

import nbddp
from tests.support import Cells, error_of, run


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
        class Mode(enum.Enum): A = 1
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
        # The DDP wrapper is gone with its group.
        assert (type(model), mode, listed, net) == (names.Net, names.Mode.A, [names.Net], names.Net)
        assert not torch.equal(model.layer.weight, before)
        assert model(torch.ones(1, 3)).shape == (1, 1)
    assert (id(cell.main.Net), names.Net.made, hasattr(names.Net, "poison")) == (identity, [], False)


def test_the_path_leads_through_lists_and_closures_and_what_cannot_be_unpickled_is_said(cell: Cells) -> None:
    names = cell("""
        import threading
        def train():
            lock = threading.Lock()
            return [1, lambda: lock]
        class Broken:
            def __reduce__(self): return eval, ("1 / 0",)
        def broken(): return Broken()
    """)
    assert error_of(names.train, kind=nbddp.PayloadError).path == ("the result", "[1]", "lock")
    said = "what broken returned can't be unpickled here: ZeroDivisionError: division by zero"
    assert str(error_of(names.broken, kind=nbddp.PayloadError)) == said


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unpicklable_result_is_named_and_the_rest_is_in_partial(cell: Cells, rank: int) -> None:
    names = cell("""
        import threading, nbddp
        def train(bad):
            lock = threading.Lock()
            return {"fine": 1, "lock": lock, "two": (2, lock)} if nbddp.rank() == bad else "fine"
    """)
    error = error_of(names.train, rank, kind=nbddp.PayloadError)
    partial = error.partial
    assert error.path == ("the result", "['lock']")
    assert [text in str(error) for text in (f"returned on rank {rank}", ".partial")] == [True, True]
    assert (partial[1 - rank], partial[rank]["fine"], partial[rank]["two"][0]) == ("fine", 1, 2)
    assert partial[rank]["lock"].text.startswith("<unlocked _thread.lock")
    assert "stayed on its rank: cannot pickle" in repr(partial[rank])
    assert nbddp.last_run().state == "failed"


def test_what_can_be_sent_of_a_value_comes_back_as_it_was(cell: Cells) -> None:
    names = cell("""
        import collections, threading, torch
        class Net(torch.nn.Linear): pass
        class Key:
            def __reduce__(self): raise TypeError("stays")
        def train():
            net, data = Net(2, 2), torch.zeros(1 << 18)
            inner = collections.OrderedDict(net=net, data=data, view=data[:3], train=train, rows=[1, (2, net)])
            return {"lock": threading.Lock(), Key(): 5, **inner, "inner": inner | {"lock": threading.Lock()}}
    """)
    (value,) = error_of(names.train, nprocs=1, kind=nbddp.PayloadError).partial
    for part in (value, value["inner"]):
        assert "stayed on its rank" in repr(part.pop("lock"))
        assert (type(part["net"]), part["train"]) == (names.Net, names.train)
        assert part["rows"] == [1, (2, value["net"])]
        value["data"].fill_(7)
        assert part["view"].tolist() == [7, 7, 7]  # still a view
    (five,) = (item for key, item in value.items() if not isinstance(key, str))
    assert five == 5


def test_a_rank_keeps_no_copy_of_what_it_has_sent() -> None:
    with nbddp.Session(nprocs=1, device="cpu", show=False) as session:
        session.cell("import glob, os, torch\nx = torch.zeros(500_000)")
        session.pull("x")
        session.cell("files = [os.path.realpath(each) for each in glob.glob('/proc/self/fd/*')]")
        assert [each for each in session.pull("files") if "memfd:nbddp" in each] == []
