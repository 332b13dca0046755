"""Loaders on real ranks, judged by one process."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

import nbddp
from nbddp.helpers.loader import _seeded
from tests.support import Cells, run


def test_a_snapshot_resumes_in_the_middle_of_an_epoch_with_any_number_of_ranks(cell: Cells, in_folder: Path) -> None:
    names = cell("""
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
    """)
    whole = run(names.train, "none", seed=3).values
    begun = run(names.train, "snapshot", 20, seed=3).values
    assert begun == [share[:160] for share in whole]
    assert run(names.train, "snapshot", seed=3).values == [share[160:] for share in whole]
    seen = [i for share in begun for i in share]
    seen += [i for share in run(names.train, "snapshot", nprocs=3, seed=3).values for i in share]
    assert sorted(seen) == list(range(1000))


def test_every_rank_makes_the_same_draw_and_takes_its_share(cell: Cells) -> None:
    names = cell("""
        import nbddp, numpy, random, torch
        def own(): return torch.rand(1).item(), numpy.random.rand(), random.random()
        class Mixed:
            def __len__(self): return 20
            def __iter__(self): return iter([*numpy.random.permutation(10), *random.sample(range(10, 20), 10)])
        def train(weights):
            sampler = torch.utils.data.WeightedRandomSampler(weights, 50)
            loader = nbddp.loader(torch.arange(20), 4, sampler=sampler)
            mixed = [x.item() for x in nbddp.loader(torch.arange(20), sampler=Mixed())]
            return [torch.cat(list(loader)).tolist() for _ in range(3)], mixed, own()
        def shuffled():
            loader = nbddp.loader(torch.arange(20), 4, shuffle=True)
            for _ in range(4): list(loader)
            return own()
    """)
    weights = [1.0 + i % 4 for i in range(20)]
    done = run(names.train, weights, seed=11)
    for epoch in range(3):
        with _seeded(11 + epoch):
            expected = list(WeightedRandomSampler(weights, 50))
        assert [value[0][epoch] for value in done.values] == [expected[0::2], expected[1::2]]
    assert sorted(i for value in done.values for i in value[1]) == list(range(20))
    assert [rank.samples for rank in done.history.ranks] == [3 * 25 + 10] * 2
    # A draw takes none of the rank's own random numbers.
    assert [value[2] for value in done.values] == run(names.shuffled, seed=11).values


def test_samplers_that_draw_differently_or_split_themselves_are_errors_with_a_remedy(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        from torch.utils.data import BatchSampler, DistributedSampler, WeightedRandomSampler
        class Mine(torch.utils.data.Sampler):
            def __init__(self, n): self.n = n
            def __iter__(self): return iter(range(nbddp.rank(), self.n, 2))
            def __len__(self): return self.n // 2
        def train(kind):
            sampler = {
                "weights of each rank's own seed": lambda: WeightedRandomSampler(torch.rand(20), 20),
                "its own split": lambda: Mine(20),
                "torch's split": lambda: DistributedSampler(range(20)),
            }[kind]()
            said = set()
            for options in ({"sampler": sampler}, {"batch_sampler": BatchSampler(sampler, 4, False)}):
                nbddp.barrier()
                try: list(nbddp.loader(torch.arange(20), **options))
                except (RuntimeError, TypeError) as error: said.add(f"{type(error).__name__}: {error}")
                else: said.add("")
            return sorted(said)
    """)
    for kind in ("weights of each rank's own seed", "its own split"):
        first, second = sorted(run(names.train, kind, seed=1).values)
        said = "".join({*first, *second} - {""})  # the rank that draws first can't know
        assert "RuntimeError: loader(): rank " in said
        assert "'s sampler drew different samples than rank" in said
        assert "pass the sampler you'd use on one GPU, or use torch's DataLoader" in said
    for (said,) in run(names.train, "torch's split").values:
        assert said.startswith("TypeError: loader() already distributes the samples. Since DistributedSampler")


def test_ranks_that_split_the_data_differently_are_told(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        from torch.utils.data import RandomSampler, random_split
        def train(seed, **how):
            generator = None if seed is None else torch.Generator().manual_seed(seed)
            part, _ = random_split(range(20), [16, 4], generator)
            if how: how["sampler"] = RandomSampler(part)
            batches = nbddp.loader(part, **how)
            for _ in range(2):
                nbddp.barrier()
                try: seen = sorted(x.item() for x in batches)
                except RuntimeError as error: seen = str(error)
            return seen
    """)
    for how in ({}, {"sampler": True}):
        said = "".join(map(str, run(names.train, None, seed=0, kwargs=how).values))  # also in a second pass
        assert re.search(r"'s Subset has different samples than rank .*manual_seed\(0\)\)", said)
    first, second = run(names.train, 0, seed=1).values
    assert len({*first, *second}) == 16


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: nbddp.loader(nbddp.loader(range(4))), "already has the rank's share: pass the dataset"),
        (lambda: nbddp.loader(zip(range(4))), "takes a dataset, an IterableDataset, or a DataLoader, not a zip"),
        (lambda: nbddp.gather_for_metrics([1, 2]), "takes a tensor, not a list: call it for each tensor"),
        (lambda: nbddp.loader(range(4)).load_state_dict({"length": 5}), "saved with 5 samples, but the data now has 4"),
        (lambda: nbddp.loader(range(4)).bs, r"distrib_ctx\(\) and nbddp.loader\(\) would both split the data"),
    ],
)
def test_what_takes_no_share_says_what_to_pass(wrong: Callable[[], Any], says: str) -> None:
    with pytest.raises((TypeError, AttributeError, ValueError), match=says):
        wrong()


def test_a_stream_can_be_profiled_and_a_loader_that_one_rank_makes_in_addition_disturbs_no_other(cell: Cells) -> None:
    names = cell("""
        import cProfile, nbddp, torch
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self): return iter(range(8))
        class Own(torch.utils.data.Sampler):
            def __init__(self, length): self.length = length
            def __len__(self): return self.length
            def __iter__(self): return iter(torch.randperm(self.length).tolist())
        def train():
            found = cProfile.Profile().runcall(list, nbddp.loader(Stream(), 2))
            if nbddp.is_primary(): next(iter(nbddp.loader(range(3), sampler=Own(3))))
            return torch.cat(found).tolist(), [x.item() for x in nbddp.loader(range(4), sampler=Own(4))]
    """)
    (one, first), (two, second) = run(names.train, seed=0).values
    assert (one, two) == ([0, 2, 4, 6], [1, 3, 5, 7])
    assert sorted([*first, *second]) == [0, 1, 2, 3]


def test_a_stream_is_shared_unless_it_reads_its_rank_while_it_is_iterated(cell: Cells) -> None:
    names = cell("""
        import nbddp, os, torch
        import torch.distributed as dist
        from nbddp import rank
        from torch.distributed import get_world_size
        class Stream(torch.utils.data.IterableDataset):
            def __init__(self, how): self.how = how
            def __iter__(self):
                first, step = {"plain": lambda: (0, 1), "nbddp": lambda: (rank(), nbddp.world_size()),
                    "torch": lambda: (dist.get_rank(), get_world_size()), "printed": lambda: (nbddp.print() or 0, 1),
                    "environment": lambda: (int(os.environ["RANK"]), 2)}[self.how]()
                yield from range(first, 11, step)
        def train(how, exact=True, workers=0):
            loader = nbddp.loader(Stream(how), 4, exact=exact, num_workers=workers, persistent_workers=workers > 0)
            return [torch.cat(list(loader)).tolist() for _ in range(2)]
        def resume(how, workers=0):
            loader = nbddp.loader(Stream(how), 2, num_workers=workers, persistent_workers=workers > 0)
            loader.load_state_dict({"epoch": 1, "taken": 4})
            loader.set_epoch(1)
            return [torch.cat(list(loader)).tolist() for _ in range(2)]
    """)
    shares = [list(range(0, 11, 2)), list(range(1, 11, 2))]
    for how in ("plain", "printed", "nbddp", "torch", "environment"):
        done = run(names.train, how)
        assert done.values == [[share] * 2 for share in shares]
        assert ("the stream reads" in done.logs(0), done.logs(1)) == (how not in ("plain", "printed"), "")
    assert run(names.train, "plain", False, 1).values == [[shares[0]] * 2, [[*shares[1], 0]] * 2]
    for workers in (0, 1):
        resumed = run(names.resume, "plain", workers).values
        assert resumed == [[share[2:], share] for share in (shares[0], [*shares[1], 0])]
    for how, workers, nprocs in ("torch", 0, 1), ("torch", 0, 2), ("plain", 2, 2):
        with pytest.raises(nbddp.RankError, match=r"splits itself among ranks or workers: save its own state_dict\(\)"):
            run(names.resume, how, workers, nprocs=nprocs)


def test_a_stream_is_read_as_torch_reads_it_and_gathered_and_all_ranks_are_in_the_same_epoch(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        class Stream(torch.utils.data.IterableDataset):
            def set_epoch(self, epoch): self.epoch = epoch
            def __iter__(self): self.at = -1; return self  # begins again
            def __next__(self):
                self.at += 1
                if self.at == 12: raise StopIteration
                return self.at + 100 * getattr(self, "epoch", 0)
        def gathered():
            steps = [nbddp.gather_for_metrics(batch).tolist() for batch in nbddp.loader(Stream(), 5, exact=True)]
            whole = torch.cat(list(nbddp.loader(Stream(), 5, exact=True)))
            whole = nbddp.gather_for_metrics(whole).tolist()
            twice = torch.cat(list(nbddp.loader(Stream(), 5, exact=True, num_workers=2)))  # two workers' last batches
            return steps, whole, nbddp.gather_for_metrics(twice).unique(return_counts=True)[1].tolist()
        def epochs(stream=Stream()):
            loader = nbddp.loader(stream, 2)
            return [(stream.set_epoch(i), next(iter(loader)).tolist())[1] for i in range(3)]
        def cut():
            loader = nbddp.loader(range(11), 5, shuffle=True, exact=True)
            next(iter(loader))  # all that rank 1 has
            return torch.cat(list(loader)).tolist()
    """)
    every = list(range(12))
    assert run(names.gathered, nprocs=1).values == [([every[:5], every[5:10], every[10:]], every, [2] * 12)]
    assert run(names.gathered, nprocs=2).values == [([every[:10], every[10:]], every, [2] * 12)] * 2
    assert run(names.epochs, nprocs=1).value == [[0, 1], [100, 101], [200, 201]]
    first, second = run(names.cut, seed=1).values
    assert sorted([*first, *second]) == every[:11]


def test_a_torch_dataloader_is_rebuilt_with_its_options(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self): return iter(range(5))
        def tens(samples): return torch.stack(samples) * 10
        def train(loader): return [batch.tolist() for batch in nbddp.loader(loader, exact=True)]
    """)
    data: Any = torch.arange(10)
    batches = BatchSampler(range(10), 4, drop_last=False)
    tens = run(names.train, DataLoader(data, 2, collate_fn=names.tens)).values
    assert tens == [[[0, 20], [40, 60], [80]], [[10, 30], [50, 70], [90]]]
    assert run(names.train, DataLoader(data, batch_sampler=batches)).values == [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7]]]
    assert run(names.train, DataLoader(data, None)).values == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert run(names.train, DataLoader(names.Stream(), 2)).values == [[[0, 2], [4]], [[1, 3]]]
    assert not nbddp.loader(DataLoader(data, in_order=False)).in_order
    for sampler in RandomSampler(data, replacement=True), RandomSampler(data, num_samples=30):
        with _seeded(1):
            drawn = list(sampler)
        shares = run(names.train, DataLoader(data, 4, sampler=sampler), seed=1).values
        assert [[i for batch in share for i in batch] for share in shares] == [drawn[0::2], drawn[1::2]]
    for own in ({"batch_size": 4}, {"shuffle": True}, {"sampler": range(10)}, {"batch_sampler": batches}):
        with pytest.raises(ValueError, match="set them there"):
            nbddp.loader(DataLoader(data), **own)
    with pytest.raises(ValueError, match="drop_last=True leaves some out"):
        nbddp.loader(DataLoader(data, 4, drop_last=True), exact=True)
    with pytest.raises(ValueError, match=r"choose one$"):
        nbddp.loader(data, exact=True, drop_last=True)
    for more in ({"shuffle": True}, {"batch_sampler": batches}):
        with pytest.raises(ValueError, match="mutually exclusive"):
            nbddp.loader(data, sampler=RandomSampler(data), **more)


def test_an_epoch_ends_with_its_last_batch_however_the_passes_are_cut(cell: Cells) -> None:
    """Also with ``drop_last``, and after one rank's look at a batch."""
    names = cell("""
        import nbddp, torch
        def train(drop_last):
            loader = nbddp.loader(torch.arange(20), 4, shuffle=True, drop_last=drop_last)
            states, epochs = [], []
            for epoch in range(3):
                if nbddp.is_primary(): next(iter(loader))
                seen = [batch.tolist() for batch in loader]
                states.append(loader.state_dict())
                epochs.append(sorted(sum(seen, [])))
            again = nbddp.loader(torch.arange(20), 4, shuffle=True, drop_last=drop_last)
            again.load_state_dict(states[0])
            return states, epochs, sorted(torch.cat(list(again)).tolist())
        """)
    for drop_last in (False, True):
        first, second = run(names.train, drop_last, seed=3).values
        for states, epochs, resumed in (first, second):
            assert states == [{"epoch": i, "taken": 0, "length": 20} for i in (1, 2, 3)]
            assert [len(epoch) for epoch in epochs] == [8 if drop_last else 10] * 3
            assert epochs[0] != epochs[1] != epochs[2]  # shuffled again
            assert drop_last or resumed == epochs[1]
        assert drop_last or [sorted(a + b) for a, b in zip(first[1], second[1])] == [list(range(20))] * 3


def test_an_evaluation_is_the_same_to_the_bit_with_any_number_of_ranks(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def evaluate(x, y, exact=False, shuffle=False):
            scores, targets, each = [], [], []
            for a, b in nbddp.loader(torch.utils.data.TensorDataset(x, y), 64, exact=exact, shuffle=shuffle):
                scores.append((a * torch.arange(8.0)).sum(1) / 7)
                targets.append(b)
                if not exact: each.append(nbddp.gather_for_metrics(b))
            whole = (nbddp.gather_for_metrics(torch.cat(each)) for each in (scores, targets))
            return *whole, torch.cat(each or targets)
        def wrong():
            for batch in nbddp.loader(torch.arange(12), 2): pass
            try: nbddp.gather_for_metrics(torch.arange(3 + nbddp.rank()))
            except ValueError as error: return str(error)
        def rest():
            loader = nbddp.loader(torch.arange(7), 8)
            loader.load_state_dict({"epoch": 0, "taken": 2, "length": 7})
            return nbddp.gather_for_metrics(next(iter(loader))).tolist()
    """)
    assert run(names.rest).values == [[2, 3, 4, 5, 6]] * 2
    torch.manual_seed(0)
    # Whole numbers: torch adds floats of a row in an order that depends on the batch's size.
    x, y = torch.randint(-99, 99, (2_003, 8)).float(), torch.randint(0, 2, (2_003,))
    alone = (x * torch.arange(8.0)).sum(1) / 7
    for nprocs, exact in (1, True), (2, True), (3, True), (4, True), (3, False):
        for scores, targets, each in run(names.evaluate, x, y, exact, nprocs=nprocs).values:
            assert torch.equal(scores, alone)
            assert torch.equal(targets, y)
            assert exact or torch.equal(each, y)
    (shuffled, *_), other = run(names.evaluate, x, y, True, True, seed=5).values
    assert torch.equal(shuffled, other[0])
    assert torch.equal(shuffled.sort().values, alone.sort().values)
    assert not torch.equal(shuffled, alone)
    first, second = run(names.wrong).values
    assert first == second
    assert "the ranks passed 3, 4 entries; pass one for each sample of the latest batch" in first


def test_join_lets_ranks_have_different_numbers_of_batches(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def train():
            model = nbddp.wrap(torch.nn.Linear(4, 1))
            for p in model.parameters(): torch.nn.init.zeros_(p)
            optimizer = torch.optim.SGD(model.parameters(), 1.0)
            with nbddp.join(model):
                for _ in range(3 + 2 * nbddp.rank()):
                    loss = model(torch.ones(2, 4) * (1 + nbddp.rank())).sum()
                    optimizer.zero_grad(); loss.backward(); optimizer.step()
            return [p.tolist() for p in model.parameters()]
    """)
    # Three steps with the mean of both ranks' gradients, (2 + 4) / 2 and (2 + 2) / 2; two with half of rank 1's.
    assert run(names.train, timeout=60).values == [[[[-3.0 * 3 - 2 * 2] * 4], [-3.0 * 2 - 2 * 1]]] * 2
    assert run(names.train, nprocs=1).value == [[[-6.0] * 4], [-6.0]]


def test_micro_batches_begin_again_after_an_exception() -> None:
    model, seen = torch.nn.Linear(1, 1), []
    for fails in (False, True, False, False, False):
        with contextlib.suppress(AssertionError), nbddp.accumulate(model, 3) as complete:
            seen.append(complete)
            assert not fails
    assert seen == [False] * 4 + [True]


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
            for more in range(2):  # the second time, the last one has to say so
                for number, (a, b) in enumerate(zip(x[mine].chunk(k), y[mine].chunk(k)), 1):
                    with nbddp.accumulate(model, k + more, last=more == 1 and number == k) as last:
                        torch.nn.functional.mse_loss(model(a), b).backward()
                    complete.append(last)
                found.append([p.grad.clone() for p in model.parameters()])
                model.zero_grad()
            return found, complete, len(reduced)
    """)
    with pytest.raises(ValueError, match="k must be a positive integer, not 0"), nbddp.accumulate(torch.nn.ReLU(), 0):
        pass
    torch.manual_seed(1)
    x, y = torch.randn(48, 6), torch.randn(48, 1)
    whole = run(names.gradients, x, y, 1, nprocs=1).value[0][0]
    for k in (1, 3, 4):
        for found, complete, reduced in run(names.gradients, x, y, k, nprocs=nprocs, timeout=60).values:
            for step in found:
                assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(step, whole))
            assert complete == ([False] * (k - 1) + [True]) * 2
            assert reduced == (2 if nprocs > 1 else 0)  # one bucket, once per k micro-batches
