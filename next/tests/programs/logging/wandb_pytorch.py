"""W&B's "Track metrics with PyTorch", shortened; also to TensorBoard, under the same names."""

import os

import torch
import wandb
from torch.utils.tensorboard import SummaryWriter


def train(model, x, y, config):
    optimizer = torch.optim.Adam(model.parameters(), lr=config["learning_rate"])
    writer = SummaryWriter("tensorboard")
    example_ct = 0
    for epoch in range(config["epochs"]):
        for batch, targets in zip(x.split(config["batch_size"]), y.split(config["batch_size"])):
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            example_ct += len(batch)
            wandb.log({"epoch": epoch, "loss": loss, "norms": {"weight": model.weight.norm().item()}})
            writer.add_scalar("loss", loss, example_ct)
        wandb.log({"note": "end of epoch", "val/loss": torch.nn.functional.mse_loss(model(x), y).item()}, commit=False)
        wandb.log({"examples": example_ct})
    writer.close()


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(128, 4)
    if os.environ.get("RANK", "0") == "0":
        with wandb.init(project="pytorch-intro", mode="offline", config={"epochs": 3, "batch_size": 32}) as run:
            train(torch.nn.Linear(4, 1), x, x.sum(1, keepdim=True), {**run.config, "learning_rate": 0.1})
