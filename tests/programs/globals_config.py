"""As nanoGPT's train.py: configuration in globals, a configurator executed by relative path, gradient accumulation."""

import os

import torch
import torch.nn as nn
from report import checksum, write
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

# -----------------------------------------------------------------------------
out_dir = "out"
steps = 5
learning_rate = 1e-2
accumulate = 2
backend = "gloo"
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
with open("configurator.py") as _file:
    exec(_file.read())
config = {k: globals()[k] for k in config_keys}
# -----------------------------------------------------------------------------
ddp = int(os.environ.get("RANK", -1)) != -1
assert ddp, "not under a launcher"
init_process_group(backend=backend)
rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
torch.manual_seed(1337 + rank)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        h = self.norm(x)
        return x + self.attention(h, h, h, need_weights=False)[0]


raw_model = nn.Sequential(nn.Embedding(32, 16), Block(16), nn.Linear(16, 32))
model = DDP(raw_model)
before = checksum(raw_model)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
losses = []
for _step in range(steps):
    for micro in range(accumulate):
        model.require_backward_grad_sync = micro == accumulate - 1
        tokens = torch.randint(32, (4, 9))
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / accumulate
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
write(out_dir, losses=losses, before=before, after=checksum(raw_model), config=config)
destroy_process_group()
