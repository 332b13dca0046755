"""The notebook's code and data reach every rank whole, shared and isolated; what cannot be sent is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import nbddp
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
