"""The notebook's code and data reach every rank whole, shared and isolated; what cannot be sent is refused by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import nbddp
from nbddp.payload import mapped
from tests.support import Cells, marked_pids, run


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
    """A fork server that imported the old text would run it forever."""
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


def _refused(names_train: object, *args: object, **kwargs: object) -> nbddp.PayloadError:
    before = marked_pids()
    with pytest.raises(nbddp.PayloadError) as caught:
        nbddp.run(names_train, args, kwargs, nprocs=2, device="cpu", show=False)  # type: ignore[arg-type]
    assert marked_pids() == before  # refused before any process starts
    return caught.value


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


def test_a_class_whose_slots_are_one_word_has_one_slot(cell: Cells) -> None:
    names = cell("""
        class Point:
            __slots__ = "name"
        def train(point):
            point.name += "!"
            return point
    """)
    point = names.Point()
    point.name = "p"
    (back, _) = run(names.train, point).values
    assert (type(back), back.name, hasattr(back, "__dict__")) == (names.Point, "p!", False)


def test_an_open_file_is_named_with_the_path_to_it(cell: Cells, tmp_path: Path) -> None:
    """Also one that's open for reading, of which cloudpickle would send the contents."""
    for mode in ("w", "r", "rb"):
        names = cell(f"""
            log_file = open({str(tmp_path / "log.txt")!r}, {mode!r})
            def helper(): log_file.write("x")
            def train(): helper()
        """)
        with names.log_file:
            error = _refused(names.train)
        assert error.path == ("train", "helper", "log_file")
        assert "train → helper → log_file: an open file (" in str(error)
        assert "log.txt') stays where it was opened; send its path" in str(error)


PREPARED = "in the notebook, which knows one process; pass what was given to {}(), and call it inside the function"
ACCELERATED, SET_UP = "comes from accelerator.prepare() ", "comes from fabric.setup() "
MADE = "made in the notebook knows one process; make it inside the function"
LAUNCHERS = """
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    class Mine(Accelerator): ...
    model, loader = torch.nn.Linear(2, 1), torch.utils.data.DataLoader([torch.ones(2)] * 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    mine = Mine()
    def train(): return str(thing)
    things = [Accelerator(), mine, mine.state, PartialState(), GradientState()]
    things += mine.prepare(optimizer, loader, schedule)
"""
REFUSED = (
    f"an Accelerator {MADE}: accelerator = Accelerator()",
    f"a Mine {MADE}: accelerator = Accelerator()",
    f"an AcceleratorState {MADE}",
    f"a PartialState {MADE}",
    f"a GradientState {MADE}",
    f"an AcceleratedOptimizer {ACCELERATED}{PREPARED.format('prepare')}",
    f"a DataLoaderShard {ACCELERATED}{PREPARED.format('prepare')}",
    f"an AcceleratedScheduler {ACCELERATED}{PREPARED.format('prepare')}",
)
OF_OTHERS = """
    import torch, pytorch_lightning
    from lightning_fabric import Fabric
    from transformers import Trainer, TrainingArguments
    model, fabric = torch.nn.Linear(2, 1), Fabric(accelerator="cpu")
    def train(): return str(thing)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    things = [fabric, *fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))]
    things += [fabric.setup_dataloaders(torch.utils.data.DataLoader([1, 2]))]
    things += [pytorch_lightning.Trainer(accelerator="cpu", **quiet)]
    things += [Trainer(model, TrainingArguments("out", use_cpu=True, report_to=[]))]
"""
REFUSED_OF_OTHERS = (
    f"a Fabric {MADE}: fabric = Fabric()",
    *(f"a {kind} {SET_UP}{PREPARED.format('setup')}" for kind in ("_FabricModule", "FabricSGD", "_FabricDataLoader")),
    *[f"a Trainer {MADE}: trainer = Trainer(...)"] * 2,
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("source", "texts"),
    [(LAUNCHERS, REFUSED), pytest.param(OF_OTHERS, REFUSED_OF_OTHERS, marks=pytest.mark.long)],
    ids=["accelerate", "others"],
)
def test_a_launchers_object_is_refused_by_name_with_a_remedy(
    cell: Cells, in_folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, texts: tuple[str, ...]
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # these libraries set variables
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    names = cell(source)
    for thing, text in zip(names.things, texts, strict=True):
        cell.main.__dict__["thing"] = thing
        assert str(_refused(names.train)) == f"train cannot be sent to the ranks: train → thing: {text}"


def test_a_class_arrives_without_its_bases_hook_being_called_again(cell: Cells) -> None:
    """cloudpickle makes a class without keywords and body, which ``__init_subclass__`` would miss."""
    names = cell("""
        import enum, typing, nbddp
        models = {}
        class Registered(typing.Generic[typing.TypeVar("T")]):
            def __init_subclass__(cls, *, key, **options):
                super().__init_subclass__(**options)
                if key in models:
                    raise KeyError(f"{key} is there already")
                models[key] = cls
                cls.key, cls.width = key, cls.layers[0]
        class Small(Registered[int], key="small"):
            layers = (8, 4)
        class Smaller(Small, key="smaller"): ...
        class Kind(enum.Enum):
            def __init_subclass__(cls): cls.made = True
        class Mode(Kind):
            TRAIN = 1
        def train(kind):
            class Large(Registered[int], key="large"):
                layers = (64,)
            try:
                class Again(Large, key="large"): ...
            except KeyError as error:
                refused = str(error)
            large = Large()
            return kind.width, sorted(models), Smaller().key, Mode.TRAIN, refused, large
    """)
    width, keys, key, mode, refused, large = run(names.train, names.Small, nprocs=1).value
    assert (width, keys, key, mode) == (8, ["large", "small", "smaller"], "smaller", names.Mode.TRAIN)
    assert refused == "'large is there already'"
    assert (large.width, type(large).__mro__[1]) == (64, names.Registered)
    assert list(names.models) == ["small", "smaller"]  # the notebook's own
    with pytest.raises(KeyError):
        cell("class Other(Registered[int], key='small'): layers = (1,)")  # the hook is back


def test_a_name_that_only_a_pickle_or_a_string_has_is_found_among_the_cells(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import pickle, sys, threading, torch
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
        def build(kind): return globals()[kind](5), "locked" in globals()
        def miss():
            try: return sys.modules["__main__"].locked
            except AttributeError as error: return str(error)
        torch.save(Net(2, 1), "net.pt")
    """)
    for net, is_base, shape, six in run(names.load, names.Base).values:
        assert (type(net), is_base, shape, six) == (names.Net, True, (1, 1), 6)
    assert run(names.count, nprocs=1).value == (5, 5)
    assert run(names.build, "tripled", nprocs=1).value == (15, False)
    assert run(names.miss, nprocs=1).value == "module '__main__' has no attribute 'locked'"


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


def test_a_mapped_file_may_be_larger_than_the_memory_and_must_be_the_one_that_was_sent(
    cell: Cells, in_folder: Path
) -> None:
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
    with pytest.raises(RuntimeError, match=r"small\.bin was replaced or cut off after it was sent"):
        mapped.view(("small.bin", 0, 1), 8, {})
    del names
    cell.main.__dict__.clear()


def test_exit_in_a_function_ends_its_rank_and_not_the_notebook(cell: Cells) -> None:
    from IPython.core.autocall import ExitAutocall

    cell.main.__dict__["exit"] = ExitAutocall()  # as in a kernel
    names = cell("""
        import nbddp
        def train(code):
            if code is not None:
                exit(code)
            return nbddp.rank()
    """)
    assert run(names.train, None).values == [0, 1]
    assert run(names.train, 0).values == [None, None]
    with pytest.raises(nbddp.RankDied, match=r"called sys.exit\(3\)"):
        run(names.train, 3)


def test_what_belongs_to_one_process_is_refused_with_what_to_write_instead(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import ctypes, mmap, multiprocessing.sharedctypes, sys, torch, types
        from safetensors import safe_open
        from safetensors.torch import save_file
        save_file({"w": torch.ones(2)}, "w.safetensors")
        sys.modules["lmdb"] = types.ModuleType("lmdb")  # it isn't installed here
        class Environment: ...
        sys.modules["lmdb"].Environment = Environment
        @torch.library.custom_op("mine::double", mutates_args=())
        def double(x: torch.Tensor) -> torch.Tensor: return 2 * x
        ddp = object.__new__(torch.nn.parallel.DistributedDataParallel)
        fork = multiprocessing.get_context("fork")
        make = multiprocessing.sharedctypes.synchronized  # as Value and Array do
        things = [make(ctypes.c_int(), fork.Lock(), fork), make((ctypes.c_double * 3)(), fork.Lock(), fork)]
        things += [fork.Lock(), fork.Event(), mmap.mmap(-1, 8), Environment(), safe_open("w.safetensors", "pt")]
        things += [ddp, double]
        def train(): return thing
    """)
    texts = (
        "a Synchronized is shared only with processes that multiprocessing starts; return",
        "a SynchronizedArray is shared only with processes that multiprocessing starts; return",
        "a Lock works only in processes that multiprocessing starts; return values",
        "an Event works only in processes that multiprocessing starts; return values",
        "a mmap is a mapping of this process; send the file's path",
        "an Environment is open in this process; send the file's path, and open it inside the function: lmdb.open(",
        "a safe_open is open in this process; send the file's path, and open it inside the function: safe_open(",
        "a DistributedDataParallel model belongs to this process's group; send model.module, and wrap it",
        "a CustomOpDef is known to one process; define it in a module, and import it from there inside the function",
    )
    for thing, text in zip(names.things, texts, strict=True):
        cell.main.__dict__["thing"] = thing
        assert str(_refused(names.train)).startswith(f"train cannot be sent to the ranks: train → thing: {text}")
    del sys.modules["lmdb"], thing, names
    cell.main.__dict__.clear()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_arrives_as_its_original_and_its_settings(
    cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which torch sets
    names = cell("""
        import torch
        from nbddp.payload.pickler import _compiler_of
        scale = 3
        @torch.compile(backend="eager", fullgraph=True)
        def tripled(x, n=2): return scale * x if n == 0 else again(x, n - 1)
        def again(x, n): return tripled(x, n)
        relu = torch.compile(torch.nn.functional.relu, backend="eager", dynamic=True)
        def train():
            compilers = [_compiler_of(tripled), _compiler_of(relu)]
            settings = [(each.fullgraph, each._dynamic) for each in compilers]
            return tripled(torch.ones(2)).tolist(), relu(torch.tensor([-1.0, 2.0])).tolist(), settings, tripled.__name__
    """)
    expected = [3.0, 3.0], [0.0, 2.0], [(True, None), (False, True)], "tripled"
    assert run(names.train, nprocs=1).value == expected


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_lightning_data_module_arrives_without_its_trainer_and_trains_with_ddp(
    cell: Cells, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # these libraries set variables
    names = cell("""
        import pytorch_lightning as pl, torch
        class Data(pl.LightningDataModule):
            def train_dataloader(self): return torch.utils.data.DataLoader([torch.ones(2)] * 8, batch_size=2)
        class Model(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(2, 1)
            def training_step(self, batch, _): return self.linear(batch).sum()
            def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
        def trainer(**options):
            return pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                              enable_progress_bar=False, enable_model_summary=False, **options)
        data, model = Data(), Model()
        data.trainer = trainer(devices=1)  # as fit() does
        def train():
            before = data.trainer
            mine = trainer(devices=2, strategy="ddp")
            mine.fit(model, data)
            return before, mine.world_size, data.trainer is mine
    """)
    assert run(names.train).values == [(None, 2, True)] * 2
    assert names.data.trainer.world_size == 1
