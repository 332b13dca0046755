"""Snapshots are written whole or not at all, only by rank 0, and no other file is read as one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import nbddp
from tests.support import Cells, run, start, wait_until


def test_rank_0_writes_a_snapshot_and_every_rank_reads_the_same(in_folder: Path, cell: Cells) -> None:
    names = cell(
        """
        import os, nbddp, torch
        def save():
            torch.manual_seed(nbddp.rank())
            model = nbddp.wrap(torch.nn.Linear(3, 2))
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            nbddp.save_snapshot("s.pt", model=model, optimizer=optimizer, epoch=3, ranks=[nbddp.rank()])
            nbddp.barrier()
            return model.module.weight.detach(), os.listdir(".")
        def load():
            found = nbddp.load_snapshot("s.pt")
            model = torch.nn.Linear(3, 2)
            model.load_state_dict(found["model"])
            return model.weight.detach(), found["epoch"], found["ranks"], found["optimizer"]["state"][0]["step"].item()
        """
    )
    saved, loaded = run(names.save).values, run(names.load, nprocs=3).values
    assert [files for _, files in saved] == [["s.pt"], ["s.pt"]]
    for weight, *rest in loaded:
        assert torch.equal(weight, saved[0][0])
        assert rest == [3, [0], 1.0]


def test_a_rank_killed_while_it_writes_leaves_a_whole_snapshot(in_folder: Path, cell: Cells) -> None:
    names = cell(
        """
        import itertools, nbddp, torch
        def save_for_ever():
            big = torch.zeros(4_000_000)
            for i in itertools.count():
                nbddp.save_snapshot("s.pt", big=big + i, i=i)
        """
    )
    for _ in range(3):
        going = start(names.save_for_ever)
        wait_until(lambda: os.path.exists("s.pt") and [n for n in os.listdir(".") if n.endswith(".partial")])
        os.kill(going.pids[0], signal.SIGKILL)
        with pytest.raises(nbddp.RankDied):
            going.wait()
        found = nbddp.load_snapshot("s.pt")
        assert found is not None
        assert found["big"].unique().tolist() == [found["i"]]


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_truncated_file_is_refused(in_folder: Path, cut: int) -> None:
    nbddp.save_snapshot("s.pt", weights=torch.ones(1000))
    Path("s.pt").write_bytes(Path("s.pt").read_bytes()[:cut])
    with pytest.raises(nbddp.NbddpError, match=r"s\.pt cannot be read as a snapshot"):
        nbddp.load_snapshot("s.pt")


def test_restarted_ranks_continue_from_the_snapshot(in_folder: Path, cell: Cells) -> None:
    names = cell(
        """
        import nbddp
        def train():
            found = nbddp.load_snapshot("s.pt")
            first = found["epoch"] + 1 if found else 0
            nbddp.barrier()  # rank 0 must not save the next one while another still loads
            for epoch in range(first, 5):
                nbddp.save_snapshot("s.pt", epoch=epoch)
                nbddp.barrier()
                if epoch == 1 + 2 * nbddp.restart_count() and nbddp.rank() == 1:
                    raise RuntimeError(f"in epoch {epoch}")
                nbddp.barrier()  # rank 0 must not be an epoch ahead
            return first, nbddp.restart_count()
        """
    )
    assert run(names.train, max_restarts=2).values == [(4, 2), (4, 2)]
    Path("s.pt").unlink()
    with pytest.raises(nbddp.RankError, match="in epoch 3"):
        run(names.train, max_restarts=1)


def _folders(tmp_path: Path, *epochs: int | None) -> list[str]:
    """Make a folder for each rank, as on hosts that share no disk, with a snapshot of that epoch."""
    for rank, epoch in enumerate(epochs):
        (tmp_path / str(rank)).mkdir()
        if epoch is not None:
            nbddp.save_snapshot(tmp_path / str(rank) / "s.pt", epoch=epoch)
    return [str(tmp_path / str(rank)) for rank in range(len(epochs))]


_RESUMES = """
    import os, nbddp
    def train(folders):
        os.chdir(folders[nbddp.rank()])
        state = nbddp.load_snapshot("s.pt")
        nbddp.barrier()
        return state and state["epoch"]
"""


@pytest.mark.parametrize("epochs", [(3, None), (None, 3), (3, 4)])
def test_ranks_that_load_different_snapshots_are_an_error(
    cell: Cells, tmp_path: Path, epochs: tuple[int | None, ...]
) -> None:
    with pytest.raises(
        nbddp.RankError, match=r"(?s)rank 0 .*found.*rank 1 .*found|rank 1 .*found.*rank 0 .*found"
    ) as caught:
        run(cell(_RESUMES).train, _folders(tmp_path, *epochs))
    assert isinstance(caught.value.cause, nbddp.NbddpError)
    for epoch in epochs:
        assert ("found no file" if epoch is None else "found a snapshot (") in str(caught.value)


def test_ranks_can_load_equal_files_from_different_disks(cell: Cells, tmp_path: Path) -> None:
    assert run(cell(_RESUMES).train, _folders(tmp_path, 3, 3)).values == [3, 3]


@pytest.mark.parametrize("told", ["by a collective", "by the file"])
def test_one_rank_can_load_a_snapshot_before_the_others(cell: Cells, tmp_path: Path, told: str) -> None:
    names = cell("""
        import os, time, nbddp
        def train(path, told):
            if nbddp.is_primary() and nbddp.load_snapshot(path) is None:
                nbddp.save_snapshot(path, epoch=0)
            if told == "by a collective":
                nbddp.barrier()
            while not os.path.exists(path):
                time.sleep(0.01)
            own = nbddp.load_snapshot(f"{path}.{nbddp.rank()}")  # each its own
            return own, nbddp.load_snapshot(path)["epoch"]
    """)
    assert run(names.train, str(tmp_path / "s.pt"), told).values == [(None, 0)] * 2
