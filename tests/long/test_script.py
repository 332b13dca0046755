"""Scripts whose processes start processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import Cells, free_port
from tests.test_script import script


def test_processes_that_a_script_starts_find_its_classes(in_folder: Path) -> None:
    """DataLoader's workers by fork and by spawn, and ``mp.spawn``'s."""
    (in_folder / "a.py").write_text(
        """\
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset
class Tens(Dataset):
    def __len__(self): return 2
    def __getitem__(self, i): return i * 10
def child(i, data): print(data[i])
if __name__ == "__main__":
    mp.set_start_method("spawn")
    for how in ("fork", "spawn"):
        print([b.tolist() for b in DataLoader(Tens(), num_workers=1, multiprocessing_context=how)])
    mp.spawn(child, (Tens(),), nprocs=1)
"""
    )
    assert script("a.py", nprocs=1).logs(0) == "[[0], [10]]\n" * 2 + "0\n"


SPAWNS = """
import os, sys
import torch, torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
def main(rank, world_size, port, out):
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(rank)  # DDP sends rank 0's weights to all
    model = DDP(torch.nn.Linear(20, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = torch.nn.functional.mse_loss(model(torch.rand(32, 20)), torch.rand(32, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.save((losses, model.module.weight.tolist()), f"{out}/{rank}.pt")
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(main, args=(2, *sys.argv[1:]), nprocs=2)
"""


def test_a_pasted_tutorial_gives_equal_numbers(in_folder: Path, cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one word changed; and as it is, as a script of one process."""
    (in_folder / "train.py").write_text(SPAWNS)
    found = []
    for how in ("python", "run_script", "cell"):
        (in_folder / how).mkdir()
        argv = [str(free_port()), how]
        if how == "python":
            subprocess.run([sys.executable, "train.py", *argv], check=True, timeout=100)
        elif how == "run_script":
            script("train.py", argv, nprocs=1)
        else:
            monkeypatch.setattr(sys, "argv", ["kernel", *argv])
            cell("import nbddp\n" + SPAWNS.replace("    mp.spawn(", "    nbddp.spawn("))
        found.append([torch.load(f"{how}/{rank}.pt") for rank in range(2)])
    (losses, weights), (other_losses, same_weights) = found[0]
    assert losses != other_losses
    assert (weights, found) == (same_weights, [found[0]] * 3)
