"""DistributedDataParallel, with a writer for training and one for validation on rank 0: torchrun's usual script."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.tensorboard import SummaryWriter

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 8)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(dataset)
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
if dist.get_rank() == 0:
    train_writer, val_writer = SummaryWriter("logs/train"), SummaryWriter("logs/val")

step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(dataset, batch_size=16, sampler=sampler):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            train_writer.add_scalar("loss", loss.item(), global_step=step)
        step += 1
    if dist.get_rank() == 0:
        val_loss = torch.nn.functional.mse_loss(model.module(x), x.sum(1, keepdim=True))
        val_writer.add_scalar("loss", val_loss.item(), global_step=step)
if dist.get_rank() == 0:
    train_writer.close()
    val_writer.close()
dist.destroy_process_group()
