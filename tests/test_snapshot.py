"""Snapshots are written whole or not at all, by rank 0 alone, and no other file is read as one."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
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


def test_old_partial_files_of_killed_writers_are_removed(in_folder: Path) -> None:
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


def test_a_failed_save_keeps_the_old_snapshot_and_leaves_no_partial_file(in_folder: Path) -> None:
    nbddp.save_snapshot("s.pt", epoch=1)
    with pytest.raises(nbddp.NbddpError, match=r"s\.pt was not written, .*: what is a generator"):
        nbddp.save_snapshot("s.pt", epoch=2, what=(i for i in ()))
    assert nbddp.load_snapshot("s.pt") == {"epoch": 1}
    assert os.listdir(".") == ["s.pt"]


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_truncated_file_is_refused(in_folder: Path, cut: int) -> None:
    nbddp.save_snapshot("s.pt", weights=torch.ones(1000))
    Path("s.pt").write_bytes(Path("s.pt").read_bytes()[:cut])
    with pytest.raises(nbddp.NbddpError, match=r"s\.pt cannot be read as a snapshot"):
        nbddp.load_snapshot("s.pt")


@pytest.mark.parametrize("content", [b"not a snapshot at all\n", b"PK\x03\x04 nor a zip", b"\x80\x02K\x01."])
def test_a_foreign_file_is_refused(in_folder: Path, content: bytes) -> None:
    Path("s.pt").write_bytes(content)
    with pytest.raises(nbddp.NbddpError, match=r"s\.pt"):
        nbddp.load_snapshot("s.pt")


def test_a_flipped_bit_of_a_weight_is_refused(in_folder: Path) -> None:
    nbddp.save_snapshot("s.pt", weights=torch.full((1000,), 7.0))
    whole = Path("s.pt").read_bytes()
    at = whole.index(torch.full((9,), 7.0).numpy().tobytes()) + 400
    Path("s.pt").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(nbddp.NbddpError, match=r"s\.pt cannot be read as a snapshot: Bad CRC-32"):
        nbddp.load_snapshot("s.pt")


def test_checksums_are_written_even_if_the_user_turned_them_off(in_folder: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        nbddp.save_snapshot("s.pt", weights=torch.ones(10))
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    found = nbddp.load_snapshot("s.pt")
    assert found is not None
    assert found["weights"].tolist() == [1.0] * 10


def test_a_plain_checkpoint_is_refused_with_a_remedy(in_folder: Path) -> None:
    torch.save({"model": torch.ones(2)}, "c.pt")
    with pytest.raises(nbddp.NbddpError, match=r"was not written by save_snapshot\(\); read it with torch\.load"):
        nbddp.load_snapshot("c.pt")


class Runs:
    """Unpickling it runs code."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("it_ran",)


def test_reading_a_snapshot_runs_no_code_unless_asked_to(in_folder: Path) -> None:
    with pytest.raises(nbddp.NbddpError, match="evil is a Runs"):
        nbddp.save_snapshot("s.pt", harmless=1, evil=Runs())
    assert os.listdir(".") == []
    torch.save({"nbddp snapshot": 1, "state": {"evil": Runs()}}, "s.pt")
    with pytest.raises(nbddp.NbddpError, match="weights_only"):
        nbddp.load_snapshot("s.pt")
    assert not os.path.exists("it_ran")
    nbddp.load_snapshot("s.pt", weights_only=False)  # the reader asked for it
    assert os.path.exists("it_ran")


def test_a_missing_snapshot_is_none(in_folder: Path) -> None:
    assert nbddp.load_snapshot("s.pt") is None


def test_map_location_is_applied(in_folder: Path) -> None:
    nbddp.save_snapshot("s.pt", weights=torch.ones(2))
    found = nbddp.load_snapshot("s.pt", map_location="meta")
    assert found is not None
    assert found["weights"].device.type == "meta"


def test_restarted_ranks_continue_from_the_snapshot(in_folder: Path, cell: Cells) -> None:
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


# ---------------------------------------------------------------------------- the same on all ranks

_RESUMES = """
    import os, nbddp, torch
    def train(folders, path="s.pt"):
        os.chdir(folders[nbddp.rank()])  # as hosts that share no disk
        state = nbddp.load_snapshot(path)
        nbddp.barrier()
        return state and state["epoch"]
"""


def _hosts_with(tmp_path: Path, *epochs: int | None) -> list[str]:
    """A folder for each rank, with a snapshot of that epoch."""
    folders = [tmp_path / str(rank) for rank in range(len(epochs))]
    for folder, epoch in zip(folders, epochs):
        folder.mkdir(parents=True)
        if epoch is not None:
            nbddp.save_snapshot(folder / "s.pt", epoch=epoch, weight=torch.full((3,), float(epoch)))
    return [str(folder) for folder in folders]


@pytest.mark.parametrize("epochs", [(3, None), (None, 3), (3, 4)])
def test_ranks_that_load_different_snapshots_are_an_error(
    cell: Cells, tmp_path: Path, epochs: tuple[int | None, ...]
) -> None:
    train = cell(_RESUMES).train
    with pytest.raises(nbddp.RankError) as caught:
        run(train, _hosts_with(tmp_path, *epochs))
    assert isinstance(caught.value.cause, nbddp.NbddpError)
    what = {None: "found no file there", 3: r"loaded a snapshot \(\w{8}\)", 4: r"loaded a snapshot \(\w{8}\)"}
    one, other = (f"rank {rank} {what[epoch]}" for rank, epoch in enumerate(epochs))
    text = str(caught.value.cause)
    assert re.search(f"{one}, but {other}|{other}, but {one}", text), text
    assert "different weights. Put a barrier()" in text  # the ranks are on one host


def test_ranks_can_load_equal_files_from_different_disks(cell: Cells, tmp_path: Path) -> None:
    assert run(cell(_RESUMES).train, _hosts_with(tmp_path, 3, 3)).values == [3, 3]
    assert run(cell(_RESUMES).train, [str(tmp_path)] * 2, "none.pt").values == [None, None]


def test_snapshots_are_compared_when_the_function_opens_its_group_later(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import os, nbddp, torch.distributed as dist
        def train(folders):
            os.chdir(folders[nbddp.rank()])
            nbddp.load_snapshot("s.pt")
            dist.init_process_group("gloo")
    """)
    with pytest.raises(nbddp.RankError, match="different weights"):
        run(names.train, _hosts_with(tmp_path, 3, None), init=False)
    run(names.train, [_hosts_with(tmp_path / "equal", 3)[0]] * 2, init=False)


def test_one_rank_can_load_a_snapshot_before_the_others(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import nbddp
        def train(path):
            if nbddp.is_primary() and nbddp.load_snapshot(path) is None:
                nbddp.save_snapshot(path, epoch=0)
            nbddp.barrier()
            first = nbddp.load_snapshot(path)["epoch"]
            nbddp.barrier()
            nbddp.save_snapshot(path, epoch=1)
            own = nbddp.load_snapshot(f"{path}.{nbddp.rank()}")  # each its own
            nbddp.barrier()
            return first, own, nbddp.load_snapshot(path)["epoch"]
    """)
    assert run(names.train, str(tmp_path / "s.pt")).values == [(0, None, 1)] * 2


def test_wrap_makes_a_frozen_model_equal_on_all_ranks(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def train():
            model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).requires_grad_(False)
            model[1].running_mean.fill_(nbddp.rank())
            mine = model[0].weight.clone()
            assert nbddp.wrap(model) is model
            return mine, model[0].weight, model[1].running_mean
    """)
    values = run(names.train).values
    assert not torch.equal(values[0][0], values[1][0])
    for _, weight, mean in values:
        assert torch.equal(weight, values[0][0])
        assert mean.tolist() == [0.0, 0.0]
