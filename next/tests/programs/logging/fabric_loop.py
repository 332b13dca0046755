"""Lightning Fabric's loop, with its CSV logger."""

import torch
from lightning_fabric import Fabric
from lightning_fabric.loggers import CSVLogger

logger = CSVLogger("fabric", flush_logs_every_n_steps=1)
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", loggers=logger)
fabric.launch()
fabric.seed_everything(1)

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fabric.setup(model, optimizer)
x = torch.randn(64, 4, device=fabric.device)

for iteration in range(12):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    fabric.backward(loss)
    optimizer.step()
    fabric.log("loss", loss, step=iteration)
    fabric.log_dict({"weight": model.weight.norm(), "bias": model.bias.item()}, step=iteration)
logger.finalize("success")
