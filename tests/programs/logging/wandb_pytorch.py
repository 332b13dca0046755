"""W&B's "Track metrics with PyTorch", shortened; also to TensorBoard, under the same names."""

import os

import torch
import wandb
from torch.utils.tensorboard import SummaryWriter

if os.environ.get("RANK", "0") == "0":
    torch.manual_seed(0)
    x = torch.randn(128, 4)
    y = x.sum(1, keepdim=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with wandb.init(project="pytorch-intro", mode="offline", config={"epochs": 3}) as run:
        writer = SummaryWriter("tensorboard")
        example_ct = 0
        for epoch in range(run.config["epochs"]):
            for batch, targets in zip(x.split(32), y.split(32)):
                loss = torch.nn.functional.mse_loss(model(batch), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                example_ct += len(batch)
                wandb.log({"epoch": epoch, "loss": loss, "norms": {"weight": model.weight.norm().item()}})
                writer.add_scalar("loss", loss, example_ct)
            val_loss = torch.nn.functional.mse_loss(model(x), y).item()
            wandb.log({"note": "end of epoch", "val/loss": val_loss}, commit=False)
            wandb.log({"examples": example_ct})
        writer.close()
