"""Loaders on real ranks, judged by one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import Cells, run

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
