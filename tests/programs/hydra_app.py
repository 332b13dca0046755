"""A program that hydra configures: it looks for its configuration beside its own file."""

import hydra
import torch
import torch.distributed as dist
from report import checksum, write
from torch.nn.parallel import DistributedDataParallel as DDP


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(4, 1))
    before = checksum(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    losses = []
    for _ in range(config.steps):
        loss = model(torch.rand(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    write(config.out, losses=losses, before=before, after=checksum(model), config={"lr": config.lr})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
