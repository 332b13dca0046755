"""``rank log progress wrap all_reduce ...``: on every rank, and in the notebook as rank 0 of 1."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nbddp
from tests.support import Cells, run


def test_rank_world_size_and_device_are_right_on_every_rank(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            nbddp.print("only rank 0 says", nbddp.rank())
            return (nbddp.rank(), nbddp.local_rank(), nbddp.world_size(), nbddp.is_primary(), str(nbddp.device()),
                    nbddp.restart_count())
    """)
    done = run(names.train, nprocs=3)
    assert done.values == [(i, i, 3, i == 0, "cpu", 0) for i in range(3)]
    assert [done.logs(i) for i in range(3)] == ["only rank 0 says 0\n", "", ""]


def test_a_function_runs_in_the_notebook_as_rank_0_of_1(cell: Cells, capsys: Any, in_folder: Path) -> None:
    """Rank 0 of 1: called directly, a debugger steps through it."""
    names = cell("""
        import nbddp, torch
        def train():
            model = nbddp.wrap(torch.nn.Linear(2, 1))
            data = torch.utils.data.TensorDataset(torch.arange(10.0))
            loader = nbddp.loader(data, batch_size=4, shuffle=True)
            seen = sum(float(x.sum()) for epoch in nbddp.progress(range(2)) for (x,) in loader)
            nbddp.log(loss=1.0, reduce="mean")
            nbddp.log({"val/acc": torch.tensor(0.5)}, step=3)
            nbddp.barrier()
            nbddp.print("hello")
            nbddp.save_snapshot("s.pt", model=model, epoch=1)
            state = nbddp.load_snapshot("s.pt")
            return (nbddp.rank(), nbddp.world_size(), nbddp.is_primary(), nbddp.all_reduce(3, "sum"),
                    nbddp.all_reduce(3), nbddp.all_gather(5), seen, type(model).__name__,
                    state["epoch"], nbddp.restart_count())
    """)
    assert names.train() == (0, 1, True, 3, 3.0, [5], 90.0, "Linear", 1, 0)
    assert "hello" in capsys.readouterr().out
    assert nbddp.load_snapshot("missing.pt") is None


def test_wrap_keeps_the_weights_of_all_ranks_equal(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def train():
            model = nbddp.wrap(torch.nn.Linear(3, 1), find_unused_parameters=False)
            frozen = nbddp.wrap(torch.nn.Linear(1, 1).requires_grad_(False))
            before = model.module.weight.detach().clone()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(nbddp.rank()))
                optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
            return type(model).__name__, type(frozen).__name__, before, model.module.weight.detach()
    """)
    first, second = run(names.train).values
    assert first[:2] == ("DistributedDataParallel", "Linear")
    assert torch.equal(first[3], second[3])
    assert not torch.equal(first[2], first[3])


@pytest.mark.parametrize("size", [24, 25])
@pytest.mark.parametrize("shuffle", [False, True])
def test_loader_shards_cover_the_data_and_reshuffle_every_epoch(cell: Cells, size: int, shuffle: bool) -> None:
    names = cell("""
        import nbddp, torch
        def train(size, shuffle):
            loader = nbddp.loader(torch.arange(size), batch_size=4, shuffle=shuffle)
            return [torch.cat(list(loader)).tolist() for _ in range(3)], len(loader), loader.batch_size
    """)
    values = run(names.train, size, shuffle, nprocs=3, seed=5).values
    share = math.ceil(size / 3)
    for epoch in range(3):
        shards = [value[0][epoch] for value in values]
        assert [len(shard) for shard in shards] == [share] * 3
        assert set().union(*shards) == set(range(size))
    first, second, third = values[0][0]
    assert (first != second and second != third) == shuffle
    assert {value[1:] for value in values} == {(math.ceil(share / 4), 4)}


def test_the_last_uneven_batch_does_not_hang(cell: Cells) -> None:
    """One rank with a batch more waits forever in its all-reduce."""
    names = cell("""
        import nbddp, torch
        def train():
            model = nbddp.wrap(torch.nn.Linear(1, 1))
            steps = 0
            for batch in nbddp.loader(torch.arange(11.0), batch_size=2):
                model(batch[:, None]).sum().backward()
                steps += 1
            return steps
    """)
    assert run(names.train, nprocs=3, timeout=60).values == [2, 2, 2]


def test_the_history_has_logged_values_in_order(cell: Cells) -> None:
    names = cell("""
        import nbddp, numpy, torch
        def train():
            for i in range(5):
                nbddp.log(loss=1 / (i + 1), lr=i)
                if i % 2 == 1:
                    nbddp.log({"val/acc": torch.tensor([0.1 * i])})
            nbddp.log(numpy=numpy.float32(1.5), tensor=torch.tensor(2.5, requires_grad=True), flag=True)
    """)
    history = run(names.train).history
    assert list(history) == ["loss", "lr", "val/acc", "numpy", "tensor", "flag"]
    steps, values = history["loss"]
    assert steps.tolist() == [0, 1, 2, 3, 4]
    assert values.tolist() == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert history["val/acc"].steps.tolist() == [1, 3]  # at the step of the loss before it
    np.testing.assert_allclose(history["val/acc"].values, [0.1, 0.3], rtol=1e-6)
    assert [history[name].values.tolist() for name in ("numpy", "tensor", "flag")] == [[1.5], [2.5], [1.0]]


def test_log_refuses_non_numbers_alike_in_a_rank_and_in_the_notebook(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def train():
            said = []
            for bad in ("0.5", [1, 2], None, torch.ones(2), object()):
                try:
                    nbddp.log(acc=0.5, loss=bad)
                except TypeError as error:
                    said.append(str(error))
            try:
                nbddp.log(loss=1, reduce="median")
            except ValueError as error:
                said.append(str(error))
            return said
    """)
    here = names.train()
    assert [text.partition("=")[0] for text in here[:5]] == ["log(loss"] * 5
    assert here[5] == "reduce must be None, 'mean', 'sum', 'min' or 'max', not 'median'"
    done = run(names.train)
    assert done.values == [here, here]
    assert list(done.history) == []


def test_log_uses_explicit_steps(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for step in (10, 20, 30):
                nbddp.log(loss=step, step=step)
            nbddp.log(after=1)
    """)
    history = run(names.train).history
    assert history["loss"].steps.tolist() == [10, 20, 30]
    assert history["after"].steps.tolist() == [30]


def test_log_with_reduce_is_weighted_and_needs_no_collective(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch.distributed as dist
        def train():
            assert not dist.is_initialized()
            r = nbddp.rank()
            for step in range(3):
                nbddp.log(mean=r + step, reduce="mean", weight=r + 1)
                nbddp.log(sum=r, reduce="sum", step=step)
                nbddp.log(low=r, reduce="min", step=step)
                nbddp.log(high=r, reduce="max", step=step)
                nbddp.log(own=r, step=step)
    """)
    history = run(names.train, nprocs=3, init_process_group=False).history
    expected = [(0 * 1 + 1 * 2 + 2 * 3) / 6 + step for step in range(3)]
    np.testing.assert_allclose(history["mean"].values, expected, rtol=1e-12)
    assert history["sum"].values.tolist() == [3.0] * 3
    assert history["low"].values.tolist() == [0.0] * 3
    assert history["high"].values.tolist() == [2.0] * 3
    assert history["own"].values.tolist() == [0.0] * 3
    assert {rank: s.values.tolist() for rank, s in history.by_rank("own").items()} == {
        i: [float(i)] * 3 for i in range(3)
    }


@pytest.mark.parametrize("how", ["kill", "exit", "raise"])
def test_nothing_logged_is_lost_when_a_rank_dies(cell: Cells, how: str) -> None:
    names = cell("""
        import os, signal, time, nbddp
        def train(how):
            if nbddp.rank() == 1:
                time.sleep(1000)
            for i in range(5000):
                nbddp.log(loss=float(i))
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "exit":
                os._exit(1)
            raise ValueError
    """)
    with pytest.raises((nbddp.RankDied, nbddp.RankError)):
        run(names.train, how)
    last = nbddp.last_run()
    assert last is not None
    assert last.history["loss"].values.tolist() == [float(i) for i in range(5000)]


def test_progress_reaches_the_notebook(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for epoch in nbddp.progress(range(3), desc="epoch"):
                for step in nbddp.progress((i for i in range(4)), total=4, desc="step"):
                    pass
            return list(nbddp.progress([1, 2, 3]))
    """)
    done = run(names.train)
    assert done.value == [1, 2, 3]
    bar = done.history.ranks[0].bars[0]
    assert (bar.desc, bar.total, bar.done) == ("", 3, 3)


def test_main_first_lets_local_rank_0_finish_before_the_others_begin(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import nbddp, os, time
        def train(folder):
            with nbddp.main_first():
                existed = os.path.exists(f"{folder}/data")
                if not existed:
                    time.sleep(0.3)
                    open(f"{folder}/data", "x").close()
            return existed
    """)
    assert run(names.train, str(tmp_path), nprocs=3).values == [False, True, True]
