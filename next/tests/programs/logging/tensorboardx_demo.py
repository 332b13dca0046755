"""tensorboardX's demo, shortened."""

import numpy as np
import torch
from tensorboardX import SummaryWriter

writer = SummaryWriter("runs/demo")
sample_rate = 44100

for n_iter in range(20):
    dummy_s1 = torch.rand(1)
    writer.add_scalar("data/scalar1", dummy_s1[0], n_iter)
    writer.add_scalar("data/scalar2", np.random.rand(), n_iter)
    writer.add_scalars(
        "data/scalar_group", {"xsinx": n_iter * np.sin(n_iter), "xcosx": n_iter * np.cos(n_iter)}, n_iter
    )
    if n_iter % 10 == 0:
        writer.add_text("Text", "text logged at step:" + str(n_iter), n_iter)
        writer.add_histogram("hist", np.random.rand(10), n_iter)

writer.close()
