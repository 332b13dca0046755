"""The notebook's code and data reach every rank whole, shared and isolated; what cannot be sent is refused by name."""

from __future__ import annotations

import multiprocessing.resource_sharer
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nbddp
from nbddp import payload
from tests.support import Cells, marked_pids, open_fds, run, script

DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits", "torch.float4"))
    },
    key=str,
)


# ---------------------------------------------------------------------------- code


def test_everything_defined_in_cells_is_sent_by_value(cell: Cells) -> None:
    """PyTorch's oldest open complaint: Can't get attribute ... on __main__."""
    cell("""
        import dataclasses, enum, functools, typing

        scale = 10

        class Base:
            def __init__(self, x): self.x = x
            def value(self): return self.x

        class Child(Base):
            made = 0
            def __init__(self, x):
                super().__init__(x)
                type(self).made += 1
            def value(self): return super().value() * scale
            @classmethod
            def build(cls, x): return cls(x)
            @staticmethod
            def twice(x): return 2 * x
            @property
            def half(self): return self.x / 2

        @dataclasses.dataclass(frozen=True)
        class Config:
            lr: float = 0.1
            layers: typing.List[int] = dataclasses.field(default_factory=lambda: [1, 2])

        class Mode(enum.Enum):
            TRAIN = "t"
            TEST = "e"

        class Point(typing.NamedTuple):
            x: int
            y: int = 7
    """)
    names = cell("""
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)
        def factorial(n): return 1 if n < 2 else n * factorial(n - 1)
        def counter():
            count = 0
            def step():
                nonlocal count
                count += 1
                return count
            return step
        step = counter()
        step()

        @functools.lru_cache
        def cached(n): return n + scale

        square = lambda x: x * x
        config = Config(lr=0.5)

        def train(mode, config=config):
            child = Child.build(4)
            return dict(
                child=child.value(), made=Child.made, twice=Child.twice(5), half=child.half,
                lr=config.lr, equal=config == Config(0.5), mode=mode is Mode.TRAIN, name=Mode(mode.value).name,
                point=Point(1).y, even=even(10), odd=odd(10), factorial=factorial(5), count=step(),
                cached=cached(1), square=square(3), partial=functools.partial(max, 3)(9), module=Child.__module__,
            )
    """)
    expected = {
        "child": 40, "made": 1, "twice": 10, "half": 2.0, "lr": 0.5, "equal": True, "mode": True, "name": "TRAIN",
        "point": 7, "even": True, "odd": False, "factorial": 120, "count": 2, "cached": 11, "square": 9, "partial": 9,
        "module": "__main__",
    }  # fmt: skip
    assert run(names.train, names.Mode.TRAIN).values == [expected, expected]
    assert names.Child.made == 0
    assert names.step() == 2  # the ranks' counting is not the notebook's


def test_a_lambda_partial_method_or_callable_object_can_be_run(cell: Cells) -> None:
    names = cell("""
        import functools
        class Trainer:
            def __init__(self, base): self.base = base
            def fit(self, x): return self.base + x
            def __call__(self, x): return self.base * x
        def add(a, b, *, c): return a + b + c
    """)
    trainer = names.Trainer(10)
    assert run(lambda: 5).values == [5, 5]
    assert run(trainer.fit, 1).values == [11, 11]
    assert run(trainer, 3).values == [30, 30]
    assert run(names.functools.partial(names.add, 1, c=100), 10).values == [111, 111]
    assert run(names.add, 1, kwargs={"b": 2, "c": 3}).values == [6, 6]


def test_an_edited_cell_runs_its_new_code(cell: Cells) -> None:
    cell("def helper(): return 'old'")
    names = cell("def train(): return helper()")
    assert run(names.train).values == ["old", "old"]
    cell("def helper(): return 'new'")
    assert run(names.train).values == ["new", "new"]
    names = cell("def train(): return helper() + ' twice'")
    assert run(names.train).values == ["new twice", "new twice"]


def test_an_edited_module_beside_the_notebook_runs_its_new_code(
    cell: Cells, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork server that imported the old text would run it for ever."""
    monkeypatch.syspath_prepend(str(in_folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names = cell("""
        def train():
            import my_model
            return my_model.SIZE
    """)
    for size in (1, 22, 333):
        (in_folder / "my_model.py").write_text(f"SIZE = {size}\n")
        assert run(names.train).values == [size, size]


@pytest.mark.slow
def test_ranks_have_the_notebooks_present_environment_folder_and_path(
    cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server froze its own at its start; the ranks must not see those."""
    names = cell("""
        import os, sys
        def train():
            return os.environ.get("NBDDP_FEAR"), "HOME" in os.environ, os.getcwd(), sys.path[0], os.environ.get("EXTRA")
    """)
    monkeypatch.delenv("HOME", raising=False)
    for i in range(2):
        folder = tmp_path / f"folder{i}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("NBDDP_FEAR", str(i))
        monkeypatch.syspath_prepend(str(tmp_path / f"path{i}"))
        expected = (str(i), False, str(folder), str(tmp_path / f"path{i}"), "yes")
        assert run(names.train, env={"EXTRA": "yes"}).values == [expected, expected]
    assert "EXTRA" not in os.environ


def test_a_global_that_a_rank_sets_is_its_own(cell: Cells) -> None:
    names = cell("""
        import torch.distributed as dist
        total = [0]
        best = 0.5
        def train():
            global best
            best += dist.get_rank()
            total.append(dist.get_rank())
            import __main__
            return best, __main__.best, total
    """)
    assert run(names.train).values == [(0.5, 0.5, [0, 0]), (1.5, 1.5, [0, 1])]
    assert (names.best, names.total) == (0.5, [0])


def test_inspect_finds_a_cells_source_in_a_rank(cell: Cells) -> None:
    names = cell("""
        import inspect
        def helper():
            return 1  # a comment that only the source has
        def train():
            return inspect.getsource(helper)
    """)
    assert run(names.train).values == ["def helper():\n    return 1  # a comment that only the source has\n"] * 2


def test_a_cells_class_can_be_pickled_and_torch_saved_inside_a_rank(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import copy, pickle, torch
        class Net(torch.nn.Linear):
            def __init__(self): super().__init__(2, 1)
        def train(path):
            import nbddp
            net = Net()
            again = pickle.loads(pickle.dumps(net))
            torch.save(net, f"{path}/{nbddp.rank()}.pt")
            loaded = torch.load(f"{path}/{nbddp.rank()}.pt", weights_only=False)
            return [type(x) is Net and torch.equal(x.weight, net.weight) for x in (again, loaded, copy.deepcopy(net))]
    """)
    assert run(names.train, str(tmp_path)).values == [[True] * 3] * 2


def test_a_rank_has_the_names_that_the_notebook_has_now(cell: Cells) -> None:
    """``def sum`` once, and another name for it later: the builtin is the builtin again."""
    names = cell("""
        def sum(values): return "the notebook's"
        my_sum = sum
        del sum
        def max(*values): return "the notebook's, too"
        class Gone: pass
        class Net: pass
        gone, old = Gone(), Net()
        del Gone
        class Net:
            new = True
        def helper(): return Net()
        def train(gone, old):
            import __main__
            return dict(
                sum=sum([1, 2]), my_sum=my_sum([]), max=max(1, 2), gone=hasattr(__main__, "Gone"),
                net=__main__.Net is type(helper()), new=__main__.Net.new, old=hasattr(old, "new"),
                names=sorted(name for name in vars(__main__) if not name.startswith("__")),
            )
    """)
    expected = {
        "sum": 3, "my_sum": "the notebook's", "max": "the notebook's, too", "gone": False, "net": True, "new": True,
        "old": False, "names": ["Net", "helper", "max", "my_sum", "train"],
    }  # fmt: skip
    assert run(names.train, names.gone, names.old).values == [expected, expected]


def test_pickle_finds_in_a_rank_what_it_finds_in_the_notebook(cell: Cells) -> None:
    names = cell("""
        import enum, functools, pickle
        class Net:
            class Config: pass
            def fit(self): pass
        class Mode(enum.Enum):
            A = 1
        class Gone: pass
        class Twice: first = True
        def renamed(): pass
        def gone(): pass
        @functools.lru_cache
        def cached(n): return n
        def local():
            class Local: pass
            return Local()
        things = dict(
            net=Net(), config=Net.Config(), mode=Mode.A, gone=Gone(), twice=Twice(), other=renamed, function=gone,
            cached=cached, local=local(), method=Net().fit, lambda_=lambda: 0, kept=local, of_class=Net.fit,
        )
        del Gone, gone
        class Twice: pass
        other = renamed
        del renamed
        def outcome(thing):
            try:
                return type(pickle.loads(pickle.dumps(thing))).__name__
            except Exception as error:
                return type(error).__name__
        def train(things): return {name: outcome(thing) for name, thing in things.items()}
    """)
    expected = names.train(names.things)
    assert expected["net"] == "Net"
    refused = {"PicklingError"} if sys.version_info >= (3, 14) else {"PicklingError", "AttributeError"}
    assert set(expected.values()) >= {"Net", "function", *refused}
    assert run(names.train, names.things).values == [expected, expected]


def test_functions_that_share_a_variable_share_it_in_a_rank(cell: Cells) -> None:
    names = cell("""
        def pair():
            count, own = 0, []
            def add(n):
                nonlocal count
                count += n
                own.append(n)
            def total(): return count, own
            return add, total
        add, total = pair()
        class Trainer:
            add, total = staticmethod(add), staticmethod(total)
        def train(add2):
            add(1), add2(10), Trainer.add(100)
            return total(), Trainer.total()
    """)
    assert run(names.train, names.add).values == [((111, [1, 10, 100]),) * 2] * 2
    assert names.total() == (0, [])


# ---------------------------------------------------------------------------- data


@pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:BComplex32 support")
@pytest.mark.parametrize("numel", [7, 400_000], ids=["small", "mapped"])
def test_every_dtype_arrives_bit_for_bit(cell: Cells, numel: int) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for dtype in DTYPES:
        raw = torch.randint(0, 2, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        tensors[str(dtype)] = raw.view(dtype)
    assert len(tensors) >= 20
    assert {"torch.bfloat16", "torch.complex64", "torch.float8_e4m3fn", "torch.bool", "torch.uint16"} <= set(tensors)
    names = cell("""
        import torch, hashlib
        def digest(tensors):
            return {n: (str(t.dtype), tuple(t.shape), hashlib.sha1(t.view(torch.uint8).numpy()).hexdigest())
                    for n, t in tensors.items()}
        def train(tensors): return digest(tensors), tensors
    """)
    expected = names.digest(tensors)
    done = run(names.train, tensors)
    assert [value[0] for value in done.values] == [expected, expected]
    assert [names.digest(value[1]) for value in done.values] == [expected, expected]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Sparse", "ignore:.*quantiz.*")
def test_sparse_quantized_meta_and_parameters_arrive(cell: Cells) -> None:
    names = cell("""
        import torch
        def train(d):
            return dict(
                coo=d["coo"].to_dense(), csr=d["csr"].to_dense(), quantized=d["quantized"].dequantize(),
                meta=(d["meta"].device.type, tuple(d["meta"].shape)), empty=tuple(d["empty"].shape),
                parameter=(type(d["parameter"]).__name__, d["parameter"].requires_grad, d["parameter"].detach()),
                buffer=type(d["module"].running_mean).__name__, scalar=d["scalar"].item(),
                conj=d["conj"].resolve_conj(), neg=d["neg"].resolve_neg(), nested=d["sub"].kind,
            )
    """)
    complex_ = torch.tensor([1 + 2j, 3 - 1j])
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    data = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(dense, 0.5, 0, torch.qint8),
        "meta": torch.empty(3, 2, device="meta"),
        "empty": torch.empty(0, 5),
        "parameter": torch.nn.Parameter(torch.ones(3), requires_grad=False),
        "module": torch.nn.BatchNorm1d(2),
        "scalar": torch.tensor(2.5),
        "conj": complex_.conj(),
        "neg": complex_.conj().imag,
        "sub": cell("import types; sub = types.SimpleNamespace(kind='k')").sub,
    }
    for value in run(names.train, data).values:
        assert torch.equal(value["coo"], dense)
        assert torch.equal(value["csr"], dense)
        assert torch.equal(value["quantized"], dense)
        assert value["meta"] == ("meta", (3, 2))
        assert value["empty"] == (0, 5)
        assert value["parameter"][:2] == ("Parameter", False)
        assert torch.equal(value["parameter"][2], torch.ones(3))
        assert value["scalar"] == 2.5
        assert torch.equal(value["conj"], complex_.conj().resolve_conj())
        assert torch.equal(value["neg"], torch.tensor([-2.0, 1.0]))
        assert value["nested"] == "k"


@pytest.mark.parametrize("numel", [60, 1_000_000], ids=["small", "mapped"])
def test_tensors_keep_sharing_storage_and_arrays_are_independent_as_after_pickle(cell: Cells, numel: int) -> None:
    """Tied weights that come apart would train to something else, silently; arrays that stay together would, too."""
    names = cell("""
        import numpy, torch
        def make(numel):
            array = numpy.arange(numel, dtype="f4")
            tensor = torch.from_numpy(array)
            columns = array.reshape(-1, 10).T
            return dict(
                array=array, part=array[20:30], again=array, columns=columns, reversed=array[::-1], view=array.view(),
                windows=numpy.lib.stride_tricks.sliding_window_view(array, 2, writeable=True), bytes=array.view("u1"),
                tensor=tensor, row=tensor[10:20], transposed=tensor.view(-1, 10).t(), other=torch.from_numpy(array),
            )
        def write(things):
            seen = []
            for i, name in enumerate(things):
                things[name][..., -1] = i
                seen.append({name: round(float(things[name][..., -2:].sum())) for name in things})
            return seen
        def train(things): return write(things), make(len(things["array"]))
    """)
    made = names.make(numel)
    expected = {name: pickle.loads(pickle.dumps(made[name])) for name in made}
    expected["again"] = expected["array"]
    # As torch.save and torch.load make them.
    expected |= {"row": expected["tensor"][10:20], "transposed": expected["tensor"].view(-1, 10).t()}
    written = names.write(expected)
    for seen, back in run(names.train, made).values:
        assert seen == written
        assert names.write(back) == written
    assert made["array"].tolist() == list(range(numel))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 140_000], ids=["small", "mapped"])
def test_pandas_objects_are_independent_in_a_rank_and_afterwards(cell: Cells, rows: int) -> None:
    """pandas' note of who is a view of whom does not travel; memory that did would be written to unprotected."""
    pytest.importorskip("pandas")
    from tests.frames import every_way, written

    cell(f"from tests.frames import every_way, written\nknown = every_way({rows})")
    names = cell("def train(pairs): return written(pairs), written(known), pairs\ndef give(pairs): return pairs, known")
    expected = written(every_way(rows))
    assert len(expected) == (28 if rows == 5 else 7)
    for of_arguments, of_globals, _ in run(names.train, every_way(rows)).values:
        assert of_arguments == expected
        assert of_globals == expected
    for echoed, known in run(names.give, every_way(rows)).values:
        assert written(echoed) == expected
        assert written(known) == expected
    assert written(names.known) == expected


def test_ten_views_of_an_array_cost_no_memory_and_no_file_descriptor() -> None:
    base = np.zeros(64 << 20, dtype=np.uint8)
    views = [base[i << 20 :] for i in range(10)] + [base[::2], torch.from_numpy(base), base.reshape(-1, 1024).T]
    fd = payload.open_block("test")
    fds = open_fds()
    packed = payload.pack([base, *views], fd)
    assert base.nbytes < packed.nbytes < base.nbytes + (1 << 20)
    before = _private_kb()
    arrived = payload.unpack(fd, packed.nbytes).value
    for i, view in enumerate(arrived):
        view[..., 0] = i + 1
    assert [int(view[..., 0].max()) for view in arrived] == list(range(1, 15))
    assert _private_kb() - before < 4096
    assert open_fds() == fds
    os.close(fd)
    del arrived, view
    assert "nbddp-test" not in Path("/proc/self/maps").read_text()


def _private_kb() -> int:
    """Memory of this process alone, written to; huge pages of a hugefile count as shared."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(next(line for line in rollup.splitlines() if line.startswith("Anonymous:")).split()[1])


@pytest.mark.parametrize("numel", [100_000, 2_000_000])
def test_thousands_of_windows_cost_little_memory(numel: int) -> None:
    """``[x[i : i + n] for i in ...]``: pickle makes a copy of each."""
    series = np.arange(numel, dtype=np.float64)
    windows = [series[i : i + 1000] for i in range(0, numel - 1000, numel // 5000)]
    fd = payload.open_block("test")
    packed = payload.pack(windows, fd)
    assert packed.nbytes < series.nbytes + (24 << 20)
    arrived = payload.unpack(fd, packed.nbytes).value
    os.close(fd)
    for i, window in enumerate(arrived):
        assert window[999] == i * (numel // 5000) + 999
        window[:] = -1


def test_columns_of_a_large_array_are_sent_as_copies() -> None:
    """One mapping each would be a page table each."""
    base = np.arange(2_000_000, dtype=np.float64).reshape(-1, 200)
    packed = payload.prepare([base, *(base[:, i] for i in range(200))]).packed
    assert packed.nbytes < 2 * base.nbytes + (2 << 20)
    arrived = _round_trip([base, *(base[:, i] for i in range(200))])
    arrived[0][:] = 0
    assert [float(column[1]) for column in arrived[1:]] == [200.0 + i for i in range(200)]


def _round_trip(thing: object) -> Any:
    fd = payload.open_block("test")
    try:
        return payload.unpack(fd, payload.pack(thing, fd).nbytes).value
    finally:
        os.close(fd)


def test_tied_weights_stay_tied_and_come_back_tied(cell: Cells) -> None:
    names = cell("""
        import torch
        class Tied(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = torch.nn.Embedding(50, 8)
                self.head = torch.nn.Linear(8, 50, bias=False)
                self.head.weight = self.embed.weight
        def train(model):
            tied = model.head.weight is model.embed.weight
            with torch.no_grad():
                model.embed.weight.fill_(3)
            return tied, model
    """)
    model = names.Tied()
    for tied, back in run(names.train, model).values:
        assert tied
        assert back.head.weight is back.embed.weight
        assert bool((back.head.weight == 3).all())
    assert not bool((model.embed.weight == 3).any())


@pytest.mark.parametrize("side", [8, 1200], ids=["small", "mapped"])
def test_arrays_in_any_memory_order_arrive_equal(cell: Cells, side: int) -> None:
    base = np.arange(side * side, dtype=np.int64).reshape(side, side)
    records = np.zeros(side, dtype=[("a", "i4"), ("b", "f8")])
    records["b"] = 1.5
    frozen = np.ones(side * side)
    frozen.flags.writeable = False
    arrays = {
        "plain": base, "fortran": np.asfortranarray(base), "transposed": base.T, "strided": base[::2, ::3],
        "reversed": base[::-1], "broadcast": np.broadcast_to(np.arange(side), (side, side)), "empty": base[:0],
        "records": records, "objects": np.array([{"a": 1}, None], dtype=object), "frozen": frozen,
        "big_endian": base.astype(">i4"), "dates": np.array(["2024-01-01", "2025-02-03"], dtype="datetime64[D]"),
        "text": np.array(["a", "bc"]), "scalar": np.float32(2.5), "zero_d": np.array(7),
    }  # fmt: skip
    names = cell("def train(arrays): return arrays, arrays['frozen'].flags.writeable, arrays['plain'].flags.writeable")
    for back, frozen_writeable, plain_writeable in run(names.train, arrays).values:
        assert set(back) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(back[name], array, err_msg=name)
            assert np.asarray(back[name]).dtype == np.asarray(array).dtype, name
        assert (frozen_writeable, plain_writeable) == (False, True)


def test_writing_to_data_in_a_rank_changes_it_nowhere_else(cell: Cells) -> None:
    """Copy-on-write must be private: one shared page would be a data race in every training."""
    names = cell("""
        import torch.distributed as dist
        def train(tensor, array):
            rank = dist.get_rank()
            tensor.fill_(rank + 1)
            array[:] = rank + 1
            dist.barrier()
            return tensor.unique().tolist(), sorted(set(array.tolist()))
    """)
    tensor, array = torch.zeros(1 << 19), np.zeros(1 << 19)
    assert run(names.train, tensor, array, nprocs=3).values == [([float(r)], [float(r)]) for r in (1, 2, 3)]
    assert not bool(tensor.any())
    assert not array.any()


def test_only_the_slice_of_a_huge_tensor_is_sent(cell: Cells) -> None:
    """1 GiB of storage, 4 kB of it in sight: nothing like 1 GiB is to be written."""
    huge = torch.empty(1 << 28)
    part = huge[1000:2000]
    part.fill_(2)
    names = cell("def train(part): return float(part.sum()), part.untyped_storage().nbytes()")
    values = run(names.train, part).values
    assert values == [(2000.0, huge.untyped_storage().nbytes())] * 2
    with open("/proc/self/status") as file:
        high_water = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    assert high_water < 4 << 20  # kB


def test_share_memory_tensors_are_shared_by_ranks_and_notebook(cell: Cells) -> None:
    """``share_memory_()`` is the user's word that ranks write to one tensor (Hogwild)."""
    names = cell("""
        import torch.distributed as dist
        def train(shared):
            shared[dist.get_rank()] = dist.get_rank() + 1
    """)
    shared = torch.zeros(4).share_memory_()
    run(names.train, shared)
    assert shared.tolist() == [1.0, 2.0, 0.0, 0.0]


@pytest.fixture
def passing() -> Iterator[None]:
    """Tensors pass between processes: what multiprocessing starts and fixes for that in this one ends afterwards."""
    before, handler = multiprocessing.get_start_method(allow_none=True), signal.getsignal(signal.SIGCHLD)
    yield
    multiprocessing.resource_sharer.stop()
    multiprocessing.set_start_method(before, force=True)
    signal.signal(signal.SIGCHLD, handler)  # torch's first DataLoader with workers sets one, for good


_DIVIDE = """
    import torch.distributed as dist
    def divide(x):
        x.div_(10)
        dist.barrier()
        return x.tolist()
    def give(x): return x
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_batch_from_a_dataloader_worker_is_copied_for_each_rank(
    cell: Cells, passing: None, start: str, persistent: bool
) -> None:
    """It lies in memory that the worker shared with this process, not this process with its ranks."""
    names = cell(_DIVIDE)
    dataset = torch.utils.data.TensorDataset(torch.full((10,), 1000.0))
    options = {"multiprocessing_context": start, "persistent_workers": persistent, "num_workers": 1}
    loader = torch.utils.data.DataLoader(dataset, 10, **options)
    (batch,) = next(iter(loader))
    assert batch.is_shared()
    for x in (batch, batch.share_memory_()):  # which does nothing here
        assert run(names.divide, x, nprocs=4).values == [[100.0] * 10] * 4
    assert batch.tolist() == [1000.0] * 10
    loader._iterator = None


def test_a_tensor_once_sent_to_another_process_is_copied_for_each_rank(cell: Cells, passing: None) -> None:
    """torch moves it to shared memory for that; nobody has asked that ranks share it."""
    names = cell(_DIVIDE)
    x = torch.full((10,), 1000.0)
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(x)
    assert x.is_shared()
    assert run(names.divide, x, nprocs=4).values == [[100.0] * 10] * 4
    assert x.tolist() == [1000.0] * 10
    queue.get()
    queue.close()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_share_memory_tensors_are_shared_by_every_run(strategy: str) -> None:
    """In a process of its own, with which torch's manager of shared files ends."""
    ended = script(
        """
        import sys, torch, nbddp
        import torch.distributed as dist
        def train(shared, part):
            part[dist.get_rank()] += dist.get_rank() + 1
        if __name__ == "__main__":
            torch.multiprocessing.set_sharing_strategy(sys.argv[1])
            shared = torch.zeros(4).share_memory_()
            for _ in range(3):
                nbddp.run(train, (shared, shared[1:]), nprocs=2, device="cpu", show=False)
            print(shared.tolist())
        """,
        strategy,
    )
    assert ended.stdout.strip() == "[0.0, 3.0, 6.0, 0.0]", ended.stderr


@pytest.mark.parametrize("shared", [True, False])
def test_a_tensor_mapped_from_a_file_arrives_as_a_copy(cell: Cells, tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(np.full(10, 1000.0, dtype="f4").tobytes())
    before = path.read_bytes()
    names = cell(
        _DIVIDE
        + f"""
    import torch
    known = torch.from_file({str(path)!r}, shared={shared}, size=10)
    def of_global(): return divide(known)
    def made(): return torch.from_file({str(path)!r}, shared={shared}, size=10)[2:]
    """
    )
    assert run(names.divide, names.known).values == [[100.0] * 10] * 2
    assert run(names.of_global).values == [[100.0] * 10] * 2
    assert [x.tolist() for x in run(names.made).values] == [[1000.0] * 8] * 2
    assert run(names.give, names.known).value.tolist() == [1000.0] * 10
    assert path.read_bytes() == before


def test_only_share_memory_tensors_are_refused_where_sharing_is_impossible(tmp_path: Path, passing: None) -> None:
    """On its way to another host, say."""
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(40))
    sent = torch.zeros(3)
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(sent)
    payload.probe([sent, torch.from_file(str(path), shared=True, size=10)], inheriting=False)
    with pytest.raises(TypeError, match=r"share_memory_\(\)\) reaches only"):
        payload.probe(torch.zeros(3).share_memory_(), inheriting=False)
    queue.get()
    queue.close()


def test_pandas_frames_generators_and_datasets_arrive(cell: Cells) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": range(1000), "name": [f"n{i}" for i in range(1000)]})
    generator = torch.Generator().manual_seed(7)
    names = cell("""
        import torch
        def train(frame, generator, dataset):
            frame["x"] += 1
            return int(frame.x.sum()), list(frame.name[:2]), torch.rand(1, generator=generator).item(), dataset[3][1]
    """)
    dataset = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10) * 2)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(7)).item()
    values = run(names.train, frame, generator, dataset).values
    assert [value[:3] for value in values] == [(sum(range(1000)) + 1000, ["n0", "n1"], expected)] * 2
    assert values[0][3].item() == 6
    assert frame.x[0] == 0


# ---------------------------------------------------------------------------- what cannot travel


def _refused(names_train: object, *args: object, **kwargs: object) -> nbddp.PayloadError:
    before = marked_pids()
    with pytest.raises(nbddp.PayloadError) as caught:
        nbddp.run(names_train, args, kwargs, nprocs=2, device="cpu", show=False)  # type: ignore[arg-type]
    assert marked_pids() == before  # refused before any process starts
    return caught.value


def test_an_open_file_is_named_with_the_path_to_it(cell: Cells, tmp_path: Path) -> None:
    names = cell(f"""
        log_file = open({str(tmp_path / "log.txt")!r}, "w")
        def helper(): log_file.write("x")
        def train(): helper()
    """)
    with names.log_file:
        error = _refused(names.train)
    assert error.path == ("train", "helper", "log_file")
    assert "train → helper → log_file" in str(error)
    assert "log.txt" in str(error)


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("import threading\nlock = threading.Lock()", ("train", "culprit")),
        ("lock = (i for i in range(3))", ("train", "culprit")),
        ("import socket\nlock = socket.socket()", ("train", "culprit")),
        ("import torch\nlock = torch.Event('cpu') if hasattr(torch, 'Event') else iter(())", ("train", "culprit")),
    ],
    ids=["lock", "generator", "socket", "event"],
)
def test_unpicklable_globals_are_named(cell: Cells, source: str, path: tuple[str, ...]) -> None:
    names = cell(source + "\nculprit = lock\ndef train(): return culprit")
    try:
        error = _refused(names.train)
    finally:
        if hasattr(names.lock, "close"):
            names.lock.close()
    assert error.path == path
    assert " → ".join(path) in str(error)


def test_the_path_to_an_unpicklable_object_leads_through_every_container(cell: Cells) -> None:
    names = cell("""
        import threading, functools
        class Logger:
            def __init__(self): self.lock = threading.Lock()
        class Trainer:
            def __init__(self): self.parts = {"log": [Logger()]}
            def fit(self): pass
        trainer = Trainer()
        def train(): return trainer
        def outer():
            hidden = threading.Lock()
            def inner(): return hidden
            return inner
        inner = outer()
        def with_default(x=threading.Lock()): pass
        def plain(*args, **kwargs): pass
    """)
    assert _refused(names.train).path == ("train", "trainer", ".parts", "['log']", "[0]", ".lock")
    assert _refused(names.trainer.fit).path[-2:] == ("[0]", ".lock")
    assert _refused(names.inner).path == ("inner", "hidden")
    assert _refused(names.with_default).path[0] == "with_default"
    lock = threading.Lock()
    assert _refused(names.plain, 1, lock).path == ("args[1]",)
    assert _refused(names.plain, extra={"a": lock}).path == ("extra", "['a']")
    assert _refused(names.functools.partial(names.plain, key=lock)).path[-1] == "key"


def test_a_widget_and_the_shell_are_refused_by_name(cell: Cells) -> None:
    pytest.importorskip("ipywidgets")
    names = cell("""
        import ipywidgets
        from IPython.core.interactiveshell import InteractiveShell
        bar = ipywidgets.IntProgress()
        shell = InteractiveShell.__new__(InteractiveShell)
        def train(): bar.value += 1
        def other(): return shell
    """)
    error = _refused(names.train)
    assert error.path == ("train", "bar")
    assert "front end" in str(error)
    error = _refused(names.other)
    assert error.path == ("other", "shell")
    assert "notebook itself" in str(error)


def test_a_reduce_that_raises_is_reported_not_hung(cell: Cells) -> None:
    names = cell("""
        class Odd:
            def __reduce__(self): raise ZeroDivisionError("in reduce")
        odd = Odd()
        def train(): return odd
    """)
    error = _refused(names.train)
    assert error.path == ("train", "odd")
    assert "in reduce" in str(error)


def test_a_run_after_a_refused_one_works(cell: Cells) -> None:
    names = cell("import threading\nlock = threading.Lock()\ndef bad(): return lock\ndef good(): return 3")
    _refused(names.bad)
    assert run(names.good).values == [3, 3]


# ---------------------------------------------------------------------------- with a GPU


@pytest.mark.gpu
def test_a_run_works_after_the_notebook_used_cuda(cell: Cells) -> None:
    """Cannot re-initialize CUDA in forked subprocess: the most reported failure of all launchers."""
    torch.zeros(1).cuda()
    names = cell("""
        import torch, nbddp
        def train(tensor):
            return str(tensor.device), float(tensor.sum()), str(nbddp.device()), torch.cuda.current_device()
    """)
    tensor = torch.ones(1000, device="cuda")
    assert nbddp.run(names.train, (tensor,), nprocs=1, show=False).value == ("cuda:0", 1000.0, "cuda:0", 0)
    assert run(names.train, tensor, nprocs=2).value[:3] == ("cpu", 1000.0, "cpu")


@pytest.mark.gpu
def test_a_cuda_stream_is_refused(cell: Cells) -> None:
    names = cell("import torch\nstream = torch.cuda.Stream()\ndef train(): return stream")
    assert _refused(names.train).path == ("train", "stream")
