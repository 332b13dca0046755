"""MLflow's "PyTorch within MLflow", shortened."""

import os

import mlflow
import torch

if os.environ.get("RANK", "0") == "0":
    torch.manual_seed(0)
    X = torch.randn(64, 4)
    dataloader = list(zip(X.split(16), (X.sum(1) > 0).long().split(16)))
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    with mlflow.start_run():
        mlflow.log_params({"epochs": 3, "optimizer": "SGD"})
        for epoch in range(3):
            for batch, (X, y) in enumerate(dataloader):
                pred = model(X)
                loss = torch.nn.functional.cross_entropy(pred, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                accuracy = (pred.argmax(1) == y).float().mean().item()
                step = batch + epoch * len(dataloader)
                mlflow.log_metric("loss", f"{loss.item():2f}", step=step)
                mlflow.log_metrics({"accuracy": accuracy, "lr": optimizer.param_groups[0]["lr"]}, step=step)
