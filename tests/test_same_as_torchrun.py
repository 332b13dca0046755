"""The same seed gives the weights of processes with torchrun's variables, to the bit; the official tutorial trains."""

import functools
import hashlib
import os
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nbddp
from tests.jobs import launch
from tests.support import Cells, run

# One source for all: a cell here, a script and a module there. mse_loss and not the tutorial's cross_entropy on one
# class, whose gradient is 0: its weights never move, and equal ones would prove nothing.
TRAIN = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
class MyTrainDataset(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.data = [(torch.rand(20, generator=generator), torch.rand(1, generator=generator)) for _ in range(size)]
    def __len__(self): return len(self.data)
    def __getitem__(self, index): return self.data[index]
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Dropout(0.2),
            torch.nn.Linear(64, 1))
    def forward(self, x): return self.layers(x)
def train(seed, epochs=3):
    torch.manual_seed(seed + dist.get_rank())
    model = DDP(Net())
    first = {k: v.clone() for k, v in model.module.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(dataset := MyTrainDataset(512))
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_size=32, sampler=sampler):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            losses.append(loss.item())
    return first, model.module.state_dict(), losses, dist.get_world_size(), torch.get_num_threads()
"""

WITH_HELPERS = """
import nbddp
def train_with_helpers(seed, epochs=3):
    torch.manual_seed(seed + nbddp.rank())
    model = nbddp.wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = nbddp.loader(MyTrainDataset(512), batch_size=32, shuffle=True)
    for epoch in nbddp.progress(range(epochs)):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            nbddp.log(loss=loss)
    return model.module.state_dict()
"""


def _digest(state: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()


def test_weights_equal_plain_processes_to_the_bit(cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launcher(folder: Path, path: Path) -> None:
        launch(folder, 2, main=functools.partial(runpy.run_path, str(path)))

    weights_equal(cell, tmp_path, monkeypatch, 2, launcher)


def weights_equal(
    cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, launcher: Callable[[Path, Path], None]
) -> None:
    """Those of a script, of a cell with its own seed or nbddp's, and of one with the helpers, which are thin names."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "train_script.py"
    save = f"torch.save(result, r'{tmp_path}/%d.pt' % dist.get_rank())\ndist.destroy_process_group()\n"
    path.write_text(TRAIN + "\ndist.init_process_group('gloo')\nresult = train(7)\n" + save)
    launcher(tmp_path, path)
    theirs = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(size)]
    nbddp.run_script(path, nprocs=size, device="cpu", show=False)
    scripts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    ours = run(cell(TRAIN).train, 7, nprocs=size).values
    seeded = run(cell(TRAIN.replace("torch.manual_seed(seed + dist.get_rank())", "")).train, 7,
                 nprocs=size, seed=7).values  # fmt: skip
    helped = run(cell(TRAIN + WITH_HELPERS).train_with_helpers, 7, nprocs=size)
    assert len(helped.history["loss"].values) == len(ours[0][2])
    for rank in range(size):
        assert ours[rank][3:] == theirs[rank][3:] == (size, 1)
        assert ours[rank][2] == theirs[rank][2] == seeded[rank][2] == scripts[rank][2]
        # BatchNorm's running statistics are rank 0's own, broadcast before each forward.
        assert _digest(ours[rank][0]) == _digest(theirs[rank][0])
        assert _digest(ours[rank][1]) == _digest(theirs[rank][1]) == _digest(seeded[rank][1])
        assert _digest(scripts[rank][1]) == _digest(theirs[rank][1]) == _digest(helped.values[rank])
    weight = "layers.0.weight"
    assert not torch.equal(ours[0][0][weight], ours[0][1][weight])  # it moved
    assert torch.equal(ours[0][1][weight], ours[1][1][weight])  # on all ranks alike
    assert sum(ours[0][2][-4:]) < sum(ours[0][2][:4]) / 2  # and learned


def test_the_official_tutorials_train_and_resume(cell: Cells, in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper module, a relative path, a snapshot, and the resume that repeats no finished epoch."""
    monkeypatch.syspath_prepend("")
    (in_folder / "datautils.py").write_text(TRAIN)
    names = cell("""
        import os, torch, torch.distributed as dist, nbddp
        from torch.nn.parallel import DistributedDataParallel as DDP
        class Trainer:
            def __init__(self, path):
                from datautils import MyTrainDataset
                self.rank, self.path, self.epochs_run = int(os.environ["LOCAL_RANK"]), path, 0
                torch.manual_seed(0)
                model, data = torch.nn.Linear(20, 1), MyTrainDataset(256)
                if os.path.exists(path):
                    snapshot = torch.load(path)
                    model.load_state_dict(snapshot["model"])
                    self.epochs_run = snapshot["epochs_run"]
                dist.barrier()
                self.model = DDP(model)
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
                sampler = torch.utils.data.DistributedSampler(data)
                self.data = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
            def train(self, max_epochs):
                ran = []
                for epoch in range(self.epochs_run, max_epochs):
                    self.data.sampler.set_epoch(epoch)
                    for x, y in self.data:
                        loss = torch.nn.functional.mse_loss(self.model(x), y)
                        self.optimizer.zero_grad(); loss.backward(); self.optimizer.step()
                    ran.append(epoch)
                    if self.rank == 0:
                        torch.save({"model": self.model.module.state_dict(), "epochs_run": epoch + 1}, self.path)
                return ran, self.model.module.weight.detach()
        def main(max_epochs):
            dist.init_process_group("gloo")
            result = Trainer("snapshot.pt").train(max_epochs)
            dist.destroy_process_group()
            return result
    """)
    (ran, half), _ = run(names.main, 2, init_process_group=False).values
    assert ran == [0, 1]
    (ran, resumed), (_, other) = run(names.main, 4).values
    assert ran == [2, 3]
    os.unlink("snapshot.pt")
    (ran, straight), _ = run(names.main, 4).values
    assert ran == [0, 1, 2, 3]
    assert torch.equal(resumed, straight)
    assert torch.equal(resumed, other)
    assert not torch.equal(half, resumed)
