"""After a failure or interrupt in a session, DDP's gradient is the mean of the ranks' own (in float64).

``NBDDP_CASES=300 NBDDP_SEED=7 python -m pytest tests/long/test_gradients_after_failures.py --timeout=0``
"""

import os
import random
import time

import pytest

from tests.support import Notebook

CASES, SEED = int(os.environ.get("NBDDP_CASES", "30")), int(os.environ.get("NBDDP_SEED", "0"))
KINDS = [size + kind for size in ("", "small ") for kind in ("plain", "static", "unused", "norm", "view")]
SETUP = """
import copy, time, torch.nn as nn
torch.manual_seed(0)
class Net(nn.Module):  # registered in another order than used: DDP's second layout differs from its first
    def __init__(self, kind):
        super().__init__()
        self.last, self.second, self.first = nn.Linear(8, 1), nn.Linear(16, 8), nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16) if "norm" in kind else nn.Identity()
    def forward(self, x): return self.last(self.second(self.norm(self.first(x)).relu()).relu())
def make(kind):
    return nn.parallel.DistributedDataParallel(
        Net(kind).double(), bucket_cap_mb=0.0005 if "small" in kind else 25, static_graph="static" in kind,
        find_unused_parameters="unused" in kind, gradient_as_bucket_view="view" in kind)
def loss_of(model, seed):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed * 100 + rank), dtype=torch.float64)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()
def step(seed): optimizer.zero_grad(); loss_of(model, seed).backward(); optimizer.step()
def is_right(seed):
    plain = copy.deepcopy(model.module)
    plain.zero_grad(); loss_of(plain, seed).backward()
    step(seed)
    wanted = torch.cat([p.grad.flatten() for p in plain.parameters()])
    dist.all_reduce(wanted)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    weights = torch.cat([found, *(p.detach().flatten() for p in model.parameters())])
    every = [torch.empty_like(weights) for _ in range(world_size)]
    dist.all_gather(every, weights)
    return torch.allclose(found, wanted / world_size, rtol=1e-9, atol=1e-12) and all(map(every[0].equal, every))
"""
BOOM = "if rank == {who}: raise ValueError('boom')\n"
FAILURES = [
    BOOM + "step({seed})",
    "optimizer.zero_grad(); loss = loss_of(model, {seed})\n" + BOOM + "loss.backward()",
    "def boom(gradient):\n    " + BOOM + "hook = model.module.last.weight.register_hook(boom)\n"
    "try: step({seed})\nfinally: hook.remove()",
    "for number in range({n}):\n    optimizer.zero_grad(); loss = loss_of(model, {seed} + number)\n"
    "    if rank == {who} and number == {n} - 1: raise ValueError('boom')\n    loss.backward()",
    "optimizer.zero_grad()\nwith model.no_sync(): loss_of(model, {seed}).backward()\n" + BOOM + "step({seed})",
]
ENDLESS = ["while True: step({seed})", "while True: dist.all_reduce(torch.ones(2))", "while True: nbddp.all_reduce(1)"]
ENDLESS += ["time.sleep(60)", "dist.barrier() if rank else time.sleep(60)"]
LONGEST_S = 5.0


def interrupt(notebook: Notebook, cell: str, delay_s: float) -> None:
    message = notebook.begin(f"print('go', flush=True)\n{cell}")
    notebook.shown_so_far(message, "go")
    time.sleep(delay_s)
    notebook.interrupt()
    reply = notebook.end_of(message)
    assert (reply.ename, reply.seconds < LONGEST_S) == ("KeyboardInterrupt", True), f"{cell}\n{reply.traceback}"


@pytest.mark.parametrize("nprocs", [2, 3, 4])
def test_gradients_are_the_mean_of_the_ranks_own_after_any_failure_or_stop(own_notebook: Notebook, nprocs: int) -> None:
    rng, wrong = random.Random(SEED * 10 + nprocs), []
    own_notebook.ok(f"%load_ext nbddp\n%ddp open -n {nprocs} --device cpu")
    own_notebook.ok(SETUP)
    for case in range(CASES):
        kind, before, failures = rng.choice(KINDS), rng.randrange(3), rng.choice([1, 1, 2])
        cells = FAILURES[:-1] if "static" in kind else FAILURES  # static graphs can't accumulate
        cell = rng.choice([*cells, *ENDLESS])
        own_notebook.ok(f"model = make({kind!r}); optimizer = torch.optim.Adam(model.parameters())")
        own_notebook.ok(f"for s in range({before}): step(s)")
        for _ in range(failures):
            failed = cell.format(who=rng.randrange(nprocs), seed=rng.randrange(99), n=rng.choice([2, 3]))
            if cell in ENDLESS:
                interrupt(own_notebook, failed, 0.02 + rng.random() * 0.4)
            else:
                assert own_notebook.cell(failed).evalue == "boom", (case, failed)
        reply = own_notebook.cell("all([is_right(seed) for seed in range(50, 54)])")
        if not reply.shown.endswith("True\n"):  # torch has warned, perhaps
            wrong.append((case, kind, before, failed, reply.shown, reply.traceback))
    own_notebook.ok("%ddp close")
    assert not wrong
