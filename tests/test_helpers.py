"""``rank log progress wrap all_reduce ...``: on every rank, and in the notebook as rank 0 of 1."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nbddp
from nbddp.helpers import collectives, context
from nbddp.messages import Place, Settings
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
            with nbddp.main_first(), nbddp.join(model), nbddp.accumulate(model, 1) as complete: nbddp.print("hello")
            nbddp.save_snapshot("s.pt", model=model, epoch=1)
            state = nbddp.load_snapshot("s.pt")
            return (nbddp.rank(), nbddp.world_size(), nbddp.is_primary(), nbddp.all_reduce(3, "sum"),
                    nbddp.all_reduce(3), nbddp.all_gather(5), nbddp.broadcast([7]), seen, type(model).__name__,
                    state["epoch"], nbddp.restart_count(), nbddp.local_rank(), str(nbddp.device()), complete)
    """)
    assert names.train() == (0, 1, True, 3, 3.0, [5], [7], 90.0, "Linear", 1, 0, 0, "cpu", True)
    assert "hello" in capsys.readouterr().out
    assert nbddp.load_snapshot("missing.pt") is None


def test_reduce_gather_and_barrier_give_the_right_values(cell: Cells) -> None:
    names = cell("""
        import nbddp, numpy, torch
        def train():
            r = nbddp.rank() + 1
            x = torch.tensor([float(r), 10.0 * r])
            rows = torch.arange(6.0).reshape(2, 3)
            quantized = torch.quantize_per_tensor(torch.arange(3.0) + r, 0.5, 1, torch.quint8)
            nbddp.barrier()
            return dict(
                mean=nbddp.all_reduce(r, "mean"), sum=nbddp.all_reduce(r), min=nbddp.all_reduce(float(r), "min"),
                max=nbddp.all_reduce(r, "max"), tensors=[nbddp.all_reduce(x, op).tolist() for op in ("mean", "sum")],
                kept=x.tolist(), gathered=nbddp.all_gather(r), big=nbddp.all_reduce(2**53 + r, "max"),
                sizes=[t.tolist() for t in nbddp.all_gather(torch.ones(r))],
                columns=nbddp.all_reduce(rows.t() if r == 1 else rows.t().contiguous()),
                bools=nbddp.all_reduce(torch.tensor([True, r > 1])), float8=nbddp.all_reduce(x.to(torch.float8_e5m2)),
                quantized=[x.dequantize().sum().item() for x in nbddp.all_gather(quantized)],
                objects=nbddp.all_gather({"r": [r] * r}), scalar=nbddp.all_gather(torch.tensor(r))[2].item(),
                any=nbddp.all_reduce(torch.tensor([False, r > 1]), "max"), numpy=nbddp.all_reduce(numpy.int64(2**62)),
                needs=nbddp.all_reduce(torch.ones(2, requires_grad=True)).requires_grad,
                kinds=[torch.tensor(x).tolist() for x in nbddp.all_gather([torch.ones(2), r][r > 1])],
                dtypes=[x.item() for x in nbddp.all_gather(torch.tensor(r).to([torch.int32, torch.float32][r % 2]))],
            )
    """)
    for rank, value in enumerate(run(names.train, nprocs=3).values):
        columns, bools, float8, any_ = (value.pop(name) for name in ("columns", "bools", "float8", "any"))
        assert columns.tolist() == [[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]]
        assert columns.stride() == ((1, 3) if rank == 0 else (2, 1))  # as x
        assert (bools.tolist(), bools.dtype) == ([3, 2], torch.int64)
        assert (any_.tolist(), any_.dtype) == ([False, True], torch.bool)
        assert (float8.tolist(), float8.dtype) == ([6.0, 64.0], torch.float8_e5m2)
        assert isinstance(value["sum"], int)
        assert value == {
            "mean": 2.0, "sum": 6, "min": 1.0, "max": 3, "tensors": [[2.0, 20.0], [6.0, 60.0]], "big": 2**53 + 3,
            "kept": [rank + 1.0, 10.0 * (rank + 1)], "gathered": [1, 2, 3], "scalar": 3, "quantized": [6.0, 9.0, 12.0],
            "sizes": [[1.0] * size for size in (1, 2, 3)], "objects": [{"r": [size] * size} for size in (1, 2, 3)],
            "numpy": 3 * 2**62, "needs": False, "kinds": [[1.0, 1.0], 2, 3], "dtypes": [1, 2, 3],
        }  # fmt: skip


def test_a_mean_of_large_values_is_finite_and_nan_on_any_rank_is_nan_on_all(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        most = torch.finfo(torch.float64).max
        def mean(size, value, dtype):
            return set(nbddp.all_reduce(torch.full((size,), value, dtype=dtype), "mean").tolist())
        def train():
            means = [nbddp.all_reduce(x, "mean") for x in (1e308, most, 2**1023, float("inf"))]
            for size in (1, 1000):
                means += [mean(size, 40000.0, torch.float16), mean(size, 2.0**127, torch.bfloat16),
                          mean(size, 2.0**127, torch.float32), mean(size, most, torch.float64)]
            nans = []
            for mine in (float("nan") if nbddp.rank() == who else float(nbddp.rank()) for who in range(3)):
                for op in ("min", "max", "sum", "mean"):
                    nans.append(nbddp.all_reduce(mine, op))
                    for dtype in (torch.float32, torch.float64, torch.bfloat16):
                        nans.append(nbddp.all_reduce(torch.tensor([mine, 1.0], dtype=dtype), op)[0].item())
            return means, nans, nbddp.all_reduce(torch.tensor([0.1, 1 / 3]), "mean")
    """)
    most = torch.finfo(torch.float64).max
    for means, nans, same in run(names.train, nprocs=3).values:
        assert means == [1e308, most, 2.0**1023, math.inf, *[{40000.0}, {2.0**127}, {2.0**127}, {most}] * 2]
        assert len(nans) == 48
        assert all(map(math.isnan, nans))
        assert torch.equal(same, torch.tensor([0.1, 1 / 3]))  # not divided before it's added


NO_PICKLE = "what rank 1 passed can't be pickled: TypeError: cannot pickle '_thread.lock' object"
# What rank 0 and rank 1 call, and what's in the error that both get.
MISMATCHES = {
    "ops": ("all_reduce(1)", "all_reduce(1, 'max')", "all_reduce(x, 'sum') on rank 0, all_reduce(x, 'max') on rank 1"),
    "calls": ("all_gather(1)", "all_reduce(1)", "all_gather(x) on rank 0, all_reduce(x, 'sum') on rank 1"),
    "sources": ("broadcast(1)", "broadcast(1, 1)", "broadcast(x, src=0) on rank 0, broadcast(x, src=1) on rank 1"),
    "one wrong op": ("all_reduce(1, 'median')", "all_reduce(1)", "all_reduce(x, 'median') on rank 0"),
    "wrong ops": ("all_reduce(1, 'median')", "all_reduce(1, 'median')", "op must be 'sum', 'mean', 'min', or"),
    "number and tensor": ("all_reduce(1)", "all_reduce(torch.ones(1))", "a int on rank 0, a torch.float32 tensor on"),
    "dtypes": ("all_reduce(torch.ones(2))", "all_reduce(torch.ones(2).int())", "a torch.int32 tensor on rank 1"),
    "shapes": ("all_reduce(torch.ones(2, 3))", "all_reduce(torch.ones(3, 2))", "of shape (3, 2) on rank 1"),
    "layouts": ("all_reduce(torch.eye(2).to_sparse())", "all_reduce(torch.eye(2))", "a torch.sparse_coo torch.float32"),
    "sparse": ("all_reduce(torch.eye(2).to_sparse())", "all_reduce(torch.eye(2).to_sparse())", "try x.to_dense()"),
    "text": ("all_reduce('2')", "all_reduce(2)", "takes a number or a tensor, not a str, a int"),
    "texts": ("all_reduce('2')", "all_reduce('2')", "takes a number or a tensor, not a str"),
    "integers": ("all_reduce(torch.ones(1).int(), 'mean')", "all_reduce(torch.ones(1).int(), 'mean')", "x.float()"),
    "too large": ("all_reduce(10**400)", "all_reduce(0.5)", "int too large to convert to float"),
    "no pickle to all": ("all_gather(1)", "all_gather(threading.Lock())", f"TypeError: all_gather(): {NO_PICKLE}"),
    "no pickle to add": ("all_reduce(1)", "all_reduce(threading.Lock())", f"TypeError: all_reduce(): {NO_PICKLE}"),
    "no pickle of src": ("broadcast(1, 1)", "broadcast(threading.Lock(), 1)", f"TypeError: broadcast(): {NO_PICKLE}"),
}


def test_different_calls_on_different_ranks_raise_an_error_that_names_them(cell: Cells) -> None:
    """The same on both ranks, which can go on after it."""
    names = cell("""
        import nbddp, threading, torch
        def train(calls):
            said, names = [], {"nbddp": nbddp, "threading": threading, "torch": torch}
            for pair in calls:
                try: said.append(eval("nbddp." + pair[nbddp.rank()], names))
                except Exception as error: said.append(f"{type(error).__name__}: {error}")
            return said, nbddp.all_gather(nbddp.rank())
    """)
    first, second = run(names.train, [calls for *calls, _ in MISMATCHES.values()], timeout=60).values
    assert first == second
    assert first[1] == [0, 1]
    for (*_, expected), said in zip(MISMATCHES.values(), first[0]):
        assert expected in said
    kinds = "Value " * 5 + "Type " * 2 + "Value " + "Type " * 4 + "Value Overflow " + "Type " * 3
    assert [said.partition("Error:")[0] for said in first[0]] == kinds.split()


def test_broadcast_gives_every_rank_the_source_ranks_value(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def train():
            r = nbddp.rank()
            large = torch.arange(1000.0).reshape(50, 20).t() * r
            cases = [nbddp.broadcast(r), nbddp.broadcast(r * 10, src=2)]
            cases.append(nbddp.broadcast(torch.full((2,), float(r)), src=1))
            cases.append(nbddp.broadcast(large if r == 1 else None, src=1))
            own, words = torch.ones(3), ["a"]
            cases.append(nbddp.broadcast(own).data_ptr() != own.data_ptr() and nbddp.broadcast(words) is not words)
            try: nbddp.broadcast(1, src=3)
            except ValueError as error: return cases, str(error)
    """)
    for (zero, twenty, ones, large, copied), refused in run(names.train, nprocs=3).values:
        assert (zero, twenty, ones.tolist(), copied) == (0, 20, [1.0, 1.0], True)
        assert torch.equal(large, torch.arange(1000.0).reshape(50, 20).t())
        assert refused == "src must be a rank, 0 to 2, not 3"


def test_gathered_tensors_are_detached_copies_and_a_loss_is_told_what_to_use(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch, warnings
        from torch.distributed.nn.functional import all_gather
        def train(size):
            x = torch.ones(size, requires_grad=True)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                gathered = nbddp.all_gather(x)
                with torch.no_grad(): nbddp.all_gather(x), nbddp.all_gather(x.detach())
                said = [str(each.message) for each in caught]
            for each in gathered: each += nbddp.rank() + 1
            if nbddp.world_size() > 1: torch.stack(all_gather(x)).sum().backward()
            return [each.requires_grad for each in gathered], [each.sum().item() for each in gathered], x, x.grad, said
    """)
    for ranks in (1, 2):
        for size in (4, 1000):
            values = run(names.train, size, nprocs=ranks).values if ranks > 1 else [names.train(size)]
            for rank, (needs, sums, x, grad, said) in enumerate(values):
                assert (needs, sums, x.sum().item()) == ([False] * ranks, [size * (rank + 2.0)] * ranks, size)
                assert len(said) == 1
                assert "no gradients" in said[0]
                assert "torch.distributed.nn.functional.all_gather()" in said[0]
                assert ranks == 1 or grad.tolist() == [2.0] * size  # of both ranks' losses


def test_wrap_keeps_the_weights_of_all_ranks_equal_and_the_last_uneven_batch_does_not_hang(cell: Cells) -> None:
    """One rank with a batch more would wait forever in its all-reduce."""
    names = cell("""
        import nbddp, torch
        def train():
            model = nbddp.wrap(torch.nn.Linear(1, 1), gradient_as_bucket_view=True)
            assert model.gradient_as_bucket_view
            frozen, linear = (each.requires_grad_(False) for each in (torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1)))
            for tensor in (frozen.running_mean, linear.weight): tensor.fill_(nbddp.rank() + 5)
            assert nbddp.wrap(frozen).running_mean.item() == nbddp.wrap(linear).weight.item() == 5, "rank 0's, too"
            before = model.module.weight.detach().clone()
            optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.01), 0
            for batch in nbddp.loader(torch.arange(11.0), batch_size=2):
                optimizer.zero_grad(); model(batch[:, None]).square().mean().backward(); optimizer.step()
                steps += 1
            assert nbddp.wrap(model) is model
            return type(model).__name__, type(frozen).__name__, steps, before, model.module.weight.detach()
    """)
    values = run(names.train, nprocs=3, timeout=60).values
    assert [value[:3] for value in values] == [("DistributedDataParallel", "BatchNorm1d", 2)] * 3
    assert all(torch.equal(value[4], values[0][4]) for value in values)
    assert not torch.equal(values[0][3], values[0][4])


def test_a_warning_of_ddps_constructor_names_the_users_file(cell: Cells) -> None:
    names = cell("""
        import torch, warnings
        def train():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), check_reduction=True)
            return [each.filename for each in caught if "check_reduction" in str(each.message)]
    """)
    assert run(names.train).values == [[names.train.__code__.co_filename]] * 2


def test_the_history_has_logged_values_in_order_at_their_steps_and_the_newest_progress(cell: Cells) -> None:
    names = cell("""
        import nbddp, numpy, torch
        def train():
            for i in nbddp.progress(range(5), desc="epoch"):
                for step in nbddp.progress((i for i in range(4)), total=4, desc="step"): pass
                nbddp.log(loss=1 / (i + 1), lr=i)
                if i % 2 == 1: nbddp.log({"val/acc": torch.tensor([0.1 * i])})
            nbddp.log(numpy=numpy.float32(1.5), tensor=torch.tensor(2.5, requires_grad=True), flag=True)
            for step in (10, 20, 30): nbddp.log({"own": step}, twice=2 * step, step=step)
            nbddp.log(after=1)
            return list(nbddp.progress([1, 2, 3]))
    """)
    history = (done := run(names.train)).history
    assert list(history) == ["loss", "lr", "val/acc", "numpy", "tensor", "flag", "own", "twice", "after"]
    assert [column.tolist() for column in history["loss"]] == [[0, 1, 2, 3, 4], [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]]
    assert history["val/acc"].steps.tolist() == [1, 3]  # at the step of the loss before it
    assert (history["own"].steps.tolist(), history["after"].steps.tolist()) == ([10, 20, 30], [30])
    np.testing.assert_allclose(history["val/acc"].values, [0.1, 0.3], rtol=1e-6)
    values = [history[name].values.tolist() for name in ("numpy", "tensor", "flag", "twice")]
    assert values == [[1.5], [2.5], [1.0], [20, 40, 60]]
    bar = history.ranks[0].bars[0]
    assert (done.value, bar.desc, bar.total, bar.done) == ([1, 2, 3], "", 3, 3)


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
    found = [history[name].values.tolist() for name in ("sum", "low", "high", "own")]
    assert found == [[3.0] * 3, [0.0] * 3, [2.0] * 3, [0.0] * 3]
    assert {rank: s.values.tolist() for rank, s in history.by_rank("own").items()} == {i: [i] * 3 for i in range(3)}


@pytest.mark.parametrize("how", ["kill", "exit", "raise"])
def test_nothing_logged_is_lost_when_a_rank_dies(cell: Cells, how: str) -> None:
    names = cell("""
        import os, signal, time, nbddp
        def train(how):
            if nbddp.rank() == 1: time.sleep(1000)
            for i in range(5000): nbddp.log(loss=float(i))
            if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit": os._exit(1)
            raise ValueError
    """)
    with pytest.raises((nbddp.RankDied, nbddp.RankError)):
        run(names.train, how)
    assert nbddp.last_run().history["loss"].values.tolist() == [float(i) for i in range(5000)]


def test_main_first_lets_local_rank_0_finish_before_the_others_begin(
    cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    done = []
    monkeypatch.setattr(collectives, "barrier", lambda: done.append("waited"))
    for rank in range(4):  # two on each of two machines
        monkeypatch.setattr(context, "_current", (Settings("", 4), Place(rank, rank % 2, 2, folder="")))
        with nbddp.main_first():
            done.append(rank)
    assert done == [0, "waited", "waited", 1, 2, "waited", "waited", 3]
