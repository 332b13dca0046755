"""As the ImageNet example: global batch, workers, augmentation, seed, schedule, resume; with nbddp's helpers."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import checksum, write
from torch.utils.data import Dataset

import nbddp

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--stop-after", type=int)
parser.add_argument("--seed", type=int, default=11)
parser.add_argument("--snapshot", default="checkpoint.pt")
parser.add_argument("--out", default=".")


class Noisy(Dataset):
    def __init__(self):
        self.x = torch.randn(160, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn(6), (self.x[i].sum() > 0).long()


def main(args):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed + nbddp.rank())
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))
    batches = nbddp.loader(
        Noisy(), 32, shuffle=True, split_batch=True, num_workers=2 // nbddp.world_size(), multiprocessing_context="fork"
    )
    model = nbddp.wrap(model)
    before = checksum(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    first, losses = 0, []
    if found := nbddp.load_snapshot(args.snapshot):
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        schedule.load_state_dict(found["schedule"])
        first = found["epoch"] + 1
    for epoch in range(first, args.epochs):
        torch.manual_seed(args.seed + 100 * epoch + nbddp.rank())
        batches.sampler.set_epoch(epoch)
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(nbddp.reduce(loss.item()))
        schedule.step()
        nbddp.save_snapshot(args.snapshot, model=model, optimizer=optimizer, schedule=schedule, epoch=epoch)
        nbddp.barrier()
        if epoch == args.stop_after:
            break
    nbddp.print(f"epochs {first} to {epoch}")
    write(args.out, losses=losses, before=before, after=checksum(model))


if __name__ == "__main__":
    main(parser.parse_args())
