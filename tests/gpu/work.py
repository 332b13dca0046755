"""What the ranks and cells of the parts do."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nbddp


def stamp(path: str, text: str = "") -> None:
    """A line with the time and this process's id."""
    with open(path, "a") as file:
        file.write(f"{time.monotonic()} {os.getpid()} {text}\n")


def backend_and_device() -> tuple[str, str]:
    return dist.get_backend(), str(nbddp.device())


def hold(path: str, nbytes: int, end: str) -> int:
    """Take memory of the device, say so, and end that way: ``return``, ``raise`` or ``stay``."""
    taken = torch.ones(nbytes // 4, device=nbddp.device())
    taken.sum().item()
    stamp(path)
    if end == "raise":
        raise ValueError("on purpose")
    while end == "stay" and not Path(path + ".go").exists():
        time.sleep(0.05)
    return int(taken.numel())


def collectives() -> dict[str, Any]:
    """One of each, on all ranks: what they give."""
    rank, size, device = nbddp.rank(), nbddp.world_size(), nbddp.device()
    x = torch.full((3,), rank + 1.0, device=device)
    dist.all_reduce(x)
    seen: list[Any] = [None] * size
    dist.all_gather_object(seen, rank)
    nbddp.barrier()
    with nbddp.main_first():
        pass
    return {
        "all_reduce": x.tolist(),
        "gather_object": seen,
        "reduce": nbddp.all_reduce(float(rank)),
        "reduce half": float(nbddp.all_reduce(torch.ones(2, device=device, dtype=torch.bfloat16), "sum")[0]),
        "gather": [float(each.sum()) for each in nbddp.all_gather(torch.full((rank + 1,), 1.0, device=device))],
        "broadcast": nbddp.broadcast(torch.arange(3, device=device) * (rank + 1)).tolist(),
    }


def fit(steps: int, seed: int = 0) -> dict[str, Any]:
    """Train on batches of which each rank has its share. The weights are those of one process, up to rounding."""
    torch.manual_seed(seed)
    model = nbddp.wrap(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    rank, size, device = nbddp.rank(), nbddp.world_size(), nbddp.device()
    for _ in range(steps):
        x = torch.randn(24, 16, generator=generator)
        y = x[:, :1] * 2 - x[:, 1:2]
        loss = torch.nn.functional.mse_loss(model(x[rank::size].to(device)), y[rank::size].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        nbddp.log(loss=loss, reduce="mean")
    return {"loss": loss.item(), "weights": torch.cat([p.detach().flatten().cpu() for p in model.parameters()])}


def leave_group() -> float:
    """Seconds that it takes to destroy the group after a collective."""
    dist.all_reduce(torch.ones(1 << 20, device=nbddp.device()))
    if nbddp.device().type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    dist.destroy_process_group()
    return time.perf_counter() - began


def ask_for_too_much(batch: int) -> None:
    weights = torch.ones(4, device=nbddp.device())
    too_large = torch.ones(batch, 1 << 30, device=weights.device)
    print(too_large.sum())


def index_out_of_range() -> float:
    weights = torch.ones(4, device=nbddp.device())
    index = torch.tensor([0, 9], device=nbddp.device())
    return weights[index].sum().item()
