"""Drawn cases on real ranks: interrupts at any moment, and DDP's gradients after failures at any place.

``NBDDP_SEED`` draws other ones, ``NBDDP_CASES=200`` (with ``--timeout=0``) more.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

from tests.support import Notebook, out

CASES = int(os.environ.get("NBDDP_CASES", "6"))
SEED = int(os.environ.get("NBDDP_SEED", "1"))
LONGEST_S = 5.0

FUNCTIONS = """
import nbddp, signal, time, torch, torch.distributed as dist
before = signal.getsignal(signal.SIGINT)
def spin():
    t = torch.ones(2)
    while True:
        dist.all_reduce(t)
        t.fill_(1)
def nap(): time.sleep(60)
def nothing(): return nbddp.all_reduce(1)
"""
TRAINING = """
import nbddp, time, torch, torch.nn as nn, torch.distributed as dist
torch.manual_seed(0)
model = nbddp.wrap(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters())
generator = torch.Generator().manual_seed(nbddp.rank())
t = torch.ones(2)
def step():
    optimizer.zero_grad()
    model(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
    optimizer.step()
def state():
    moments = [state["exp_avg"].flatten() for state in optimizer.state.values()]
    return torch.cat([*(p.detach().flatten() for p in model.parameters()), *moments])
for _ in range(3): step()
"""
CELLS = [
    "while True: step()",
    "while True:\n    dist.all_reduce(t); t.fill_(1)",
    "time.sleep(60)",
    "dist.barrier() if nbddp.rank() else time.sleep(60)",
    "while True: nbddp.all_reduce(1)",
]


def interrupt_after(notebook: Notebook, source: str, delay_s: float) -> None:
    """Begin a cell, interrupt it after a while, and see that it ends so, and soon."""
    message = notebook.begin(f"print('go', flush=True)\n{source}")
    notebook.shown_so_far(message, "go")
    time.sleep(delay_s)
    notebook.interrupt()
    reply = notebook.end_of(message)
    assert (reply.ename, reply.seconds < LONGEST_S) == ("KeyboardInterrupt", True), f"{source}\n{reply.traceback}"


def test_a_run_interrupted_at_any_moment_leaves_nothing_and_the_next_works(notebook: Notebook) -> None:
    rng = random.Random(SEED)
    notebook.ok(FUNCTIONS)
    for _ in range(CASES):
        source = f"nbddp.run({rng.choice(['spin', 'nap'])}, nprocs={rng.choice([1, 2, 4])}, device='cpu', show=False)"
        interrupt_after(notebook, source, rng.random() * 0.4)
        after = notebook.ok(
            "nbddp.run(nothing, nprocs=2, device='cpu', show=False).values, signal.getsignal(signal.SIGINT) is before"
        )
        assert out(after) == "([2, 2], True)"


@pytest.fixture
def ranks(notebook: Notebook) -> Iterator[Notebook]:
    notebook.ok("%load_ext nbddp\n%ddp open -n 3 --device cpu")
    yield notebook
    notebook.ok("%ddp close")


def test_cells_interrupted_at_any_moment_leave_equal_models(ranks: Notebook) -> None:
    rng = random.Random(SEED)
    ranks.ok(TRAINING)
    for _ in range(CASES):
        cell = rng.choice(CELLS)
        interrupt_after(ranks, cell, 0.02 + rng.random() * 0.4)
        after = ranks.ok("step()\nnbddp.all_reduce(1), len({str(s.tolist()) for s in nbddp.all_gather(state())})")
        assert out(after) == "(3, 1)", cell


GRADIENTS = """
import copy, nbddp, torch, torch.nn as nn, torch.distributed as dist
rank, world_size = nbddp.rank(), nbddp.world_size()
torch.manual_seed(0)
class Net(nn.Module):  # registered in another order than used, so that DDP's second layout differs from its first
    def __init__(self, norm):
        super().__init__()
        self.last, self.second, self.first, self.third = (
            nn.Linear(8, 1), nn.Linear(16, 24), nn.Linear(8, 16), nn.Linear(24, 8))
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
    def forward(self, x): return self.last(self.third(self.second(self.norm(self.first(x)).relu()).relu()).relu())
def make(kind):
    options = dict(bucket_cap_mb=.0005) if "small" in kind else {}
    options |= dict(static_graph="static" in kind, find_unused_parameters="unused" in kind,
                    gradient_as_bucket_view="view" in kind)
    return nn.parallel.DistributedDataParallel(Net("norm" in kind).double(), **options)
def batch(seed):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed * 100 + rank), dtype=torch.float64)
def loss_of(m, x): return (m(x) - x.sum(1, keepdim=True)).pow(2).mean()
def step(seed):
    opt.zero_grad(); loss_of(model, batch(seed)).backward(); opt.step()
def begin(kind, steps):
    global model, opt
    model = make(kind)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for seed in range(steps): step(seed)
def oracle(seed):
    '''Is DDP's gradient the mean of the ranks' own? Have all ranks one gradient and one model?'''
    plain = copy.deepcopy(model.module)
    plain.zero_grad()
    loss_of(plain, batch(seed)).backward()
    want = [p.grad.clone() for p in plain.parameters()]
    for w in want:
        dist.all_reduce(w)
        w /= world_size
    opt.zero_grad(); loss_of(model, batch(seed)).backward()
    have = [p.grad for p in model.parameters()]
    worst = max(((h - w).abs().max() / (w.abs().max() + 1e-30)).item() for h, w in zip(have, want))
    flat = torch.cat([h.flatten() for h in have] + [p.detach().flatten() for p in model.parameters()])
    every = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(every, flat)
    opt.step()
    return worst < 1e-9 and all(torch.equal(each, every[0]) for each in every)
"""
KINDS = [
    "plain",
    "small",
    "static",
    "small-static",
    "unused",
    "small-unused",
    "norm",
    "small-norm",
    "view",
    "small-view",
]
FAILS = {
    "forward": "if rank == {who}: raise ValueError('boom')\nstep({seed})",
    "backward": (
        "opt.zero_grad(); l = loss_of(model, batch({seed}))\nif rank == {who}: raise ValueError('boom')\nl.backward()"
    ),
    "inside": (
        "def boom(g): raise ValueError('boom')\n"
        "h = model.module.last.weight.register_hook(boom) if rank == {who} else None\n"
        "try:\n    opt.zero_grad(); loss_of(model, batch({seed})).backward()\nfinally:\n    h and h.remove()"
    ),
    "later": (
        "for i in range({n}):\n    opt.zero_grad(); l = loss_of(model, batch({seed} + i))\n"
        "    if rank == {who} and i == {n} - 1: raise ValueError('boom')\n    l.backward()"
    ),
    "accumulate": (
        "opt.zero_grad()\nwith model.no_sync(): loss_of(model, batch({seed})).backward()\n"
        "if rank == {who}: raise ValueError('boom')\nloss_of(model, batch({seed})).backward()"
    ),
}


def test_ddps_gradient_is_the_mean_of_the_ranks_after_a_failure_anywhere(ranks: Notebook) -> None:
    """Float64: another order of summation is below 1e-12, and a bucket that was mixed up is not."""
    rng = random.Random(SEED)
    kinds = rng.sample(KINDS, len(KINDS))
    ranks.ok(GRADIENTS)
    for case in range(CASES):
        kind = kinds[case % len(kinds)]
        fail = rng.choice([name for name in FAILS if "static" not in kind or name != "accumulate"])
        ranks.ok(f"begin({kind!r}, {rng.choice([0, 1, 2])})")
        for _ in range(rng.choice([1, 1, 2])):
            cell = FAILS[fail].format(who=rng.randrange(3), seed=rng.randrange(99), n=rng.choice([2, 3]))
            assert ranks.cell(cell).ename == "ValueError"
        assert out(ranks.ok("all([oracle(seed) for seed in range(50, 54)])")) == "True", (kind, cell)
