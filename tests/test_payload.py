"""The notebook's code and data reach every rank whole, shared and isolated; what cannot be sent is refused by name."""

import os
import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import nbddp
from nbddp.payload import huge_pages, mapped
from tests.support import Cells, marked_pids, run


def test_everything_defined_in_cells_is_sent_by_value(cell: Cells) -> None:
    """PyTorch's oldest open complaint: Can't get attribute ... on __main__."""
    cell("""
        import dataclasses, enum, functools, io, sys, typing
        scale = 10
        out, text = sys.stdout, io.StringIO("abc")
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
            @functools.cached_property
            def third(self): return self.x * 3
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
        class OneSlot: __slots__ = "name"
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
        slot = OneSlot()
        slot.name = "s"
        def train(mode, config=config):
            child = Child.build(4)
            slot.name += "!"
            return slot, dict(
                child=child.value(), made=Child.made, twice=Child.twice(5), half=child.half, third=child.third,
                lr=config.lr, equal=config == Config(0.5), mode=mode is Mode.TRAIN, name=Mode(mode.value).name,
                point=Point(1).y, even=even(10), odd=odd(10), factorial=factorial(5), count=step(),
                cached=cached(1), square=square(3), partial=functools.partial(max, 3)(9), module=Child.__module__,
                out=out is sys.stdout, text=text.read(),
            )
    """)
    expected = {
        "child": 40, "made": 1, "twice": 10, "half": 2.0, "lr": 0.5, "equal": True, "mode": True, "name": "TRAIN",
        "point": 7, "even": True, "odd": False, "factorial": 120, "count": 2, "cached": 11, "square": 9, "partial": 9,
        "module": "__main__", "out": True, "text": "abc", "third": 12,
    }  # fmt: skip
    for slot, value in run(names.train, names.Mode.TRAIN).values:
        assert value == expected
        assert (type(slot), slot.name, hasattr(slot, "__dict__")) == (names.OneSlot, "s!", False)
    assert (names.Child.made, names.step()) == (0, 2)  # the ranks' counting is not the notebook's


def test_an_edited_cell_or_module_runs_as_edited(cell: Cells, in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork server that imported the module's old text would run it forever."""
    monkeypatch.syspath_prepend(str(in_folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names = cell("""
        def train():
            import my_model
            return helper(), my_model.SIZE
    """)
    for size in (1, 22, 333):
        cell(f"def helper(): return 'helper {size}'")
        (in_folder / "my_model.py").write_text(f"SIZE = {size}\n")
        assert run(names.train).values == [(f"helper {size}", size)] * 2
    names = cell("def train(): return helper() + ' twice'")
    assert run(names.train).values == ["helper 333 twice"] * 2


def test_what_a_rank_sets_or_writes_changes_nowhere_else(cell: Cells) -> None:
    """Copy-on-write must be private: one shared page would be a data race in every training."""
    names = cell("""
        import torch.distributed as dist
        total = [0]
        best = 0.5
        def train(tensor, array):
            global best
            rank = dist.get_rank()
            best += rank
            total.append(rank)
            tensor.fill_(rank + 1)
            array[:] = rank + 1
            dist.barrier()
            import __main__
            mapped = "memfd:nbddp" in open("/proc/self/maps").read()  # and not copied
            return best, __main__.best, total, tensor.unique().tolist(), sorted(set(array.tolist())), mapped
    """)
    tensor, array = torch.zeros(1 << 19), np.zeros(1 << 19)
    expected = [(0.5 + rank, 0.5 + rank, [0, rank], [rank + 1.0], [rank + 1.0], True) for rank in range(3)]
    assert run(names.train, tensor, array, nprocs=3).values == expected
    assert (names.best, names.total, bool(tensor.any()), array.any()) == (0.5, [0], False, False)


def test_tied_weights_stay_tied_and_come_back_tied(cell: Cells) -> None:
    names = cell("""
        import torch
        class Tied(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50, bias=False)
                self.head.weight = self.embed.weight
        def train(model):
            tied = model.head.weight is model.embed.weight
            torch.nn.init.constant_(model.embed.weight, 3)
            return tied, model
    """)
    model = names.Tied()
    for tied, back in run(names.train, model).values:
        assert (tied, back.head.weight is back.embed.weight, back.head.weight.unique().tolist()) == (True, True, [3.0])
    assert not bool((model.embed.weight == 3).any())


def refused(cell: Cells, names: SimpleNamespace, path: str = "train → thing") -> list[str]:
    """What is said of each of the things after the path to it, before any process starts."""
    said = []
    for thing in names.things:
        cell.main.__dict__["thing"] = thing
        before = marked_pids()
        with pytest.raises(nbddp.PayloadError) as caught:
            run(names.train)
        assert marked_pids() == before
        assert " → ".join(caught.value.path) == path
        beginning, _, rest = str(caught.value).partition(f"train can't be sent to the ranks: {path}: ")
        assert beginning == ""
        said.append(rest)
    return said


def test_a_class_arrives_without_its_bases_hook_being_called_again(cell: Cells) -> None:
    """cloudpickle makes a class without keywords and body, which ``__init_subclass__`` would miss."""
    names = cell("""
        import enum, typing, nbddp
        models = {}
        class Registered(typing.Generic[typing.TypeVar("T")]):
            def __init_subclass__(cls, *, key, **options):
                super().__init_subclass__(**options)
                if key in models: raise KeyError(f"{key} is there already")
                models[key] = cls
                cls.key, cls.width = key, cls.layers[0]
        class Small(Registered[int], key="small"): layers = (8, 4)
        class Smaller(Small, key="smaller"): ...
        class Kind(enum.Enum):
            def __init_subclass__(cls): cls.made = True
        class Mode(Kind): TRAIN = 1
        def train(kind):
            class Large(Registered[int], key="large"): layers = (64,)
            try:
                class Again(Large, key="large"): ...
            except KeyError as error: refused = str(error)
            large = Large()
            return kind.width, sorted(models), Smaller().key, Mode.TRAIN, refused, large
    """)
    width, keys, key, mode, refused, large = run(names.train, names.Small, nprocs=1).value
    assert (width, keys, key, mode) == (8, ["large", "small", "smaller"], "smaller", names.Mode.TRAIN)
    assert (refused, large.width, type(large).__mro__[1]) == ("'large is there already'", 64, names.Registered)
    assert list(names.models) == ["small", "smaller"]  # the notebook's own
    with pytest.raises(KeyError):
        cell("class Other(Registered[int], key='small'): layers = (1,)")  # the hook is back


def test_generators_that_cells_have_imported_by_name_are_the_ranks_own_and_seeded(cell: Cells) -> None:
    names = cell("""
        import dataclasses, torch
        from numpy.random import rand
        from random import random as draw
        @dataclasses.dataclass
        class Args: lr: float
        generator = torch.default_generator
        def train():
            same = generator is torch.default_generator, dataclasses.fields(Args)[0].default is dataclasses.MISSING
            return draw(), rand(), same
    """)
    expected = [(random.Random(seed).random(), np.random.RandomState(seed).rand(), (True, True)) for seed in (5, 6)]
    assert run(names.train, seed=5).values == expected


def test_a_name_that_only_a_pickle_or_a_string_has_is_found_among_the_cells(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import os, pickle, sys, threading, torch
        scale, lock = 3, threading.Lock()
        class Base(torch.nn.Linear): ...
        class Net(Base):
            def forward(self, x): return scale * super().forward(x)
        class Other: ...
        def tripled(x): return scale * x
        def locked(): return lock
        def load(base):
            net = torch.load("net.pt", weights_only=False)
            return net, isinstance(net, base), net(torch.ones(1, 2)).shape, sys.modules["__main__"].tripled(2)
        step = 0
        def stepped(): return step
        def count():
            global step
            step = 5
            return getattr(sys.modules["__main__"], "step" + "ped")(), step
        def build(kind): return [(globals()[each](5), "locked" in globals()) for each in [kind]][0]
        def miss():
            try: return sys.modules["__main__"].locked
            except AttributeError as error: return str(error)
        def miss_in_a_child():
            if not (pid := os.fork()): os._exit(hasattr(sys.modules["__main__"], "tripled"))
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        torch.save(Net(2, 1), "net.pt")
    """)
    for net, is_base, shape, six in run(names.load, names.Base).values:
        assert (type(net), is_base, shape, six) == (names.Net, True, (1, 1), 6)
    assert run(names.count, nprocs=1).value == (5, 5)
    assert run(names.build, "tripled", nprocs=1).value == (15, False)
    assert run(names.miss, nprocs=1).value == "module '__main__' has no attribute 'locked'"
    assert run(names.miss_in_a_child, nprocs=1, timeout=20).value == 0


def test_a_mapped_file_is_mapped_by_the_ranks_and_not_copied(cell: Cells, in_folder: Path) -> None:
    np.arange(1 << 19, dtype=float).tofile("numbers.bin")  # 4 MiB
    torch.save({"weight": torch.ones(1 << 19)}, "weights.pt")
    names = cell("""
        import numpy, pathlib, torch
        rows = numpy.memmap("numbers.bin", dtype=float, mode="r+", offset=80, shape=(1 << 11, 1 << 7))
        frozen = numpy.memmap("numbers.bin", dtype=float, mode="r")
        shared = torch.from_file("numbers.bin", shared=True, size=1 << 18, dtype=torch.float64)
        weight = torch.load("weights.pt", mmap=True)["weight"]
        changed = torch.load("weights.pt", mmap=True)["weight"]
        changed[0] = 7
        odd = numpy.flip(rows[1::2, 5:])
        def train():
            maps = pathlib.Path("/proc/self/maps").read_text()
            views = [rows[1, 0], odd[-1, -1], odd.shape, odd.strides, frozen.flags.writeable, shared[3].item()]
            views += [weight.mean().item(), changed[:2].tolist(), "numbers.bin" in maps, "weights.pt" in maps]
            odd[-1, -1] = shared[3] = -1
            return views, odd[-1, -1], type(rows)
    """)
    expected = [138.0, 143.0, (1024, 123), (-2048, -8), False, 3.0, 1.0, [7.0, 1.0], True, True]
    assert run(names.train).values == [(expected, -1.0, np.ndarray)] * 2
    assert (names.rows[1, 5], names.shared[3]) == (143.0, 3.0)  # what a rank writes is its own
    with nbddp.payload.pack([names.rows, names.odd, names.shared, names.weight]).block as block:
        assert block.nbytes < 10_000
    del names
    cell.main.__dict__.clear()  # each memmap has a descriptor


def test_a_mapped_file_may_be_larger_than_the_memory_and_must_be_the_one_sent(cell: Cells, in_folder: Path) -> None:
    with open("sparse.bin", "wb") as file:
        file.truncate(1 << 38)
    np.ones(1 << 18).tofile("small.bin")
    names = cell("""
        import numpy
        sparse = numpy.memmap("sparse.bin", dtype="u1", mode="r")
        small = numpy.memmap("small.bin", mode="r")
        def last(): return sparse[-1].item(), len(sparse)
        def total(): return small.sum().item()
    """)
    assert run(names.last).values == [(0, 1 << 38)] * 2
    os.unlink("sparse.bin")
    np.zeros(1 << 18).tofile("other.bin")
    os.replace("other.bin", "small.bin")
    with nbddp.payload.pack(names.small).block as block:  # the array is no file's any more
        assert block.nbytes > 1 << 20
    with pytest.raises(RuntimeError, match=r"small\.bin was replaced or truncated after it was sent"):
        mapped.view(("small.bin", 0, 1), 8, {})
    del names
    cell.main.__dict__.clear()


def test_a_large_block_is_written_by_several_threads_which_an_interrupt_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {"tensor": torch.randint(256, (40 << 20,), dtype=torch.uint8), "array": np.arange(5 << 20), "few": [1.0] * 9}
    sent["array"].setflags(write=False)
    with nbddp.payload.pack(sent).block as block:
        assert block.nbytes > huge_pages.FROM_NBYTES
        got = nbddp.payload.unpack(block).value
    assert all(np.array_equal(got[name], sent[name]) for name in sent)
    assert not got["array"].flags.writeable

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        nbddp.payload.pack(sent)
    assert not [each for each in threading.enumerate() if each.name.startswith("nbddp-copy")]


def test_what_belongs_to_the_notebook_is_refused_with_the_path_to_it_and_what_to_write_instead(
    cell: Cells, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = cell("""
        import ctypes, ipywidgets, mmap, multiprocessing.sharedctypes, torch
        from IPython.core.interactiveshell import InteractiveShell
        from safetensors import safe_open
        from safetensors.torch import save_file
        save_file({"w": torch.ones(2)}, "w.safetensors")
        class Environment: ...
        class InMemoryStorage: ...
        class Accelerator: ...
        class Mine(Accelerator): ...
        @torch.library.custom_op("mine::double", mutates_args=())
        def double(x: torch.Tensor) -> torch.Tensor: return 2 * x
        ddp = object.__new__(torch.nn.parallel.DistributedDataParallel)
        fork = multiprocessing.get_context("fork")
        make = multiprocessing.sharedctypes.synchronized  # as Value and Array do
        things = [make(ctypes.c_int(), fork.Lock(), fork), make((ctypes.c_double * 3)(), fork.Lock(), fork)]
        things += [fork.Lock(), fork.Event(), mmap.mmap(-1, 8), Environment(), safe_open("w.safetensors", "pt")]
        things += [ddp, double, ipywidgets.IntProgress(), InteractiveShell.__new__(InteractiveShell)]
        things += [Accelerator(), Mine(), InMemoryStorage()]
        things += [open("log.txt", mode) for mode in ("w", "r", "rb")]  # the contents, too, stay here
        def helper(): return thing
        def train(): return helper()
    """)
    # lmdb and optuna aren't installed here, and accelerate takes long to import.
    optuna = ("optuna.storages", names.InMemoryStorage)
    for module, kind in (("lmdb", names.Environment), ("accelerate.accelerator", names.Accelerator), optuna):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{kind.__name__: kind}))
    one_process = "made in the notebook is tied to its process; create it inside the function: accelerator = Acc"
    texts = (
        "a Synchronized is shared only with processes that multiprocessing starts; return",
        "a SynchronizedArray is shared only with processes that multiprocessing starts; return",
        "a Lock works only in processes that multiprocessing starts; return values",
        "an Event works only in processes that multiprocessing starts; return values",
        "a mmap is a mapping of this process; send the file's path",
        "an Environment is open in this process; send the file's path, and open it inside the function: lmdb.open(",
        "a safe_open is open in this process; send the file's path, and open it inside the function: safe_open(",
        "a DistributedDataParallel model belongs to this process's group; send model.module, and wrap it",
        "a CustomOpDef exists only in this process; define it in a module, and import it from there inside",
        "an IntProgress lives in the notebook's front end; log() values and update it in the notebook",
        "an InteractiveShell is the notebook itself; leave it out",
        f"an Accelerator {one_process}",
        f"a Mine {one_process}",
        "an InMemoryStorage has its trials in the notebook's memory: call trial.suggest_...() in the notebook and send",
        *["an open file ('log.txt') belongs to this process; send its path, and open it in the function"] * 3,
    )
    for said, text in zip(refused(cell, names, "train → helper → thing"), texts, strict=True):
        assert said.startswith(text)
    for file in names.things[-3:]:
        file.close()
    del file, names
    cell.main.__dict__.clear()
