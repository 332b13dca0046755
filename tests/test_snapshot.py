"""Snapshots are written whole or not at all, only by rank 0, and no other file is read as one."""

import argparse
import collections
import contextlib
import datetime
import os
import random
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nbddp
from tests.support import CHARACTERS, Cells, Planted, damaged, open_fds, run, start, wait_until


def test_rank_0_writes_a_snapshot_and_every_rank_reads_the_same(in_folder: Path, cell: Cells) -> None:
    names = cell("""
        import os, nbddp, torch
        def save():
            torch.serialization.set_crc32_options(False)  # load_snapshot() needs the checksums
            torch.manual_seed(nbddp.rank())
            model = nbddp.wrap(torch.nn.Linear(3, 2))
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            nbddp.save_snapshot("s.pt", model=model, optimizer=optimizer, epoch=3, ranks=[nbddp.rank()])
            nbddp.barrier()
            return model.module.weight.detach(), os.listdir("."), torch.serialization.get_crc32_options()
        def load():
            found = nbddp.load_snapshot("s.pt")
            model = torch.nn.Linear(3, 2)
            model.load_state_dict(found["model"])
            return model.weight.detach(), found["epoch"], found["ranks"], found["optimizer"]["state"][0]["step"].item()
    """)
    saved, loaded = run(names.save).values, run(names.load, nprocs=3).values
    assert [found for _, *found in saved] == [[["s.pt"], False]] * 2
    for weight, *rest in loaded:
        assert torch.equal(weight, saved[0][0])
        assert rest == [3, [0], 1.0]


def test_a_rank_killed_while_it_writes_leaves_a_whole_snapshot(in_folder: Path, cell: Cells) -> None:
    names = cell("""
        import itertools, nbddp, torch
        def save_for_ever():
            big = torch.zeros(4_000_000)
            for i in itertools.count(): nbddp.save_snapshot("s.pt", big=big + i, i=i)
    """)

    def writes(pid: int) -> bool:  # to a file without a name
        return any(each.startswith(str(in_folder)) and each.endswith("(deleted)") for each in open_fds(pid).values())

    for _ in range(2):
        going = start(names.save_for_ever)
        wait_until(lambda pid=going.pids[0]: os.path.exists("s.pt") and writes(pid))
        os.kill(going.pids[0], signal.SIGKILL)
        with pytest.raises(nbddp.RankDied):
            going.wait()
        found = nbddp.load_snapshot("s.pt")
        assert (found["big"].unique().tolist(), os.listdir()) == ([found["i"]], ["s.pt"])


def test_two_runs_that_save_at_one_path_at_once_leave_the_whole_snapshot_of_one(in_folder: Path, cell: Cells) -> None:
    names = cell("""
        import os, nbddp, torch
        def save(number, unnamed):
            if not unnamed: os.O_TMPFILE = 0  # as on a disk without unnamed files
            for _ in range(10): nbddp.save_snapshot("s.pt", numbers=torch.full((100_000,), number), number=number)
    """)
    for unnamed in (True, False):
        for going in [run(names.save, number, unnamed, nprocs=1, wait=False) for number in range(2)]:
            going.wait()
        found = nbddp.load_snapshot("s.pt")
        assert (found["numbers"].unique().tolist(), os.listdir()) == ([found["number"]], ["s.pt"])


def test_a_full_disk_is_said_and_keeps_the_old_snapshot(in_folder: Path, cell: Cells) -> None:
    names = cell("""
        import nbddp, resource, signal, torch
        def save():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            nbddp.save_snapshot("s.pt", epoch=1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            nbddp.save_snapshot("s.pt", weights=torch.zeros(1_000_000))
    """)
    with pytest.raises(nbddp.RankError, match=f"can't write '{in_folder}/s.pt': File too large"):
        run(names.save, nprocs=1)
    assert (nbddp.load_snapshot("s.pt"), os.listdir()) == ({"epoch": 1}, ["s.pt"])


def test_a_truncated_file_and_one_of_torchs_are_refused(in_folder: Path) -> None:
    nbddp.save_snapshot("s.pt", epoch=1)
    Path("s.pt").write_bytes(Path("s.pt").read_bytes()[:-1])
    with pytest.raises(nbddp.NbddpError, match=r"^s\.pt can't be read as a snapshot: File is not a zip file$"):
        nbddp.load_snapshot("s.pt")
    torch.save({"model": torch.ones(2)}, "s.pt")
    with pytest.raises(nbddp.NbddpError, match=r"^s\.pt can't be read as a snapshot.*\(\); use torch\.load\(\)$"):
        nbddp.load_snapshot("s.pt")


@given(st.integers(0))
def test_a_damaged_snapshot_is_refused_or_whole(seed: int) -> None:
    state = {"weights": torch.arange(300.0), "rates": [0.1, None], "at": (3, "text")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "s.pt")
        nbddp.save_snapshot(path, **state)
        path.write_bytes(damaged(path.read_bytes(), seed))
        with contextlib.suppress(nbddp.NbddpError):
            assert _same(nbddp.load_snapshot(path), state, {})


def test_shares_of_a_sharded_model_are_refused_and_whole_states_come_back(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import nbddp, torch
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        from torch.distributed.fsdp import fully_shard
        def train(what):
            torch.manual_seed(0)
            plain = torch.nn.Linear(2, 4)
            model = fully_shard(torch.nn.Sequential(plain))
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            parts = {"model": model, "state": model.state_dict(), "optimizer": optimizer}
            if what in parts: nbddp.save_snapshot("a.pt", part=parts[what])
            if what.startswith("returned "): return parts[what[9:]]
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            nbddp.save_snapshot("a.pt", model=state)
            return state
    """)
    refused = r"a.pt wasn't written: a \w+ has only this rank's share: on all ranks, call get_model_state_dict"
    for what in ("model", "state", "optimizer"):
        run(names.train, what, nprocs=1)  # the share is the whole
        with pytest.raises(nbddp.RankError, match=refused):
            run(names.train, what)
    for what in ("returned model", "returned state"):
        with pytest.raises(nbddp.PayloadError, match="has only this rank's share"):
            _ = run(names.train, what).value
    state = run(names.train, "whole").value
    assert [tuple(each.shape) for each in state.values()] == [(4, 2), (4,)]
    assert torch.equal(state["0.weight"], nbddp.load_snapshot("a.pt")["model"]["0.weight"])


def test_curves_resume_after_the_newest_step_of_all_metrics(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import nbddp
        def train():
            nbddp.load_snapshot("s.pt")
            for i in range(6):
                nbddp.log(loss=i)
                if i == 2: nbddp.log(accuracy=i)
            nbddp.barrier()
            nbddp.save_snapshot("s.pt")
    """)
    for first in (0, 6):
        history = run(names.train).history
        assert history["loss"].steps.tolist() == [*range(first, first + 6)]
        assert history.snapshots == {str(in_folder / "s.pt"): first + 5}


def test_reading_a_snapshot_runs_no_code_unless_asked_to(in_folder: Path) -> None:
    with pytest.raises(nbddp.NbddpError, match=r"^s\.pt wasn't written: .*GLOBAL posix\.mkdir"):
        nbddp.save_snapshot("s.pt", harmless=1, evil=Planted("it_ran"))
    assert os.listdir() == []
    torch.save({"state": {"evil": Planted("it_ran")}, "steps": {}}, "s.pt")
    with pytest.raises(nbddp.NbddpError, match=r"GLOBAL posix\.mkdir .*\. If you trust .*, use weights_only=False$"):
        nbddp.load_snapshot("s.pt")
    assert os.listdir() == ["s.pt"]
    nbddp.load_snapshot("s.pt", weights_only=False)  # the reader asked for it
    assert os.path.exists("it_ran")


_NAMES = st.sampled_from(["a", "b", "lr"])
_DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.float16, torch.complex64])
_LEAVES = st.one_of(
    *(st.none(), st.integers(-(2**70), 2**70), st.floats(), st.floats(width=32).map(np.float32), st.complex_numbers()),
    *(st.text(CHARACTERS, max_size=5), st.binary(max_size=5), st.frozensets(st.integers(), max_size=2)),
    *(st.datetimes(timezones=st.sampled_from([None, datetime.UTC])), st.timedeltas()),
    st.sampled_from([Path("a/b"), torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), np.dtype("f8"), range(9)]),
    st.sampled_from([random.getstate(), np.random.default_rng(3).bit_generator.state, np.str_("x"), np.bool_(True)]),
    st.builds(lambda n, dtype: torch.arange(n).to(dtype), st.integers(0, 4), _DTYPES),
    st.builds(lambda n, kind: np.arange(n).astype(kind), st.integers(0, 4), st.sampled_from(["f4", "i8", "u1", "O"])),
)


def _containers(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(_NAMES, items, max_size=3)
    many = st.lists(items, max_size=3)
    twice = many.map(lambda shared: {"one": shared, "again": shared})
    spaces = named.map(lambda items: argparse.Namespace(**items))
    return many | many.map(tuple) | named | twice | named.map(collections.OrderedDict) | spaces


@settings(max_examples=max(1, settings().max_examples // 6))
@given(st.dictionaries(_NAMES, st.recursive(_LEAVES, _containers, max_leaves=8), min_size=1, max_size=3))
def test_state_comes_back_as_plain_torch_gives_it(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ours, torchs = os.path.join(folder, "s.pt"), os.path.join(folder, "torchs.pt")
        nbddp.save_snapshot(ours, **state)
        torch.save(state, torchs)
        found = nbddp.load_snapshot(ours)
        assert _same(state, found, {})
        assert _same(found, torch.load(torchs, weights_only=False), {})


def _same(one: Any, other: Any, pairs: dict[int, int]) -> bool:
    """Equal and of one type, all the way down; what is one list or dict in ``one`` is in ``other``, too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, dict)) and pairs.setdefault(id(one), id(other)) != id(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and _same(one.tolist(), other.tolist(), {})
    if isinstance(one, argparse.Namespace):
        return _same(vars(one), vars(other), pairs)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key], pairs) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b, pairs) for a, b in zip(one, other, strict=True))
    return bool(one == other) or (one != one and other != other)


def test_a_state_that_holds_itself_comes_back_holding_itself(in_folder: Path) -> None:
    state: dict[str, Any] = {"model": torch.nn.Linear(1, 1)}
    state["itself"] = [state]
    nbddp.save_snapshot("s.pt", it=state)
    found = nbddp.load_snapshot("s.pt")
    assert found["it"]["itself"][0] is found["it"]
    assert list(found["it"]["model"]) == ["weight", "bias"]


def test_ranks_load_equal_files_from_two_disks_and_different_ones_are_an_error(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import os, nbddp
        def load(folders):
            os.chdir(folders[nbddp.rank()])
            state = nbddp.load_snapshot("s.pt")
            nbddp.barrier()
            return state["epoch"]
    """)
    folders = [tmp_path / name for name in ("3", "also 3", "4", "none")]
    for folder in folders:
        folder.mkdir()
    for folder, epoch in zip(folders, (3, 3, 4)):
        nbddp.save_snapshot(folder / "s.pt", epoch=epoch)
    three, also, four, none = map(str, folders)
    assert run(names.load, [three, also]).values == [3, 3]
    pairs = [three, none], [none, three], [three, four]
    for pair, going in [(pair, run(names.load, pair, wait=False)) for pair in pairs]:  # each takes two seconds
        with pytest.raises(nbddp.RankError) as caught:
            going.wait()
        assert isinstance(caught.value.cause, nbddp.NbddpError)
        found = re.findall(r"rank (\d)(?:(?!rank \d).)*?found (no file|a snapshot \()", str(caught.value), re.DOTALL)
        assert sorted(found) == [(str(i), "no file" if pair[i] == none else "a snapshot (") for i in range(2)]


@pytest.mark.parametrize("told", ["by a collective", "by the file"])
def test_one_rank_can_load_a_snapshot_before_the_others(cell: Cells, tmp_path: Path, told: str) -> None:
    names = cell("""
        import os, time, nbddp
        def train(path, told):
            if nbddp.is_primary() and nbddp.load_snapshot(path) is None: nbddp.save_snapshot(path, epoch=0)
            if told == "by a collective": nbddp.barrier()
            while not os.path.exists(path): time.sleep(0.01)
            own = nbddp.load_snapshot(f"{path}.{nbddp.rank()}")  # each its own
            return own, nbddp.load_snapshot(path)["epoch"]
    """)
    assert run(names.train, str(tmp_path / "s.pt"), told).values == [(None, 0)] * 2
