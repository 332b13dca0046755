"""An exported job without a notebook: what the file holds, how its ranks meet and end, what they write."""

import contextlib
import json
import os
import pickle
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from nbddp.job import job_file
from tests.jobs import Job, launch
from tests.support import Cells, Planted, damaged, run, wait_until
from tests.test_history_properties import state

TRAIN = """
import os, pickle, sys, torch, torch.distributed as dist, nbddp
data = torch.linspace(-1, 1, 600).reshape(300, 2)
calls = 0
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x): return self.layer(x)
def count():
    global calls
    calls += 1
def train(seed, steps=24):
    torch.manual_seed(seed + nbddp.rank())
    model = nbddp.wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in nbddp.progress(range(steps), desc="step"):
        x = data[nbddp.rank() :: nbddp.world_size()][step % 50 : step % 50 + 8]
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        nbddp.log(loss=loss, reduce="mean", weight=1 + nbddp.rank())
        nbddp.log({"lr": 0.1 / (step + 1), "rank/size": nbddp.rank() * 10.0 + step})
        count()
    pickle.dumps(Net())  # by its name, which a rank's __main__ has
    assert globals() is vars(sys.modules["__main__"])
    dist.init_process_group("gloo")  # a group of its own, as most programs make one
    dist.all_reduce(total := torch.ones(1))
    return model, calls, nbddp.rank(), total.item(), str(nbddp.device()), nbddp.restart_count(), sys.argv
"""


def test_a_job_gives_what_a_run_gives_bit_for_bit(cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_equals_run(cell, tmp_path, monkeypatch, launch)


def job_equals_run(cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Callable[..., None]) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("sys.argv", ["train.py", "5"])
    names = cell(TRAIN)
    here = run(names.train, 7)
    nbddp.export(names.train, tmp_path / "job.nbddp", (7,))
    launcher(tmp_path, 2, tmp_path / "job.nbddp", "--metrics", tmp_path / "m", "--result", tmp_path / "r")
    model, *rest = nbddp.load_result(tmp_path / "r")
    assert rest == list(here.value[1:]) == [24, 0, 2.0, "cpu", 0, ["train.py", "5"]]
    assert type(model) is names.Net, "the notebook's own class"
    assert torch.equal(model.layer.weight, here.value[0].layer.weight)
    assert not torch.equal(model.layer.weight, names.Net().layer.weight)
    loaded = nbddp.History.load(tmp_path / "m")
    assert state(loaded) == state(here.history)
    assert (len(loaded["loss"].steps), loaded.ranks[1].bars[0].done) == (24, 24)


def test_without_a_launcher_a_job_is_one_rank(cell: Cells, in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real ``python -m nbddp``, with a module next to the notebook that hides an installed one."""
    (in_folder / "hydra.py").write_text("where = 'next to the notebook'\n")
    monkeypatch.syspath_prepend(in_folder)
    monkeypatch.setattr("sys.argv", ["main.py"])
    names = cell("""
        import sys, torch, torch.distributed as dist, nbddp
        class Net(torch.nn.Linear): pass
        data = torch.ones(1 << 18)  # enough to be mapped from the file
        def main(mapped, steps):
            import hydra
            dist.all_reduce(data.zero_())
            for step in range(steps): nbddp.log(loss=step)
            return Net(2, 1), data.sum().item(), nbddp.rank(), nbddp.world_size(), sys.argv, hydra.where, mapped[5]
    """)
    mapped = np.memmap("mapped", "f4", "w+", shape=1 << 18)
    mapped[5] = 0.5
    nbddp.export(names.main, "job.nbddp", (mapped,), kwargs={"steps": 3})
    before = Path("job.nbddp").read_bytes()
    os.unlink("mapped")
    command = [sys.executable, "-B", "-m", "nbddp", "job.nbddp", "--metrics", "m", "--result", "r"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    model, *rest = nbddp.load_result("r")
    assert isinstance(model, names.Net)
    assert rest == [0.0, 0, 1, ["main.py"], "next to the notebook", 0.5]
    assert len(nbddp.History.load("m")["loss"].steps) == 3
    assert (sorted(os.listdir()), Path("job.nbddp").read_bytes()) == (["hydra.py", "job.nbddp", "m", "r"], before)
    del vars(sys.modules["__main__"])["Net"]
    with pytest.raises(nbddp.PayloadError, match=r"^r can't be unpickled here: .* has no attribute 'Net'"):
        nbddp.load_result("r")


FAILS = """
import sys
def helper(how):
    if how == "raise": raise ValueError("bad batch")  # this line
    if how == "interrupt": raise KeyboardInterrupt
    sys.exit({"exit": 3, "leave": None, "text": "no data"}[how])

def train(how): helper(how)
"""


def test_an_exception_shows_only_the_users_frames(cell: Cells, tmp_path: Path) -> None:
    names = cell(FAILS)
    nbddp.export(names.train, tmp_path / "job.nbddp", ("raise",))
    told = tmp_path / "told"  # to torchrun
    code, printed = Job(tmp_path, tmp_path / "job.nbddp", TORCHELASTIC_ERROR_FILE=str(told)).end()
    assert code == 1
    file = names.train.__code__.co_filename
    for text in (printed, json.loads(told.read_text())["message"]["extraInfo"]["py_callstack"]):
        assert re.findall(r'File "(.*?)", line (\d+), in (\w+)', text) == [(file, "8", "train"), (file, "4", "helper")]
        assert 'raise ValueError("bad batch")  # this line' in text
        assert text.rstrip().endswith("ValueError: bad batch")


@pytest.mark.parametrize(
    ("how", "code", "says"), [("exit", 3, ""), ("leave", 0, ""), ("text", 1, "no data\n"), ("interrupt", -2, None)]
)
def test_a_job_exits_with_a_scripts_codes(cell: Cells, tmp_path: Path, how: str, code: int, says: str | None) -> None:
    nbddp.export(cell(FAILS).train, tmp_path / "job.nbddp", (how,))
    ended, printed = Job(tmp_path, tmp_path / "job.nbddp", "--result", tmp_path / "r").end()
    assert ended == code
    assert says is None or printed == says
    assert (tmp_path / "r").exists() == (how == "leave")
    assert how != "leave" or nbddp.load_result(tmp_path / "r") is None


def test_threads_and_exit_handlers_finish_and_what_pickles_of_a_result_is_kept(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import atexit, threading, time
        def slow():
            time.sleep(0.3)
            print("thread")
        def train():
            atexit.register(print, "handler")
            threading.Thread(target=slow).start()
            return {"lock": threading.Lock(), "steps": 5}
    """)
    nbddp.export(names.train, tmp_path / "job.nbddp")
    code, printed = Job(tmp_path, tmp_path / "job.nbddp", "--result", tmp_path / "r").end()
    assert code == 1
    told, *more = printed.splitlines()
    assert told.startswith("nbddp: what train returned can't be written: the result → ['lock']: ")
    assert told.endswith(f"Everything else is in {tmp_path / 'r'}")
    assert (more, nbddp.load_result(tmp_path / "r")["steps"]) == (["thread", "handler"], 5)


def test_metrics_can_be_read_while_the_job_runs(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import os, time, nbddp
        def train(go):
            for step in range(100): nbddp.log(loss=step)
            while not os.path.exists(go): time.sleep(0.01)
    """)
    nbddp.export(names.train, tmp_path / "job.nbddp", (str(tmp_path / "go"),))
    words = (tmp_path / "job.nbddp", "--metrics", tmp_path / "m")
    first = Job(tmp_path, *words)
    wait_until(lambda: (tmp_path / "m").exists() and (tmp_path / "m").stat().st_size)
    wait_until(lambda: len(nbddp.History.load(tmp_path / "m").get("loss", ([], []))[0]) == 100)
    (tmp_path / "second").mkdir()
    told = f"nbddp: --metrics: another process is writing to {tmp_path}/m; give each job its own file\n"
    assert Job(tmp_path / "second", *words).end() == (1, told)
    (tmp_path / "go").touch()
    assert first.end() == (0, "")
    with open(tmp_path / "m", "ab") as file:
        file.write(b"\x96\xcb\x41")  # torn: it was killed within a write
    assert Job(tmp_path, *words).end() == (0, "")
    continued = nbddp.History.load(tmp_path / "m")
    assert continued["loss"].steps.tolist() == list(range(100))
    assert [restart.step for restart in continued.restarts] == [0]


def test_a_job_file_is_its_owners_only_and_stays_when_the_next_export_fails(
    cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write it runs code as the one who starts it, and the notebook's data are in it."""
    names = cell("import threading\nlock = threading.Lock()\ndef helper(): return lock\ndef train(): helper()")
    path = tmp_path / "job.nbddp"
    before = os.umask(0)
    try:
        for mask, unnamed in ((0, os.O_TMPFILE), (0o077, os.O_TMPFILE), (0, 0), (0o077, 0)):  # 0: it fails, as on NFS
            os.umask(mask)
            monkeypatch.setattr(os, "O_TMPFILE", unnamed)
            nbddp.export(np.sum, path, (1,))
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    whole = path.read_bytes()
    with pytest.raises(nbddp.PayloadError, match=r"^train can't be exported: train → helper → lock: "):
        nbddp.export(names.train, path)
    with pytest.raises(nbddp.LaunchError, match="can't be called with these arguments"):
        nbddp.export(names.train, path, (1,))
    assert (path.read_bytes(), os.listdir(tmp_path)) == (whole, ["job.nbddp"])


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda whole: b"",
    "a pickle": lambda whole: pickle.dumps(Planted("unpickled")),
    "without its last byte": lambda whole: whole[:-1],
    "more at its end": lambda whole: whole + b"\nx",
    "a result": lambda whole: whole.replace(b'"nbddp": "job"', b'"nbddp": "result"'),
    "a list": lambda whole: whole[: whole.rindex(b"\n") + 1] + b"[]",
    "a line without an end": lambda whole: b"[" * 100_000,
}


def test_a_broken_file_is_refused_in_one_way_and_not_unpickled(cell: Cells, tmp_path: Path, in_folder: Path) -> None:
    nbddp.export(cell("def train(x): pass").train, "job.nbddp", (Planted(tmp_path / "unpickled"),))
    whole = Path("job.nbddp").read_bytes()
    for how, broken in BROKEN.items():
        Path("job.nbddp").write_bytes(broken(whole))
        with pytest.raises(nbddp.NbddpError, match=r"wasn't written by nbddp.export\(\), or is truncated|is damaged"):
            job_file.read("job.nbddp", job_file.JOB)
        with pytest.raises(nbddp.NbddpError, match=r"wasn't written by python -m nbddp \.\.\. --result, or is trunc"):
            nbddp.load_result("job.nbddp" if how != "a result" else __file__)
    for name in ("Python", "torch", "cloudpickle"):
        Path("job.nbddp").write_bytes(whole.replace(f"{name} ".encode(), f"{name} 0.".encode()))
        assert re.search(rf"was written with .*\b{name} 0\.", Job(tmp_path, "job.nbddp").end()[1])
    assert not Path("unpickled").exists()
    Path("job.nbddp").write_bytes(whole)
    assert Job(tmp_path, "job.nbddp").end() == (0, "")
    assert Path("unpickled").exists()


@given(st.integers(0))
def test_a_damaged_file_is_refused_or_whole(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder, nbddp.payload.pack({"x": torch.arange(40.0)}).block as block:
        path = Path(folder, "result")
        job_file.write(path, job_file.RESULT, block, name="train")
        described = job_file.read(path, job_file.RESULT)[1]
        path.write_bytes(damaged(path.read_bytes(), seed))
        with contextlib.suppress(nbddp.NbddpError):
            found = job_file.read(path, job_file.RESULT)
            assert (found[0].view(), found[1]) == (block.view(), described)


def test_damage_at_the_end_of_a_large_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "result"
    with nbddp.payload.pack(torch.arange(1_000_000.0)).block as block:
        job_file.write(path, job_file.RESULT, block)
    whole = bytearray(path.read_bytes())
    whole[-500_000] ^= 1
    path.write_bytes(whole)
    with pytest.raises(nbddp.NbddpError, match="is damaged"):
        job_file.read(path, job_file.RESULT)


def test_what_a_result_raises_when_it_is_unpickled_arrives_as_one_error(cell: Cells, in_folder: Path) -> None:
    with nbddp.payload.pack({"x": Planted("gone/away")}).block as block:
        job_file.write("result", job_file.RESULT, block)
    with pytest.raises(nbddp.PayloadError, match=r"^result can't be unpickled here: FileNotFoundError: .*gone/away"):
        nbddp.load_result("result")


MISSING = "train and its data can't be unpickled here: ModuleNotFoundError: No module named 'datautils_of_job'"


def test_what_cannot_run_is_refused_in_one_line(cell: Cells, in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (in_folder / "datautils_of_job.py").write_text("def size(): return 42\n")
    monkeypatch.syspath_prepend(in_folder)
    nbddp.export(cell("import datautils_of_job as d\ndef train(): return d.size()").train, "lacks.nbddp")
    os.unlink("datautils_of_job.py")
    del sys.modules["datautils_of_job"]
    nbddp.export(cell("def train(): print('hours')").train, "job.nbddp")
    before = Path("job.nbddp").read_bytes()
    for words, environ, told in (
        (["none"], {}, "[Errno 2] No such file or directory: 'none'"),
        (["job.nbddp", "--result", "gone/r"], {}, "--result: the folder {}/gone doesn't exist; create it first"),
        (["job.nbddp", "--metrics", "job.nbddp"], {}, "--metrics: job.nbddp exists and isn't a metrics file"),
        (["job.nbddp"], {"SLURM_STEP_NUM_TASKS": "2"}, "each srun task would train on its own: use srun torchrun"),
        (["job.nbddp"], {"RANK": "0"}, "the launcher didn't set WORLD_SIZE: use torchrun"),
        (["lacks.nbddp"], {}, MISSING),
    ):
        code, printed = Job(in_folder, *words, **environ).end()
        assert (code, printed.count("\n")) == (1, 1)
        assert printed.startswith(f"nbddp: {told.format(in_folder)}")
    assert (printed, Path("job.nbddp").read_bytes()) == (f"nbddp: {MISSING}\n", before)
