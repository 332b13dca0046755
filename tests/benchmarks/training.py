"""Steps per second: under nbddp with the panel and ``log`` at every step, beside torchrun without logging."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch

import nbddp
from tests.benchmarks.measure import Table

RANKS = 2
STEPS = {"mlp": 10_000, "cnn": 1_200}  # some 20 s: what happens once, at the start, weighs as in real training


def model_and_batch(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A small MLP, the worst case for overhead, or a CNN on images of MNIST's size."""
    if name == "mlp":
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)), torch.randn(
            32, 64
        )
    layers = [torch.nn.Conv2d(1, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU()]
    layers += [torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(512, 10)]
    return torch.nn.Sequential(*layers), torch.randn(32, 1, 28, 28)


def train(name: str, log: bool) -> float:
    """Train in the process group that is there. Returns steps per second on this rank."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = model_and_batch(name)
    model = torch.nn.parallel.DistributedDataParallel(model)
    y = torch.randint(10, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS[name] + 20):
        if step == 20:
            began = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if log:
            nbddp.log(loss=loss)
    return STEPS[name] / (time.perf_counter() - began)


CELL = """
import nbddp
from tests.benchmarks.training import RANKS, train
run = nbddp.run(train, ({name!r}, True), nprocs=RANKS, device="cpu", show={show})
print("steps/s", *run.values)
"""


def under_nbddp(name: str, *, show: bool) -> float:
    """In a real kernel, with the panel drawn or without; logging at every step."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL.format(name=name, show=show))])
    NotebookClient(notebook, timeout=600).execute()
    texts = [output["text"] for output in notebook.cells[0].outputs if output.output_type == "stream"]
    return _slowest("".join(texts))


def under_torchrun(name: str) -> float:
    """The same function, without logging."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}", __file__, name]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    # No check: torch 2.13 now and then aborts at exit ("terminate called without an active exception").
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env)
    return _slowest(done.stdout)


def _slowest(text: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith("steps/s")]
    return min(float(value) for line in lines for value in line.split()[1:])


def measure(rounds: int) -> list[Table]:
    """In turn, so that a machine's drift meets both."""
    tables = []
    for name in STEPS:
        table = Table(f"Training, {name}, {RANKS} ranks", unit="steps/s", scale=1)
        for _ in range(rounds):
            table.add("torchrun, no logging", under_torchrun(name))
            table.add("nbddp.run, log at every step, panel", under_nbddp(name, show=True))
            table.add("nbddp.run, log at every step", under_nbddp(name, show=False))
        tables.append(table)
    return tables


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    sys.stdout.write(f"steps/s {train(sys.argv[1], log=False)}\n")  # in one piece: the ranks share the pipe
    torch.distributed.destroy_process_group()
