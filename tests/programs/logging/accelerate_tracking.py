"""Accelerate's examples/by_feature/tracking.py, shortened: two trackers for the same values."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(log_with=["tensorboard", "wandb"], project_dir="logs")
config = {"lr": 0.1, "num_epochs": 3, "batch_size": 16}
accelerator.init_trackers("example", config, init_kwargs={"wandb": {"mode": "offline"}})
torch.manual_seed(0)
x = torch.randn(128, 4)
train_dataloader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=config["batch_size"])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)

for epoch in range(config["num_epochs"]):
    total_loss = 0
    for inputs, targets in train_dataloader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        total_loss += loss.detach().float()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    train_loss = total_loss.item() / len(train_dataloader)
    accelerator.log({"train_loss": train_loss, "weight": model.module.weight.norm().item()}, step=epoch)
accelerator.end_training()
