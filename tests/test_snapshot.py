"""Snapshots: whole or not at all, by rank 0 alone, and nothing foreign is taken for one."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import nbddp
from tests.support import Cells, run, start, wait_until


def test_every_rank_writes_or_reads_something_else(in_folder: Path, cell: Cells) -> None:
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


def test_a_rank_killed_while_it_writes_leaves_a_torn_file(in_folder: Path, cell: Cells) -> None:
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
        os.kill(going._supervisor.pids()[0], signal.SIGKILL)
        with pytest.raises(nbddp.RankDied):
            going.wait()
        found = nbddp.load_snapshot("s.pt")
        assert found is not None
        assert found["big"].unique().tolist() == [found["i"]]


def test_parts_of_killed_writers_pile_up(in_folder: Path) -> None:
    old, fresh, held, foreign = (
        Path(f".{name}.partial") for name in ("s.pt.killed", "s.pt.fresh", "s.pt.held", "t.pt.other")
    )
    for path in (old, fresh, held, foreign):
        path.write_bytes(b"part")
    for path in (old, held, foreign):
        os.utime(path, (time.time() - 120,) * 2)
    with held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        nbddp.save_snapshot("s.pt", epoch=1)
    assert {path.name for path in Path().iterdir()} == {"s.pt", fresh.name, held.name, foreign.name}


def test_a_failed_save_loses_the_old_one_or_leaves_a_part(in_folder: Path) -> None:
    nbddp.save_snapshot("s.pt", epoch=1)
    with pytest.raises(nbddp.NbddpError, match=r"s\.pt was not written, .*: what is a generator"):
        nbddp.save_snapshot("s.pt", epoch=2, what=(i for i in ()))
    assert nbddp.load_snapshot("s.pt") == {"epoch": 1}
    assert os.listdir(".") == ["s.pt"]


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_torn_file_is_half_a_snapshot(in_folder: Path, cut: int) -> None:
    nbddp.save_snapshot("s.pt", weights=torch.ones(1000))
    Path("s.pt").write_bytes(Path("s.pt").read_bytes()[:cut])
    with pytest.raises(nbddp.NbddpError, match=r"s\.pt cannot be read as a snapshot"):
        nbddp.load_snapshot("s.pt")


@pytest.mark.parametrize("content", [b"not a snapshot at all\n", b"PK\x03\x04 nor a zip", b"\x80\x02K\x01."])
def test_a_foreign_file_is_taken_for_a_snapshot(in_folder: Path, content: bytes) -> None:
    Path("s.pt").write_bytes(content)
    with pytest.raises(nbddp.NbddpError, match=r"s\.pt"):
        nbddp.load_snapshot("s.pt")


def test_a_plain_checkpoint_is_taken_for_a_snapshot(in_folder: Path) -> None:
    torch.save({"model": torch.ones(2)}, "c.pt")
    with pytest.raises(nbddp.NbddpError, match=r"was not written by save_snapshot\(\); read it with torch\.load"):
        nbddp.load_snapshot("c.pt")


class Runs:
    """Unpickling it runs code."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("it_ran",)


def test_reading_a_snapshot_runs_code(in_folder: Path) -> None:
    with pytest.raises(nbddp.NbddpError, match="evil is a Runs"):
        nbddp.save_snapshot("s.pt", harmless=1, evil=Runs())
    assert os.listdir(".") == []
    torch.save({"nbddp snapshot": 1, "state": {"evil": Runs()}}, "s.pt")
    with pytest.raises(nbddp.NbddpError, match="weights_only"):
        nbddp.load_snapshot("s.pt")
    assert not os.path.exists("it_ran")
    nbddp.load_snapshot("s.pt", weights_only=False)  # the reader asked for it
    assert os.path.exists("it_ran")


def test_no_snapshot_yet_is_an_error(in_folder: Path) -> None:
    assert nbddp.load_snapshot("s.pt") is None


def test_map_location_is_forgotten(in_folder: Path) -> None:
    nbddp.save_snapshot("s.pt", weights=torch.ones(2))
    found = nbddp.load_snapshot("s.pt", map_location="meta")
    assert found is not None
    assert found["weights"].device.type == "meta"


def test_restarted_ranks_begin_at_zero(in_folder: Path, cell: Cells) -> None:
    names = cell(
        """
        import nbddp
        def train():
            found = nbddp.load_snapshot("s.pt")
            first = found["epoch"] + 1 if found else 0
            nbddp.barrier()  # rank 0 shall not save the next one while another still loads
            for epoch in range(first, 5):
                nbddp.save_snapshot("s.pt", epoch=epoch)
                nbddp.barrier()
                if epoch == 1 + 2 * nbddp.restart_count() and nbddp.rank() == 1:
                    raise RuntimeError(f"in epoch {epoch}")
                nbddp.barrier()  # rank 0 shall not be an epoch ahead
            return first, nbddp.restart_count()
        """
    )
    assert run(names.train, max_restarts=2).values == [(4, 2), (4, 2)]
    Path("s.pt").unlink()
    with pytest.raises(nbddp.RankError, match="in epoch 3"):
        run(names.train, max_restarts=1)
