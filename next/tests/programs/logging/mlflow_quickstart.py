"""MLflow's "PyTorch within MLflow", shortened."""

import os

import mlflow
import torch

epochs = 3


def train(dataloader, model, loss_fn, metrics_fn, optimizer, epoch):
    for batch, (X, y) in enumerate(dataloader):
        pred = model(X)
        loss = loss_fn(pred, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step = batch + epoch * len(dataloader)
        mlflow.log_metric("loss", f"{loss.item():2f}", step=step)
        mlflow.log_metrics({"accuracy": metrics_fn(pred, y), "lr": optimizer.param_groups[0]["lr"]}, step=step)


if os.environ.get("RANK", "0") == "0":
    torch.manual_seed(0)
    X = torch.randn(64, 4)
    dataloader = list(zip(X.split(16), (X.sum(1) > 0).long().split(16)))
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    with mlflow.start_run():
        mlflow.log_params({"epochs": epochs, "optimizer": "SGD"})
        for t in range(epochs):
            train(
                dataloader,
                model,
                torch.nn.functional.cross_entropy,
                lambda pred, y: (pred.argmax(1) == y).float().mean().item(),
                optimizer,
                t,
            )
