"""Drawn cases on real ranks: interrupts at any moment.

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
