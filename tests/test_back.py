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


def test_results_can_be_written_to(cell: Cells) -> None:
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


# ---------------------------------------------------------------------------- functions


COUNTER = """
    import nbddp
    def counter(start=0):
        count = start
        def step(n=1):
            nonlocal count
            count += n
            return count
        return step
"""


def test_a_closure_comes_back_with_what_it_counted(cell: Cells) -> None:
    names = cell(f"""{COUNTER}
    step = counter()
    def train():
        for _ in range(5):
            step()
        return step
    """)
    assert run(names.train).value() == 6
    assert names.step() == 1


def test_each_rank_returns_its_own_closure(cell: Cells) -> None:
    names = cell(f"""{COUNTER}
    step = counter()
    def train():
        step(10 * nbddp.rank())
        return step
    """)
    steps = run(names.train, nprocs=3).values
    assert [step() for step in steps] == [1, 11, 21]
    assert [step() for step in steps] == [2, 12, 22]


@pytest.mark.parametrize("made", ["in the notebook", "in the rank"])
def test_functions_that_share_a_variable_still_share_it(cell: Cells, made: str) -> None:
    """cloudpickle gives each a variable of its own."""
    names = cell("""
        def pair():
            count = 0
            def add(n):
                nonlocal count
                count += n
            return add, lambda: count
        add, total = pair()
        def notebooks():
            add(5)
            return total(), add, total
        def ranks():
            add, total = pair()
            add(5)
            return total(), add, total
    """)
    seen, add, total = run(names.notebooks if made == "in the notebook" else names.ranks).value
    add(2)
    assert (seen, total()) == (5, 7)
    assert names.total() == 0


def test_defaults_and_attributes_of_a_function_come_back(cell: Cells) -> None:
    names = cell("""
        def remember(x, seen=[], *, log={}):
            seen.append(x)
            log[x] = len(seen)
            remember.calls = getattr(remember, "calls", 0) + 1
            return seen, log
        def train():
            remember("a"), remember("b")
            return remember
    """)
    back = run(names.train).value
    assert back("c") == (["a", "b", "c"], {"a": 1, "b": 2, "c": 3})
    assert back.calls == 2
    assert names.remember.calls == 1  # what it calls by name is the notebook's
    assert names.remember.__defaults__ == ([],)


def test_hooks_of_a_model_come_back_with_what_they_saw(cell: Cells) -> None:
    names = cell("""
        import torch
        def watch(model):
            shapes = []
            def hook(module, args, output):
                shapes.append(tuple(output.shape))
            model.register_forward_hook(hook)
            model.shapes = lambda: shapes
            return model
        model = watch(torch.nn.Linear(3, 1))
        def train():
            model(torch.ones(2, 3))
            model(torch.ones(5, 3))
            return model
    """)
    for back in run(names.train).values:
        back(torch.ones(7, 3))
        assert back.shapes() == [(2, 1), (5, 1), (7, 1)]
    assert names.model.shapes() == []


def test_a_plain_function_of_the_notebook_comes_back_as_itself(cell: Cells) -> None:
    """So that what holds it can be pickled: torch.save(model) finds it by its name, and it is that one."""
    names = cell("""
        import functools, torch
        def act(x, slope=0.5): return x * slope
        def with_state(x, seen=[]): return x
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.act, self.other, self.part = act, with_state, functools.partial(act, slope=2)
            def forward(self, x): return self.part(self.act(x))
            @staticmethod
            def scale(x): return 3 * x
        @functools.lru_cache(7)
        def cached(n): return n + 1
        def train(): return Net(), Net.scale, cached
    """)
    net, scale, cached = run(names.train).value
    assert net.act is names.act
    assert net.part.func is names.act
    assert net.other is not names.with_state
    assert scale is names.Net.scale
    assert cached is names.cached


def test_a_plain_function_that_the_rank_changed_comes_back_changed(cell: Cells) -> None:
    names = cell("""
        def by_default(x=1): return x
        def by_attribute(): return by_attribute.x
        def by_code(): return 1
        def train():
            by_default.__defaults__ = (2,)
            by_attribute.x = 3
            by_code.__code__ = (lambda: 4).__code__
            return by_default, by_attribute, by_code
    """)
    by_default, by_attribute, by_code = run(names.train).value
    assert (by_default(), by_attribute.x, by_code()) == (2, 3, 4)
    assert (names.by_default(), hasattr(names.by_attribute, "x"), names.by_code()) == (1, False, 1)


def test_every_kind_of_function_comes_back(cell: Cells) -> None:
    names = cell("""
        import functools
        factor = 10
        def scaled(x): return x * factor
        def twice(f):
            @functools.wraps(f)
            def wrapper(*args):
                wrapper.calls += 1
                return f(f(*args))
            wrapper.calls = 0
            return wrapper
        @twice
        def plus(x): return x + 1
        def outer():
            def even(n): return n == 0 or odd(n - 1)
            def odd(n): return n != 0 and even(n - 1)
            def fall(n): return [n] + fall(n - 1) if n else []
            def upto(n):
                yield from range(n)
            return even, odd, fall, upto
        even, odd, fall, upto = outer()
        @functools.lru_cache
        def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
        class Model:
            def __init__(self, x): self.x = x
            def value(self): return self.x * factor
            @classmethod
            def build(cls, x): return cls(x)
            @property
            def half(self): return self.x / 2
        class Child(Model):
            def value(self): return super().value() + 1
        def train():
            plus(1)
            class Grandchild(Child):
                def value(self): return super().value() + 1
            return dict(
                scaled=scaled, plus=plus, lam=lambda x: x + factor, partial=functools.partial(scaled, 2), fib=fib,
                even=even, odd=odd, fall=fall, upto=upto, method=Child(3).value, build=Child.build, made=Grandchild(5),
                half=Model.half,
            )
    """)
    for got in run(names.train).values:
        assert got["scaled"](2) == 20
        assert (got["plus"](1), got["plus"].calls, names.plus.calls) == (3, 2, 0)
        assert (got["lam"](1), got["partial"](), got["fib"](30)) == (11, 20, 832040)
        assert (got["even"](10), got["odd"](10), got["fall"](3), list(got["upto"](3))) == (
            True,
            False,
            [3, 2, 1],
            [0, 1, 2],
        )
        assert (got["method"](), type(got["method"].__self__)) == (31, names.Child)
        assert type(got["build"](4)) is names.Child
        assert (got["made"].value(), isinstance(got["made"], names.Child)) == (52, True)
        assert got["half"].fget(names.Model(3)) == 1.5


def test_a_returned_function_uses_the_notebooks_globals(cell: Cells) -> None:
    names = cell("""
        t = 1
        def counter():
            n = 0
            def f():
                nonlocal n
                n += 1
                return t, n
            return f
        f = counter()
        def train():
            global t, made
            t, made = 5, 7
            f()
            return f, lambda: made
    """)
    f, g = run(names.train).value
    assert f.__globals__ is cell.main.__dict__
    assert (f(), cell.main.t) == ((1, 2), 1)
    cell.main.t = 2
    assert f() == (2, 3)
    assert (g(), cell.main.made) == (7, 7)  # the notebook had none


def test_notebook_data_that_a_function_reads_is_not_sent_back(cell: Cells) -> None:
    names = cell("""
        import torch
        big = torch.ones(1 << 25)
        def train():
            def f(): return float(big[0])
            return f
    """)
    done = run(names.train)
    with open("/proc/self/maps") as file:
        assert "nbddp-result" not in file.read()
    assert done.value() == 1.0


def test_the_notebooks_builtins_stay_as_they_are(cell: Cells) -> None:
    import builtins

    cell.main.__dict__["__builtins__"] = builtins  # as in IPython
    names = cell("def train(): return lambda: len([1])")
    assert run(names.train).value() == 1
    assert cell.main.__dict__["__builtins__"] is builtins


def test_changes_of_a_class_in_a_rank_are_reported(cell: Cells) -> None:
    names = cell("""
        import nbddp, enum
        class Base:
            steps = 0
        class Net(Base):
            made, table = [], {"a": {}}
            def value(self): return 1
        class Quiet:
            steps = 0
        class Mode(enum.Flag):
            A = 1
            B = 2
        def train():
            Quiet.steps = 5
            Base.steps += nbddp.rank()
            Net.made.append(1)
            Net.table["a"]["b"] = 1
            Net.value = lambda self: 2
            Net.new = 1
            del Net.value
            return Net(), Mode.A | Mode.B
    """)
    done = run(names.train)
    assert done.logs(0) == (
        "[ranks 0, 1: Net.made, Net.new, Net.table and Net.value were changed; the notebook's Net is unchanged]\n"
        "[rank 1: Base.steps was changed; the notebook's Base is unchanged]\n"
    )
    assert (names.Net.made, names.Net.table, names.Base.steps, names.Net().value()) == ([], {"a": {}}, 0, 1)


def test_a_returned_function_whose_global_differs_in_the_notebook_is_reported(cell: Cells) -> None:
    names = cell("""
        rate, same, made = 0.1, 3, None
        def train():
            global rate, same
            rate, same = 0.5, 3
            def f(): return rate, same
            return f
    """)
    done = run(names.train, nprocs=1)
    assert done.value() == (0.1, 3)
    assert done.logs(0) == ("[rank 0: f reads rate, whose value in the notebook differs from the rank's]\n")


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
def test_an_unpicklable_result_is_named_and_the_rest_is_in_partial(cell: Cells, rank: int) -> None:
    names = cell("""
        import threading, nbddp
        def train(bad):
            return {"fine": 1, "lock": threading.Lock()} if nbddp.rank() == bad else "fine"
    """)
    with pytest.raises(nbddp.PayloadError) as caught:
        run(names.train, rank)
    assert caught.value.path == ("the result", "['lock']")
    assert f"returned on rank {rank}" in str(caught.value)
    assert ".partial" in str(caught.value)
    partial = caught.value.partial
    assert partial is not None
    assert partial[1 - rank] == "fine"
    assert partial[rank]["fine"] == 1
    assert partial[rank]["lock"].text.startswith("<unlocked _thread.lock")
    assert "stayed on its rank: cannot pickle" in repr(partial[rank])
    assert nbddp.last_run().state == "failed"


def test_every_picklable_part_of_a_result_is_in_partial(cell: Cells) -> None:
    names = cell("""
        import collections, dataclasses, threading, torch
        Point = collections.namedtuple("Point", "x y")
        @dataclasses.dataclass
        class Result:
            model: object
            steps: object
            trouble: object
        class Frozen:
            def __init__(self): self.lock, self.kept = threading.Lock(), 7
            def __copy__(self): raise RuntimeError("there is one")
        def train():
            model = torch.nn.Linear(2, 1)
            model.notes = [1, threading.Lock()]
            myself = [1, threading.Lock()]
            myself.append(myself)
            return [
                Result(model, list(range(1000)) + [(i for i in ()), 1000], threading.Lock()),
                Point(1, {"a": 2, "b": threading.Lock()}), {frozenset({1, threading.Lock()}), 2},
                collections.OrderedDict(a=threading.Lock(), b=3), Frozen(), (threading.Lock(),), myself,
            ]
    """)
    with pytest.raises(nbddp.PayloadError) as caught:
        run(names.train, nprocs=1)
    assert caught.value.partial is not None
    result, point, some, ordered, frozen, single, myself = caught.value.partial[0]
    assert type(result) is names.Result
    assert isinstance(result.model, torch.nn.Linear)
    assert result.model(torch.zeros(1, 2)).shape == (1, 1)
    assert result.model.notes[0] == 1
    assert result.steps[:1000] + result.steps[1001:] == list(range(1001))
    assert "generator" in result.steps[1000].text
    assert "lock" in result.trouble.text
    assert (type(point), point.x, point.y["a"]) == (names.Point, 1, 2)
    assert 2 in some
    assert (list(ordered), ordered["b"]) == (["a", "b"], 3)
    assert frozen.why.startswith("cannot pickle")
    assert "lock" in single[0].text
    assert myself[0] == 1


def test_ten_thousand_unpicklable_parts_are_reported_within_60_s(cell: Cells) -> None:
    names = cell("""
        import threading
        def train(): return ["fine", [threading.Lock() for _ in range(10_000)]]
    """)
    with pytest.raises(nbddp.PayloadError) as caught:
        run(names.train, nprocs=1, timeout=60)
    assert caught.value.partial is not None
    fine, locks = caught.value.partial[0]
    assert fine == "fine"
    assert len(locks) == 10_000
    assert all("lock" in lock.text for lock in locks)


def test_a_result_that_does_not_unpickle_here_is_a_payload_error(cell: Cells) -> None:
    names = cell("""
        import os, nbddp
        class Trap:
            def __reduce__(self): return trap, (os.getpid(),)
        def trap(pid):
            if os.getpid() != pid:
                raise RuntimeError("not here")
        def train(): return Trap() if nbddp.rank() == 0 else 1
    """)
    with pytest.raises(nbddp.PayloadError, match="not here") as caught:
        run(names.train)
    assert caught.value.partial is not None
    first, second = caught.value.partial
    assert "not here" in first.why
    assert second == 1


def test_none_comes_back_and_a_generator_is_refused(cell: Cells) -> None:
    names = cell("""
        def nothing(): pass
        def bad(): return (i for i in range(3))
    """)
    assert run(names.nothing).values == [None, None]
    with pytest.raises(nbddp.PayloadError, match="generator"):
        run(names.bad)


def test_the_value_of_a_failed_or_stopped_run_raises(cell: Cells) -> None:
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


def test_tensors_and_arrays_of_any_layout_come_back(cell: Cells) -> None:
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


def test_a_run_object_cannot_be_sent_to_a_rank(cell: Cells) -> None:
    names = cell("def train(): return 1")
    cell.main.done = run(names.train)
    with pytest.raises(nbddp.PayloadError, match="stays in the notebook"):
        run(cell("def use(): return done.value").use)


@pytest.mark.gpu
def test_cuda_results_come_back_on_the_cpu_without_a_cuda_context_in_the_notebook(cell: Cells) -> None:
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
