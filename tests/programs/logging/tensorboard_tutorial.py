"""PyTorch's recipe "How to use TensorBoard with PyTorch", shortened."""

import torch
from torch.utils.tensorboard import SummaryWriter

writer = SummaryWriter("runs/regression")

torch.manual_seed(0)
x = torch.arange(-5, 5, 0.1).view(-1, 1)
y = -5 * x + 0.1 * torch.randn(x.size())

model = torch.nn.Linear(1, 1)
criterion = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(10):
    y1 = model(x)
    loss = criterion(y1, y)
    writer.add_scalar("Loss/train", loss, epoch)
    writer.add_scalars("slope", {"weight": model.weight, "target": -5.0}, epoch)
    writer.add_histogram("y", y1, epoch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
writer.flush()
writer.close()
