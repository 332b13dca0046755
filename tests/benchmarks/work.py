"""What the ranks do: plain torch.distributed code, the same under every candidate; all that it uses is in here.

Executed as a notebook's cell, and imported by what cannot be given a cell's function. Times are monotonic, which
on Linux is one clock for all processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

# ---------------------------------------------------------------------------- how each peer calls it


def by_hand(rank, nprocs, port, function, *args):
    """Under mp.spawn."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=nprocs)
    function(*args)
    dist.destroy_process_group()


def by_hand_with_result(rank, nprocs, port, queue, function, *args):
    """The same, and its result through a queue, whose process has to outlive the reading of a tensor."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=nprocs)
    queue.put(function(*args))
    dist.barrier()
    while not queue.empty():
        time.sleep(0.0005)
    dist.destroy_process_group()


def under_accelerate(function, *args):
    """Under its launchers: the process group comes with the state."""
    from accelerate import PartialState

    PartialState(cpu=True)
    function(*args)


def under_fabric(fabric, function, *args):
    return function(*args)


def join_group(rank, nprocs, port):
    """In an engine that is kept."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=nprocs)


def open_group():
    """In a script: gloo, or NCCL on the rank's own GPU if NBDDP_BENCH_DEVICE says so."""
    if os.environ.get("NBDDP_BENCH_DEVICE") == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")


def torchrun(nprocs, function, *args, options=()):
    """What a user does in a terminal. Its exit code says nothing: torch 2.13 now and then aborts at exit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nprocs}", *options]
    command += ["-m", "tests.benchmarks.scripted", function, *map(str, args)]
    # In torch 2.13, gloo's ranks do not find each other after a restart in the store that the agents share.
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env)


# ---------------------------------------------------------------------------- what the ranks do


def stamp(path, text=""):
    """A line for whoever measures."""
    with open(path, "a") as file:
        file.write(f"{time.monotonic()} {os.getpid()} {text}\n")


def device():
    """Where this rank's tensors are: on its GPU if its group has NCCL."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def wait_for_the_device():
    if device().type == "cuda":
        torch.cuda.synchronize()


def together():
    if dist.is_initialized():
        total = torch.ones(1, device=device())
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size(), total
    return dist.get_rank() if dist.is_initialized() else 0


def all_reduce(path):
    together()
    stamp(path)


def touch(data):
    """Read a byte of every page, and copy nothing."""
    for part in [data[name].to_numpy() for name in data] if hasattr(data, "to_numpy") else [data]:
        flat = torch.as_tensor(part).reshape(-1)
        assert torch.isfinite(flat[:: 4096 // flat.element_size()]).all()
    together()


def make(kind, nbytes):
    """A result of that size."""
    if kind == "tensor":
        return torch.zeros(nbytes // 4)
    import numpy

    return numpy.zeros(nbytes // 4, dtype=numpy.float32)


def make_and_drop(kind, nbytes):
    make(kind, nbytes)


def one_step():
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()


def train_one_step(path):
    """What imports torch._dynamo: DistributedDataParallel and an optimizer."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    stamp(path)


def hold(path):
    """Train one step, say what memory is this process's own, and stay until all have been looked at."""
    one_step()
    together()
    found = {}
    with open("/proc/self/smaps_rollup") as file:
        for line in file:
            if line.startswith(("Private_", "Pss:")):
                name = line.split("_")[0].split(":")[0]
                found[name] = found.get(name, 0) + int(line.split()[1]) * 1024
    stamp(path, f"{found['Private']} {found['Pss']}")
    while not os.path.exists(path + ".go"):
        time.sleep(0.01)
    together()


# ---------------------------------------------------------------------------- how it ends


def raise_in(failing, path, others):
    """That rank raises; the others wait in a collective, or sleep."""
    rank = together()
    if rank == failing:
        time.sleep(0.3)  # until the others are where they will be found
        stamp(path)
        raise ValueError("a bad batch")
    if others == "in a collective":
        dist.all_reduce(torch.ones(1))
    for _ in range(200):
        time.sleep(0.1)


def go_on(path):
    """Until somebody ends it."""
    together()
    stamp(path)
    while True:
        time.sleep(0.05)


def resume(path, snapshot, die):
    """Five steps with a snapshot after each; rank 1 is killed once, after the third."""
    import nbddp

    rank = together()
    state = nbddp.load_snapshot(snapshot)
    first = state["step"] + 1 if state else 0
    weights = torch.zeros(1000)
    for step in range(first, 5):
        together()
        if rank == 0:
            nbddp.save_snapshot(snapshot, step=step, weights=weights)
        stamp(path, f"{rank} {step} {'resumed' if state else 'first'}")
        if die and step == 2 and rank == 1 and not state:
            os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------------- training


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.before = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        layers = (torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.GELU())
        self.mlp = torch.nn.Sequential(*layers, torch.nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 4, -1).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class CharGPT(torch.nn.Module):
    """Logits of the next of 64 characters; two blocks, 64 wide, 64 characters back."""

    def __init__(self):
        super().__init__()
        self.token, self.place = torch.nn.Embedding(64, 64), torch.nn.Embedding(64, 64)
        self.blocks = torch.nn.Sequential(Block(64), Block(64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 64))

    def forward(self, text):
        return self.blocks(self.token(text) + self.place(torch.arange(text.shape[1]))).transpose(1, 2)


def notebooks_gpt():
    """The GPT of notebooks/chargpt.ipynb, of the size for GPUs where there is one, and a batch of its text."""
    with open("notebooks/chargpt.ipynb") as file:
        cells = ["".join(cell["source"]) for cell in json.load(file)["cells"] if cell["cell_type"] == "code"]
    sizes = "context, width, layers, heads = 64, 64, 2, 4"
    assert sizes in cells[0]
    if device().type == "cuda":
        cells[0] = cells[0].replace(sizes, "context, width, layers, heads = 256, 384, 6, 6")
    found = {}
    exec("\n".join(cells[:2]), found)
    batch, context, tokens = 64 if device().type == "cuda" else found["batch"], found["context"], found["tokens"]
    pieces = torch.stack([tokens[i : i + context + 1] for i in range(0, batch * 97, 97)])
    return ClassesSecond(found["GPT"]()), pieces[:, :-1], pieces[:, 1:]


class ClassesSecond(torch.nn.Module):
    """Gives cross_entropy the classes where it looks for them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).transpose(1, 2)


def model_and_batch(name):
    """A small MLP, the worst case for overhead; a CNN on images of MNIST's size; a small GPT; the notebook's GPT."""
    if name == "chargpt":
        return notebooks_gpt()
    if name == "gpt":
        text = torch.randint(64, (16, 65))
        return CharGPT(), text[:, :-1], text[:, 1:]
    if name == "mlp":
        layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)]
        return torch.nn.Sequential(*layers), torch.randn(32, 64), torch.randint(10, (32,))
    layers = [torch.nn.Conv2d(1, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU()]
    layers += [torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(512, 10)]
    return torch.nn.Sequential(*layers), torch.randn(32, 1, 28, 28), torch.randint(10, (32,))


def train(name, steps, turns, path, log, me, jobs):
    """Train in turn with the other jobs; rank 0 writes the steps per second of each turn."""
    if os.environ.get("NBDDP_BENCH_PINNED"):
        core = sorted(os.sched_getaffinity(0))[dist.get_rank() % len(os.sched_getaffinity(0))]
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {core})
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x, y = model_and_batch(name)
    model, x, y = model.to(device()), x.to(device()), y.to(device())
    model = torch.nn.parallel.DistributedDataParallel(model)
    if name == "chargpt":  # as one trains it on a GPU
        model = torch.compile(model)
    half = torch.autocast(device().type, torch.bfloat16) if name == "chargpt" else contextlib.nullcontext()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if log:
        import nbddp
    for turn in range(-1, turns):  # the first is nobody's: what happens once
        if turn >= 0:
            wait_for(path, turn * jobs + me)
        for step in range(steps + 5):
            if step == 5:
                wait_for_the_device()
                began = time.perf_counter()
            with half:
                loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if log:
                nbddp.log(loss=loss)
        wait_for_the_device()
        if dist.get_rank() == 0:
            stamp(path, f"{me} {turn} {steps / (time.perf_counter() - began)}")
            if turn >= 0:
                give(path, turn * jobs + me + 1)


def give(path, turn):
    """It is that job's turn."""
    with open(path + ".new", "w") as file:
        file.write(str(turn))
    os.replace(path + ".new", path + ".turn")


def wait_for(path, turn):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if os.path.exists(path + ".turn"):
            with open(path + ".turn") as file:
                if file.read() == str(turn):
                    return
        time.sleep(0.02)
    raise TimeoutError("another job has not ended its turn")
