"""Loaders with samplers and streams, exact evaluation, uneven inputs, accumulation: judged by one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, WeightedRandomSampler

import nbddp
from nbddp.worker.epochs import _seeded
from tests.support import Cells, run


def test_every_rank_makes_the_same_draw_and_takes_its_share(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def train(weights):
            sampler = torch.utils.data.WeightedRandomSampler(weights, 50)
            loader = nbddp.loader(torch.arange(20), 4, sampler=sampler)
            return [torch.cat(list(loader)).tolist() for _ in range(3)], torch.rand(1).item()
        def shuffled():
            loader = nbddp.loader(torch.arange(20), 4, shuffle=True)
            for _ in range(3): list(loader)
            return torch.rand(1).item()
    """)
    weights = [1.0 + i % 4 for i in range(20)]
    done = run(names.train, weights, seed=11)
    for epoch in range(3):
        with _seeded(11 + epoch):
            expected = list(WeightedRandomSampler(weights, 50))
        shares = [value[0][epoch] for value in done.values]
        assert shares == [expected[0::2], expected[1::2]]
    # A draw takes none of the rank's own random numbers.
    assert [value[1] for value in done.values] == run(names.shuffled, seed=11).values


def test_samplers_that_draw_differently_are_an_error(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def train():
            weights = torch.rand(20)  # of this rank's own seed
            loader = nbddp.loader(torch.arange(20), 4, sampler=torch.utils.data.WeightedRandomSampler(weights, 20))
            nbddp.barrier()
            for batch in loader: pass
    """)
    with pytest.raises(nbddp.RankError, match="drew other samples than that of rank") as raised:
        run(names.train, seed=1)
    assert isinstance(raised.value.cause, RuntimeError)


def test_a_sampler_of_batches_is_dealt_by_batches(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        from torch.utils.data import BatchSampler, SequentialSampler
        def train(exact):
            data = torch.arange(14)
            loader = nbddp.loader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, False), exact=exact)
            return [batch.tolist() for batch in loader], len(loader)
    """)
    first, second = [[0, 1, 2], [6, 7, 8], [12, 13]], [[3, 4, 5], [9, 10, 11]]
    assert run(names.train, True).values == [(first, 3), (second, 2)]
    assert run(names.train, False).values == [(first, 3), ([*second, [0, 1, 2]], 3)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_shared_and_may_be_read_by_one_worker(cell: Cells, workers: int) -> None:
    names = cell("""
        import nbddp, torch
        class Stream(torch.utils.data.IterableDataset):
            def __init__(self, n): self.n = n
            def __iter__(self): return iter(range(self.n))
        def train(n, workers, exact):
            loader = nbddp.loader(Stream(n), 4, exact=exact, num_workers=workers, persistent_workers=workers > 0)
            return [torch.cat(list(loader)).tolist() for _ in range(2)]
    """)
    exact = [list(range(0, 11, 2)), list(range(1, 11, 2))]
    assert run(names.train, 11, workers, True, timeout=60).values == [[share] * 2 for share in exact]
    padded = [exact[0], [*exact[1], 0]]
    assert run(names.train, 11, workers, False, timeout=60).values == [[share] * 2 for share in padded]


def test_a_stream_and_several_workers_are_refused(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self): return iter(range(10))
        def train(): return list(nbddp.loader(Stream(), num_workers=2))
    """)
    with pytest.raises(nbddp.RankError, match="with num_workers=1 any stream works"):
        run(names.train, timeout=60)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": RandomSampler(range(4)), "shuffle": True}, "leave out shuffle=True"),
        ({"sampler": RandomSampler(range(4)), "batch_sampler": BatchSampler(range(4), 2, False)}, "not both"),
        ({"sampler": DistributedSampler(range(4), 1, 0)}, "distributes the samples itself"),  # type: ignore[arg-type]
        ({"batch_sampler": BatchSampler(DistributedSampler(range(4), 1, 0), 2, False)}, "distributes"),  # type: ignore[arg-type]
        ({"batch_sampler": BatchSampler(range(4), 2, False), "batch_size": 2}, "it makes the batches"),
        ({"sampler": iter(range(4))}, "needs a sampler with a length"),
        ({"exact": True, "drop_last": True}, "choose one of them"),
        ({"dataset": Stream(), "shuffle": True}, "a stream has an order of its own"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        nbddp.loader(**{"dataset": range(4), **options})


def test_the_loader_of_a_stream_that_knows_its_length_has_one() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return 3

    assert len(nbddp.loader(Sized(), 2)) == 2
    assert [batch.tolist() for batch in nbddp.loader(Sized(), 2)] == [[0, 1], [2]]
    with pytest.raises(TypeError):
        len(nbddp.loader(Stream()))


def test_a_state_of_other_data_is_refused() -> None:
    loader: Any = nbddp.loader(range(4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is of 5 samples, and there are 4 now"):
        loader.load_state_dict({"epoch": 0, "taken": 2, "length": 5})


# ---------------------------------------------------------------------------- resume


RESUMES = """
    import nbddp, torch
    def train(path, stop_at=None):
        loader = nbddp.loader(torch.arange(1000), 8, shuffle=True, exact=True)
        if (state := nbddp.load_snapshot(path)): loader.load_state_dict(state["loader"])
        seen = []
        for step, batch in enumerate(loader, 1):
            nbddp.barrier() if stop_at else None
            seen += batch.tolist()
            if step == stop_at:
                nbddp.save_snapshot(path, loader=loader.state_dict())
                return seen
        return seen
"""


def test_a_snapshot_resumes_in_the_middle_of_an_epoch_with_any_number_of_ranks(cell: Cells, in_folder: Path) -> None:
    names = cell(RESUMES)
    whole = run(names.train, "none", seed=3).values
    begun = run(names.train, "snapshot", 20, seed=3).values
    assert begun == [share[:160] for share in whole]
    assert run(names.train, "snapshot", seed=3).values == [share[160:] for share in whole]
    seen = [i for share in begun for i in share]
    seen += [i for share in run(names.train, "snapshot", nprocs=3, seed=3).values for i in share]
    assert sorted(seen) == list(range(1000))


def test_a_resumed_stream_begins_its_later_epochs_at_the_start(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self): return iter(range(12))
        def train(workers):
            loader = nbddp.loader(Stream(), 2, num_workers=workers, persistent_workers=workers > 0)
            list(loader)
            loader.load_state_dict({"epoch": 1, "taken": 4})
            return [torch.cat(list(loader)).tolist() for _ in range(2)]
    """)
    for workers in (0, 1):
        assert run(names.train, workers, timeout=60).values == [
            [[4, 6, 8, 10], [0, 2, 4, 6, 8, 10]],
            [[5, 7, 9, 11], [1, 3, 5, 7, 9, 11]],
        ]


def test_a_look_at_a_batch_does_not_change_the_state_of_a_loader_in_order() -> None:
    loader: Any = nbddp.loader(torch.arange(12), 2)  # type: ignore[arg-type]
    next(iter(loader))
    next(iter(loader))
    batches = iter(loader)
    next(batches)
    next(batches)
    assert loader.state_dict() == {"epoch": 0, "taken": 4, "length": 12}
    other: Any = nbddp.loader(torch.arange(12), 2)  # type: ignore[arg-type]
    other.load_state_dict(loader.state_dict())
    other.set_epoch(0)  # as at the start of every epoch; the position stays
    assert torch.cat(list(other)).tolist() == list(range(4, 12))


def test_a_samplers_own_set_epoch_is_called() -> None:
    class ByEpoch(torch.utils.data.Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([self.epoch * 10 + i for i in range(3)])

        def __len__(self) -> int:
            return 3

    loader = nbddp.loader(range(100), 3, sampler=ByEpoch())  # type: ignore[arg-type]
    assert [torch.cat(list(loader)).tolist() for _ in range(2)] == [[0, 1, 2], [10, 11, 12]]


def test_a_loader_that_another_library_makes_anew_has_its_sampler() -> None:
    loader = nbddp.loader(torch.arange(6), 2, shuffle=True)  # type: ignore[arg-type]
    again = type(loader)(loader.dataset, batch_size=3, sampler=torch.utils.data.SequentialSampler(range(6)))
    assert [batch.tolist() for batch in again] == [[0, 1, 2], [3, 4, 5]]


# ---------------------------------------------------------------------------- exact evaluation


def test_an_evaluation_is_the_same_to_the_bit_with_any_number_of_ranks(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def evaluate(x, y, shuffle):
            scores, targets = [], []
            for a, b in nbddp.loader(torch.utils.data.TensorDataset(x, y), 64, exact=True, shuffle=shuffle):
                scores.append((a * torch.arange(8.0)).sum(1).sigmoid())
                targets.append(b)
            return tuple(nbddp.gather(torch.cat(each), exact=True) for each in (scores, targets))
    """)
    torch.manual_seed(0)
    x, y = torch.randn(10_001, 8), torch.randint(0, 2, (10_001,))
    alone = (x * torch.arange(8.0)).sum(1).sigmoid()
    for nprocs in (1, 2, 3, 4):
        for scores, targets in run(names.evaluate, x, y, False, nprocs=nprocs).values:
            assert torch.equal(scores, alone)
            assert torch.equal(targets, y)
    (shuffled, *_), other = run(names.evaluate, x, y, True, seed=5).values
    assert torch.equal(shuffled, other[0])
    assert torch.equal(shuffled.sort().values, alone.sort().values)
    assert not torch.equal(shuffled, alone)


def test_what_is_not_the_shares_of_one_dataset_is_refused_on_all_ranks(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def attempt(kind):
            rank = nbddp.rank()
            x = {"lengths": torch.ones(3 + rank), "shapes": torch.ones(3, 1 + rank), "number": 1.0,
                 "scalar": torch.tensor(1.0), "dtypes": torch.ones(3, dtype=[torch.float, torch.double][rank])}[kind]
            try: nbddp.gather(x, exact=True)
            except (TypeError, ValueError) as error: return str(error)
    """)
    for kind, message in {
        "lengths": "3, 4 entries by rank are not the shares of one dataset",
        "shapes": "differ in dtype, or in a dimension",
        "dtypes": "differ in dtype, or in a dimension",
        "number": "takes a tensor with an entry for each sample",
        "scalar": "takes a tensor with an entry for each sample",
    }.items():
        assert all(message in text for text in run(names.attempt, kind).values), kind


# ---------------------------------------------------------------------------- uneven inputs, accumulation


def test_join_lets_ranks_have_different_numbers_of_batches(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def train(joined):
            torch.manual_seed(0)
            model = nbddp.wrap(torch.nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with nbddp.join(model):
                for _ in range(3 + 2 * nbddp.rank()):
                    optimizer.zero_grad()
                    model(torch.ones(2, 4) * (1 + nbddp.rank())).sum().backward()
                    optimizer.step()
            return [p.detach().clone() for p in model.parameters()]
    """)
    first, second = run(names.train, True, timeout=60).values
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    (alone,) = run(names.train, True, nprocs=1).values
    assert len(alone) == 2


@pytest.mark.parametrize("nprocs", [1, 2])
def test_accumulated_gradients_equal_those_of_the_big_batch(cell: Cells, nprocs: int) -> None:
    names = cell("""
        import nbddp, torch
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        def gradients(x, y, k):
            torch.manual_seed(0)
            model = nbddp.wrap(torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)))
            reduced = []
            if nbddp.world_size() > 1:
                def hook(state, bucket):
                    reduced.append(bucket.index())
                    return allreduce_hook(None, bucket)
                model.register_comm_hook(None, hook)
            mine = slice(nbddp.rank(), None, nbddp.world_size())
            found, complete = [], []
            for _ in range(2):
                for a, b in zip(x[mine].chunk(k), y[mine].chunk(k)):
                    with nbddp.accumulate(model, k) as last:
                        torch.nn.functional.mse_loss(model(a), b).backward()
                    complete.append(last)
                found.append([p.grad.clone() for p in model.parameters()])
                model.zero_grad()
            return found, complete, len(reduced)
    """)
    torch.manual_seed(1)
    x, y = torch.randn(48, 6), torch.randn(48, 1)
    (whole,) = [run(names.gradients, x, y, 1, nprocs=1).value[0][0]]
    for k in (1, 3, 4):
        for found, complete, reduced in run(names.gradients, x, y, k, nprocs=nprocs, timeout=60).values:
            for step in found:
                assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(step, whole))
            assert complete == ([False] * (k - 1) + [True]) * 2
            assert reduced == (2 if nprocs > 1 else 0)  # one bucket, once per k micro-batches


def test_the_last_micro_batches_may_be_fewer() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    complete = []
    for i in range(5):
        with nbddp.accumulate(model, 3, last=i == 4) as done:
            model(torch.tensor([[float(i + 1)]])).backward()
        complete.append(done)
        if done:
            assert model.weight.grad is not None
            assert math.isclose(model.weight.grad.item(), {2: 2.0, 4: 4.5}[i])  # the means of 1, 2, 3 and of 4, 5
            model.zero_grad()
    assert complete == [False, False, True, False, True]
    with pytest.raises(ValueError, match="a whole number of micro-batches"), nbddp.accumulate(model, 0):
        pass


def test_an_exception_in_a_micro_batch_is_not_counted() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(RuntimeError), nbddp.accumulate(model, 2):
        raise RuntimeError("boom")
    for expected in (False, True):
        with nbddp.accumulate(model, 2) as complete:
            assert complete == expected
    with nbddp.accumulate(model, 2):
        pass
    with pytest.raises(RuntimeError), nbddp.accumulate(model, 2):
        raise RuntimeError("in the second one")
    with nbddp.accumulate(model, 2) as complete:
        assert not complete
