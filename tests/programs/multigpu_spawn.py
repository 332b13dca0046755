"""The official series' second part: mp.spawn, a port of its own, the function gets its rank as the first argument."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from report import checksum, write
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def ddp_setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group(backend="gloo", rank=rank, world_size=world_size)


class ToyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = torch.nn.Linear(20, 10)
        self.net2 = torch.nn.Linear(10, 1)

    def forward(self, x):
        return self.net2(torch.relu(self.net1(x)))


def main(rank, world_size, epochs, port, out):
    torch.set_num_threads(1)
    ddp_setup(rank, world_size, port)
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(256, 20), torch.rand(256, 1))
    loader = DataLoader(data, 32, sampler=DistributedSampler(data, seed=3))
    torch.manual_seed(rank)  # DDP sends rank 0's weights to all
    model = DDP(ToyModel())
    before = checksum(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    write(out, losses=losses, before=before, after=checksum(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    port, out = sys.argv[1:]
    mp.spawn(main, args=(2, 3, port, out), nprocs=2)
