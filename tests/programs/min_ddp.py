"""As min_DDP: parses its arguments in the worker, a helper module beside it, reduces and gathers its metrics."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from report import checksum, write
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--out", required=True)


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def worker():
    args = parser.parse_args()
    dist.init_process_group("gloo", init_method="env://")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    features = torch.randn(192, 8)
    data = TensorDataset(features, (features.sum(1) > 0).long())
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    before = checksum(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            average_gradients(model)
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append((total / world_size).item())
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    token = torch.tensor([float(rank)])
    if rank == 0:
        dist.send(token, dst=1)
    elif rank == 1:
        dist.recv(token, src=0)
    write(args.out, losses=losses, before=before, after=checksum(model), token=token.item())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    worker()
