"""An exported job without a notebook: what the file holds, its launchers, its output files, and its errors."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import socket
import stat
import struct
import subprocess
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import nbddp
from nbddp import payload, wire
from nbddp.history import metrics_file
from nbddp.history.history import History
from nbddp.job import job_file, launcher_env
from tests.support import Cells, run, script, wait_until

LAUNCH_S = 120.0
# torch's own torchrun now and then aborts when all is done and it leaves (2.13).
ABORTED = "terminate called without an active exception"

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
    return model, calls, nbddp.rank(), nbddp.world_size(), str(nbddp.device()), nbddp.restart_count()
"""


def start(*arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def end(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=LAUNCH_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def alone(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """``python -m nbddp``, one rank."""
    return end(start("-m", "nbddp", *map(str, arguments), **env))


def torchrun(*arguments: Any, nprocs: int = 2, options: tuple[str, ...] = (), **env: str) -> Any:
    """``torchrun -m nbddp`` on this machine."""
    for _ in range(3):
        ended = end(
            start(
                *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nprocs}", *options),
                *("-m", "nbddp", *map(str, arguments)),
                TMPDIR=os.path.dirname(arguments[0]),  # torchrun leaves files there
                **env,
            )
        )
        if ABORTED not in ended.stderr:
            break
    return ended


def same(ours: nbddp.History, theirs: nbddp.History) -> bool:
    assert ours.names == theirs.names
    for name in ours.names:
        for rank, series in ours.by_rank(name).items():
            other = theirs.by_rank(name)[rank]
            assert series.steps.tolist() == other.steps.tolist()
            assert series.values.tolist() == other.values.tolist(), (name, rank)
        for column, other in zip((*ours[name], *ours.spread(name)), (*theirs[name], *theirs.spread(name))):
            assert column.tolist() == other.tolist(), name
    return True


# ---------------------------------------------------------------------------- the same as in the notebook


@pytest.mark.slow
def test_a_job_gives_what_the_run_gives_bit_for_bit(
    cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    names = cell(TRAIN)
    here = run(names.train, 7)
    nbddp.export(names.train, tmp_path / "job.nbddp", (7,))
    ended = torchrun(tmp_path / "job.nbddp", "--metrics", tmp_path / "m", "--result", tmp_path / "r")
    assert ended.returncode == 0, ended.stderr
    model, *rest = nbddp.load_result(tmp_path / "r")
    assert rest == list(here.value[1:]) == [24, 0, 2, "cpu", 0]
    assert type(model) is names.Net, "the notebook's own class"
    assert torch.equal(model.layer.weight, here.value[0].layer.weight)
    assert not torch.equal(model.layer.weight, names.Net().layer.weight)
    loaded = nbddp.History.load(tmp_path / "m")
    assert same(here.history, loaded)
    assert len(loaded["loss"].steps) == 24
    assert loaded.ranks[1].bars[0].done == 24
    assert loaded.to_pandas().shape == (24, 3)
    assert "<svg" in loaded.plot().svg
    assert loaded.restarts == []


def test_without_a_launcher_a_job_is_one_rank(cell: Cells, tmp_path: Path) -> None:
    names = cell(TRAIN)
    nbddp.export(names.train, tmp_path / "job.nbddp", args=(1,), kwargs={"steps": 3})
    ended = alone(tmp_path / "job.nbddp", "--metrics", tmp_path / "m", "--result", tmp_path / "r")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    model, calls, *rest = nbddp.load_result(tmp_path / "r")
    assert isinstance(model, names.Net)
    assert (calls, rest) == (3, [0, 1, "cpu", 0])
    assert len(nbddp.History.load(tmp_path / "m")["loss"].steps) == 3
    assert sorted(os.listdir(tmp_path)) == ["job.nbddp", "m", "r"]


OWN_GROUP = """
import os, psutil, torch, torch.distributed as dist, nbddp

def listening():
    found = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    return [laddr.ip for laddr in found if laddr.port == int(os.environ["MASTER_PORT"])]

def total():
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return x.item()

def main(ready):
    found, store = [total()] if ready else [], listening()
    for _ in range(2):
        dist.init_process_group("gloo")
        found.append(total())
        dist.destroy_process_group()
    return found, [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")], store
"""


@pytest.mark.slow
@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_job_can_make_its_own_process_groups(cell: Cells, tmp_path: Path, nprocs: int, ready: bool) -> None:
    nbddp.export(cell(OWN_GROUP).main, tmp_path / "job.nbddp", (ready,))
    arguments = (tmp_path / "job.nbddp", "--result", tmp_path / "r")
    ended = torchrun(*arguments) if nprocs == 2 else alone(*arguments)
    assert ended.returncode == 0, ended.stderr
    found, place, _ = nbddp.load_result(tmp_path / "r")
    assert found == [3.0 if nprocs == 2 else 1.0] * (2 + ready)
    assert place == ["0", "0", str(nprocs), str(nprocs)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def slurm(rank: int, **more: str) -> dict[str, str]:
    """What srun tells a task of three: two on the first node, one on the second."""
    local = {"SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2), "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "3", **local, **more}


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["2,1", "3"])
def test_under_srun_ranks_meet_using_slurms_variables(cell: Cells, tmp_path: Path, nodes: str) -> None:
    """A store that ranks on other hosts are to find listens where they are, whatever its own host is called."""
    nbddp.export(cell(OWN_GROUP).main, tmp_path / "job.nbddp", (True,))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ("-m", "nbddp", str(tmp_path / "job.nbddp"), "--result", str(tmp_path / "r"))
    ended = [start(*command, **slurm(rank, SLURM_STEP_TASKS_PER_NODE=nodes, **meeting)) for rank in range(3)]
    ended = [end(process) for process in ended]
    assert [each.returncode for each in ended] == [0, 0, 0], [each.stderr for each in ended]
    found, place, store = nbddp.load_result(tmp_path / "r")
    assert found == [6.0] * 3
    assert place == ["0", "0", "3", nodes[0]]
    assert store
    assert set(store) <= ({"127.0.0.1"} if nodes == "3" else {"::", "0.0.0.0"})


def test_a_missing_master_addr_under_slurm_is_asked_for(cell: Cells, tmp_path: Path) -> None:
    nbddp.export(cell(OWN_GROUP).main, tmp_path / "job.nbddp", (True,))
    ended = alone(tmp_path / "job.nbddp", **slurm(0))
    assert ended.returncode == 1
    assert ended.stderr.startswith("nbddp: MASTER_ADDR missing: Slurm does not set a rendezvous address")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE and MASTER_ADDR and MASTER_PORT missing, though"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=2, but WORLD_SIZE=2"),
        (
            {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK must be a whole number, not 'x'",
        ),
    ],
)
def test_missing_or_wrong_launcher_variables_are_named(environ: dict[str, str], says: str) -> None:
    with pytest.raises(nbddp.LaunchError, match=re.escape(says)):
        launcher_env.contract(environ)


def test_gloo_uses_the_interface_that_reaches_the_other_ranks() -> None:
    here = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    there = {**here, "LOCAL_WORLD_SIZE": "1"}
    addresses = {name: entries[0].address for name, entries in psutil.net_if_addrs().items()}
    loopback = next(name for name, address in addresses.items() if address == "127.0.0.1")
    assert launcher_env.interface({**here, "MASTER_ADDR": "no.such.host.invalid"}) == loopback
    for name, address in addresses.items():
        if psutil.net_if_addrs()[name][0].family == socket.AF_INET and name != loopback:
            assert launcher_env.interface({**there, "MASTER_ADDR": address}) == name
    assert launcher_env.interface({**there, "MASTER_ADDR": "127.0.1.1"}) == "", "Debian's own name: nothing to be known"
    assert launcher_env.interface({**there, "MASTER_ADDR": "no.such.host.invalid"}) == ""


def test_variables_that_torchrun_sets_and_a_launcher_does_not_are_filled_in() -> None:
    pod = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}  # a PyTorchJob's
    assert launcher_env.contract(pod) == {**pod, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    tasks = slurm(
        2, MASTER_ADDR="n1", SLURM_STEP_TASKS_PER_NODE="", SLURM_TASKS_PER_NODE="2(x1),1", SLURM_RESTART_COUNT="4"
    )
    found = launcher_env.contract(tasks)
    here = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert found == {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "n1", "MASTER_PORT": "29500", **here}
    assert launcher_env.contract({**tasks, "MASTER_PORT": "1234"})["MASTER_PORT"] == "1234"
    assert launcher_env.restarts(tasks) == 4
    assert launcher_env.restarts({**tasks, "TORCHELASTIC_RESTART_COUNT": "1"}) == 1


# ---------------------------------------------------------------------------- ends


FAILS = """
import sys, nbddp

def helper(how):
    if how == "raise" and nbddp.rank() == nbddp.world_size() - 1:
        raise ValueError("bad batch")  # this line
    if how == "exit":
        sys.exit(3)
    if how == "leave":
        sys.exit()
    if how == "text":
        sys.exit("no data")
    if how == "interrupt":
        raise KeyboardInterrupt

def train(how):
    helper(how)
    return "done"
"""


def test_an_exception_shows_only_the_users_frames(cell: Cells, tmp_path: Path) -> None:
    nbddp.export(cell(FAILS).train, tmp_path / "job.nbddp", ("raise",))
    ended = alone(tmp_path / "job.nbddp")
    assert ended.returncode == 1
    assert re.findall(r'File "(.*?)", line (\d+), in (\w+)', ended.stderr) == [
        (f, line, name)
        for f, line, name in re.findall(r'File "(/tmp/ipykernel.*?)", line (\d+), in (train|helper)', ended.stderr)
    ]
    assert 'raise ValueError("bad batch")  # this line' in ended.stderr
    assert ended.stderr.rstrip().endswith("ValueError: bad batch")


@pytest.mark.slow
def test_torchrun_names_the_exception_and_its_lines(cell: Cells, tmp_path: Path) -> None:
    nbddp.export(cell(FAILS).train, tmp_path / "job.nbddp", ("raise",))
    ended = torchrun(tmp_path / "job.nbddp")
    assert ended.returncode == 1
    summary = ended.stderr[ended.stderr.index("Root Cause") :]
    assert re.search(r"rank\s+: 1", summary)
    assert 'raise ValueError("bad batch")  # this line' in summary
    assert "nbddp/worker" not in summary


@pytest.mark.parametrize(
    ("how", "code", "says"), [("exit", 3, ""), ("leave", 0, ""), ("text", 1, "no data\n"), ("interrupt", -2, None)]
)
def test_a_job_exits_with_the_codes_of_a_script(
    cell: Cells, tmp_path: Path, how: str, code: int, says: str | None
) -> None:
    nbddp.export(cell(FAILS).train, tmp_path / "job.nbddp", (how,))
    ended = alone(tmp_path / "job.nbddp", "--result", tmp_path / "r")
    assert ended.returncode == code
    assert says is None or ended.stderr == says
    if how == "leave":
        assert nbddp.load_result(tmp_path / "r") is None
    else:
        assert not (tmp_path / "r").exists()


def test_threads_pools_and_exit_handlers_finish_before_the_job_ends(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import atexit, concurrent.futures, sys, threading, time
        def slow():
            time.sleep(0.3)
            print("thread")
        def train():
            atexit.register(print, "handler")
            threading.Thread(target=slow).start()
            concurrent.futures.ThreadPoolExecutor(1).submit(sys.stdout.write, "pool\\n")
            sys.stdout.write("train\\n")  # whole lines: two threads print at once
    """)
    nbddp.export(names.train, tmp_path / "job.nbddp")
    ended = alone(tmp_path / "job.nbddp")
    assert sorted(ended.stdout.split()) == ["handler", "pool", "thread", "train"]
    assert ended.stdout.endswith("thread\nhandler\n")


def test_the_picklable_part_of_a_result_is_kept(cell: Cells, tmp_path: Path) -> None:
    names = cell("def train(): return {'log': open('/dev/null'), 'steps': 5}")
    nbddp.export(names.train, tmp_path / "job.nbddp")
    ended = alone(tmp_path / "job.nbddp", "--result", tmp_path / "r")
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        "nbddp: the value that train returned cannot be written: the result → ['log']: an open file"
    )
    assert ended.stderr.endswith(f"Everything else is in {tmp_path / 'r'}\n")
    kept = nbddp.load_result(tmp_path / "r")
    assert kept["steps"] == 5
    assert "an open file" in kept["log"].why
    assert sorted(os.listdir(tmp_path)) == ["job.nbddp", "r"]


@pytest.mark.parametrize("folder", ["none", "file"])
def test_a_result_path_without_a_folder_is_refused_before_the_training(
    cell: Cells, tmp_path: Path, folder: str
) -> None:
    (tmp_path / "file").touch()
    nbddp.export(cell("def train(): print('hours')").train, tmp_path / "job.nbddp")
    ended = alone(tmp_path / "job.nbddp", "--result", tmp_path / folder / "r")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"nbddp: --result: the folder {tmp_path}/{folder} does not exist; create it first\n"


# ---------------------------------------------------------------------------- restarts


RESUMES = """
import os, signal, torch, nbddp

def train(snapshot, steps=20):
    found = nbddp.load_snapshot(snapshot) or {"done": 0}
    nbddp.barrier()
    for step in range(found["done"], steps):
        nbddp.log(loss=100.0 * nbddp.restart_count() + step, reduce="max")
        if step % 5 == 4:
            nbddp.save_snapshot(snapshot, done=step + 1)
        nbddp.barrier()
        if step == 12 and nbddp.restart_count() == 0 and nbddp.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return nbddp.restart_count()
"""


@pytest.mark.slow
def test_a_rank_killed_and_restarted_under_torchrun_gives_one_curve(cell: Cells, tmp_path: Path) -> None:
    nbddp.export(cell(RESUMES).train, tmp_path / "job.nbddp", (str(tmp_path / "snapshot"),))
    ended = torchrun(
        *(tmp_path / "job.nbddp", "--metrics", tmp_path / "m", "--result", tmp_path / "r"),
        options=("--max-restarts=1",),
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # else torchrun's gloo ranks find the dead ones' addresses (2.13)
    )
    assert ended.returncode == 0, ended.stderr
    assert nbddp.load_result(tmp_path / "r") == 1
    history = nbddp.History.load(tmp_path / "m")
    assert history["loss"].steps.tolist() == list(range(20))
    assert history["loss"].values.tolist() == [*map(float, range(10)), *(100.0 + step for step in range(10, 20))]
    (restart,) = history.restarts
    assert restart.step == 10
    assert restart.reason.startswith("started again 20")


@pytest.mark.slow
def test_a_job_restarted_by_hand_continues_its_metrics_file(cell: Cells, tmp_path: Path) -> None:
    nbddp.export(cell(RESUMES).train, tmp_path / "job.nbddp", (str(tmp_path / "snapshot"), 8))
    assert alone(tmp_path / "job.nbddp", "--metrics", tmp_path / "m").returncode == 0
    with open(tmp_path / "m", "ab") as file:
        file.write(b"\1" * 20)  # torn: it was killed within a write
    assert len(nbddp.History.load(tmp_path / "m")["loss"].steps) == 8
    nbddp.export(cell(RESUMES).train, tmp_path / "job.nbddp", (str(tmp_path / "snapshot"), 12))
    assert alone(tmp_path / "job.nbddp", "--metrics", tmp_path / "m").returncode == 0
    history = nbddp.History.load(tmp_path / "m")
    assert history["loss"].steps.tolist() == list(range(12))
    assert [restart.step for restart in history.restarts] == [5]


@pytest.mark.slow
def test_metrics_can_be_read_while_the_job_runs(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import time, nbddp
        def train():
            for step in range(100): nbddp.log(loss=step)
            print("logged", flush=True)
            input()
    """)
    nbddp.export(names.train, tmp_path / "job.nbddp")
    command = [sys.executable, "-m", "nbddp", str(tmp_path / "job.nbddp"), "--metrics", str(tmp_path / "m")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "logged\n"
        wait_until(lambda: len(nbddp.History.load(tmp_path / "m")["loss"].steps) == 100)
        second = alone(tmp_path / "job.nbddp", "--metrics", tmp_path / "m")
        assert second.stderr.startswith("nbddp: --metrics: another process is writing")
        process.communicate("\n")
    assert process.returncode == 0


# ---------------------------------------------------------------------------- files of metrics, by hand


class Writer:
    """A rank's file of metrics."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        self._path = metrics_file.path_of(str(path), rank)
        self._rank = rank

    def begin(self, at: float, world_size: int) -> Writer:
        return self._add(wire.BEGIN.pack(wire.KIND_BEGIN, wire.BEGIN_MARK, world_size, self._rank, at))

    def log(self, name: str, steps: range, value: float, op: int = 0) -> Writer:
        names = wire.NAME_PIECE.pack(wire.KIND_NAME, 0, 0, name.encode())
        return self._add(names + b"".join(wire.RECORD.pack(1, op, 0, False, 1.0, s, value, 1.0) for s in steps))

    def _add(self, data: bytes) -> Writer:
        with open(self._path, "ab") as file:
            file.write(data)
        return self


def test_attempts_are_matched_across_different_clocks_and_missing_ranks(tmp_path: Path) -> None:
    first, second = Writer(tmp_path / "m"), Writer(tmp_path / "m", 1)
    first.begin(1000, 2).log("loss", range(10), 1.0, wire.REDUCE_SUM)
    second.begin(997, 2).log("loss", range(10), 1.0, wire.REDUCE_SUM)
    first.begin(1060, 2)  # in which rank 1 never began
    first.begin(1120, 2).log("loss", range(5, 10), 2.0, wire.REDUCE_SUM)
    second.begin(1117, 2).log("loss", range(5, 10), 2.0, wire.REDUCE_SUM)
    history = History.load(tmp_path / "m")
    assert history["loss"].values.tolist() == [2.0] * 5 + [4.0] * 5
    assert [restart.step for restart in history.restarts] == [5, 5]


def test_metrics_do_not_wait_for_ranks_that_a_restart_left_out(tmp_path: Path) -> None:
    for rank in range(3):
        Writer(tmp_path / "m", rank).begin(1000, 3).log("loss", range(10), 1.0, wire.REDUCE_SUM)
    for at in (1100, 1200):
        for rank in range(2):
            Writer(tmp_path / "m", rank).begin(at, 2).log("loss", range(at // 100 - 6, 10), 2.0, wire.REDUCE_SUM)
    history = History.load(tmp_path / "m")
    assert history["loss"].values.tolist() == [3.0] * 5 + [4.0] * 5
    assert history.spread("loss").steps.tolist() == list(range(10))
    assert sorted(history.by_rank("loss")) == [0, 1]
    assert len(history.ranks) == 3


def test_missing_metrics_files_of_ranks_are_warned_about(tmp_path: Path) -> None:
    Writer(tmp_path / "m").begin(1000, 4).log("loss", range(3), 1.0, wire.REDUCE_SUM)
    with pytest.warns(
        UserWarning, match=r"no metrics of 3 ranks, the first is 1: .* \(m\.rank1 \.\.\.\) into one folder"
    ):
        assert History.load(tmp_path / "m")["loss"].values.tolist() == [1.0] * 3


def test_zeros_left_by_a_machine_crash_are_not_metrics(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "m").begin(1000, 1).log("loss", range(3), 1.0)
    writer._add(b"\0" * 80)
    assert History.load(tmp_path / "m")["loss"].values.tolist() == [1.0] * 3


@pytest.mark.parametrize("content", [b"", b"step,loss\n0,1.5\n", b"\4" * 64])
def test_a_file_that_is_not_metrics_is_refused_and_left_unchanged(cell: Cells, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(nbddp.NbddpError, match=r"was not written by python -m nbddp \.\.\. --metrics"):
        History.load(tmp_path / "m")
    with pytest.raises(FileNotFoundError):
        History.load(tmp_path / "none")
    if content:
        nbddp.export(cell("def train(): pass").train, tmp_path / "job.nbddp")
        ended = alone(tmp_path / "job.nbddp", "--metrics", tmp_path / "m")
        refused = f"nbddp: --metrics: {tmp_path}/m exists and is not a file of metrics; choose another name\n"
        assert ended.stderr == refused
        assert (tmp_path / "m").read_bytes() == content


def test_metrics_in_the_format_of_0_1_are_refused_with_the_reason(tmp_path: Path) -> None:
    begin = struct.pack("<B7sQQd", wire.KIND_BEGIN, b"nbddp-1", 1, 0, 1000.0)
    (tmp_path / "m").write_bytes(begin + struct.pack("<BBHfqdd", 1, 0, 0, 1.0, 0, 1.5, 1000.0))
    with pytest.raises(nbddp.NbddpError, match=r"was written by another version of nbddp.*load it with"):
        History.load(tmp_path / "m")


def _begin(world_size: int = 1, rank: int = 0, at: float = 1000.0) -> bytes:
    return wire.BEGIN.pack(wire.KIND_BEGIN, wire.BEGIN_MARK, world_size, rank, at)


def _name(text: bytes, more: int = 0) -> bytes:
    return wire.NAME_PIECE.pack(wire.KIND_NAME, more, 0, text)


def _value(kind: int = wire.KIND_METRIC, op: int = 0, ident: int = 0, value: float = 1.0) -> bytes:
    return wire.RECORD.pack(kind, op, ident, False, 1.0, 0, value, 1.0)


DAMAGED = {
    "a world size of 8,589,934,592": _begin(2**33),
    "a world size of 0": _begin(0),
    "rank 4 with a world size of 4": _begin(4, 4),
    "nan as the unix time": _begin(at=float("nan")),
    "lacks the mark": _begin() + b"\4" * 40,
    "a value comes before its name (record 1 of 2": _begin() + _value() + _name(b"late"),
    "a value comes before its name (record 2 of 2": _begin() + _name(b"of three", 1) + _value(),
    "name 0 is not UTF-8": _begin() + _name(b"\xff"),
    "name 0 is defined twice": _begin() + _name(b"a") + _name(b"b"),
    "a record is of an unknown kind": _begin() + _name(b"a") + _value(9),
    "an unknown reduce=": _begin() + _name(b"a") + _value(op=7),
    "a count is out of range": _begin() + _name(b"a") + _value(wire.KIND_PROGRESS, value=float("inf")),
}


@pytest.mark.parametrize("why", DAMAGED)
@pytest.mark.parametrize("rank", [0, 5])
def test_damaged_metrics_are_refused_with_file_and_reason(tmp_path: Path, why: str, rank: int) -> None:
    Writer(tmp_path / "m").begin(1000, 6).log("loss", range(3), 1.0)
    path = Path(metrics_file.path_of(str(tmp_path / "m"), rank))
    path.write_bytes(DAMAGED[why])
    tracemalloc.start()
    try:
        with pytest.raises(nbddp.NbddpError, match=f"^{re.escape(str(path))} is damaged.*{re.escape(why)}"):
            History.load(tmp_path / "m")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_rank_killed_before_it_began_has_no_metrics(tmp_path: Path) -> None:
    Writer(tmp_path / "m").begin(1000, 2).log("loss", range(3), 1.0)
    (tmp_path / "m.rank1").write_bytes(_begin(2, 1)[:30])
    with pytest.warns(UserWarning, match="no metrics of rank 1"):
        assert History.load(tmp_path / "m")["loss"].values.tolist() == [1.0] * 3
    (tmp_path / "m.rank1").write_bytes(b"something else, which is longer than one record")
    with pytest.raises(nbddp.NbddpError, match=r"m\.rank1 was not written by"):
        History.load(tmp_path / "m")


def test_a_full_disk_ends_the_metrics_and_not_the_training(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import resource, nbddp
        from nbddp.worker import metrics
        def train():
            for step in range(50): nbddp.log(loss=step)
            metrics.flush()
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
            for step in range(50, 500): nbddp.log(loss=step)
            metrics.flush()
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            for step in range(500): nbddp.log(other=step)
            return "trained"
    """)
    nbddp.export(names.train, tmp_path / "job.nbddp")
    ended = alone(tmp_path / "job.nbddp", "--metrics", tmp_path / "m", "--result", tmp_path / "r")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.startswith("nbddp: stopped writing metrics to the file: [Errno ")
    assert ended.stderr.count("\n") == 1
    assert nbddp.load_result(tmp_path / "r") == "trained"
    history = History.load(tmp_path / "m")
    assert history.names == ["loss"]
    assert 50 <= len(history["loss"].steps) <= 60


# ---------------------------------------------------------------------------- what is refused


def test_objects_that_only_a_notebooks_ranks_can_share_are_refused_by_name(tmp_path: Path) -> None:
    """In a process of its own: semaphores and shared tensors live as long as somebody knows them."""
    ended = script(
        """
        import multiprocessing, sys, threading, torch, nbddp
        spawn = multiprocessing.get_context("spawn")
        queue, shared = spawn.SimpleQueue(), {"weights": torch.ones(3).share_memory_()}
        def helper(): queue.put(1)
        def train(*args, **kwargs): helper()
        def other(): return shared
        def plain(*args, **kwargs): pass
        for fn, args, kwargs in (
            (train, (), {}), (other, (), {}),
            (plain, (1, [spawn.Lock()]), {}), (plain, (), {"handle": threading.Lock()}),
        ):
            try:
                nbddp.export(fn, sys.argv[1], args, kwargs)
            except nbddp.PayloadError as error:
                print(error)
        """,
        str(tmp_path / "job.nbddp"),
    )
    only = "reaches only processes that the notebook itself starts;"
    assert ended.stdout.splitlines() == [
        f"cannot export train: train → helper → queue: a SimpleQueue {only} make it inside the function",
        "cannot export other: other → shared → ['weights']: a tensor in shared memory (share_memory_()) "
        f"{only} pass its .clone()",
        f"cannot export plain: args[1] → [0]: a Lock {only} make it inside the function",
        "cannot export plain: handle: cannot pickle '_thread.lock' object",
    ], ended.stderr
    assert not os.listdir(tmp_path)


def test_a_function_that_cannot_be_called_as_given_is_refused_at_once(cell: Cells, tmp_path: Path) -> None:
    train = cell("def train(epochs): pass").train
    for bad in (lambda: nbddp.export(train, tmp_path / "job"), lambda: nbddp.export(None, tmp_path / "job")):
        with pytest.raises(nbddp.LaunchError):
            bad()
    assert not os.listdir(tmp_path)


def test_a_failed_export_leaves_the_old_file(cell: Cells, tmp_path: Path) -> None:
    names = cell("def train(x): return x")
    path = tmp_path / "job.nbddp"
    nbddp.export(names.train, path, (1,))
    before = path.read_bytes()
    with pytest.raises(nbddp.PayloadError):
        nbddp.export(names.train, path, (threading.Lock(),))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["job.nbddp"]


def test_a_job_file_is_readable_only_by_its_owner(cell: Cells, tmp_path: Path) -> None:
    """Whoever can write it runs code as the one who starts it, and the notebook's data are in it."""
    before = os.umask(0)
    try:
        nbddp.export(cell("def train(): pass").train, tmp_path / "open")
        os.umask(0o077)
        nbddp.export(cell("def train(): pass").train, tmp_path / "closed")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("open", "closed")] == [0o600, 0o600]


def with_head(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The same file with another head."""
    start, end_ = data.rindex(b'{"kind"'), data.rindex(b"}") + 1
    new = json.dumps(change(json.loads(data[start:end_]))).encode()
    return sealed(data[:start] + new, len(new), data[-13:])


def sealed(content: bytes, head: int, mark: bytes) -> bytes:
    """With the end that fits: checksum, length of the head, mark."""
    return content + struct.pack("<IQ", zlib.crc32(content), head) + mark


def tampered(path: Path, **versions: str) -> None:
    """As another version would have written it."""
    path.write_bytes(with_head(path.read_bytes(), lambda head: {**head, "versions": head["versions"] | versions}))


@pytest.mark.slow
def test_a_job_of_other_versions_is_refused_in_one_line(cell: Cells, tmp_path: Path) -> None:
    path = tmp_path / "job.nbddp"
    nbddp.export(cell("def train(): return 1").train, path)
    tampered(path)
    assert alone(path).returncode == 0
    tampered(path, torch="1.0", Python="2.7")
    ended = alone(path)
    assert ended.returncode == 1
    here = f"Python {sys.version_info[0]}.{sys.version_info[1]}, torch {torch.__version__.partition('+')[0]}"
    assert ended.stderr == (
        f"nbddp: {path} was written with Python 2.7, torch 1.0, but {here} is installed here, which may not be "
        "able to read it. Install the same versions here, or write the file again\n"
    )


class Planted:
    """Who unpickles it makes a folder."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


@pytest.fixture
def planted(cell: Cells, tmp_path: Path) -> tuple[dict[str, Path], Path]:
    """A job and a result, and the folder that unpickling either makes."""
    files = {job_file.JOB: tmp_path / "job.nbddp", job_file.RESULT: tmp_path / "result.nbddp"}
    thing = Planted(tmp_path / "unpickled")
    nbddp.export(cell("def train(x): pass").train, files[job_file.JOB], (thing,))
    job_file.write(
        files[job_file.RESULT], job_file.RESULT, "train", lambda fd: payload.pack(thing, fd, back=True).nbytes
    )
    return files, tmp_path / "unpickled"


A_PICKLE = pickle.dumps(Planted(Path("unpickled")))  # in the folder that its reader is in
BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda whole: b"",
    "a byte": lambda whole: b"x",
    "noise": lambda whole: b"\xff" * 100,
    "a pickle": lambda whole: A_PICKLE,
    "without its first byte": lambda whole: whole[1:],
    "without its last byte": lambda whole: whole[:-1],
    "its first half": lambda whole: whole[: len(whole) // 2],
    "its second half": lambda whole: whole[len(whole) // 2 :],
    "more at its end": lambda whole: whole + b"x",
    "a pickle at its end": lambda whole: whole + A_PICKLE,
    "a pickle before it": lambda whole: A_PICKLE + whole,
    "a pickle for a head": lambda whole: whole.replace(whole[whole.rindex(b'{"kind"') : whole.rindex(b"}")], A_PICKLE),
    "a head of no length": lambda whole: whole[:-21] + bytes(8) + whole[-13:],
    "a head longer than the file": lambda whole: whole[:-21] + b"\xff" * 8 + whole[-13:],
    "no head": lambda whole: with_head(whole, lambda head: None),
    "a head of a later nbddp": lambda whole: with_head(whole, lambda head: {**head, "more": 1}),
    "a head that counts wrongly": lambda whole: with_head(whole, lambda head: {**head, "nbytes": head["nbytes"] - 1}),
    "a head without an end": lambda whole: sealed(b"[" * 100_000, 100_000, whole[-13:]),
    "a size that is a text": lambda whole: with_head(whole, lambda head: {**head, "nbytes": "1"}),
    "versions that are a list": lambda whole: with_head(whole, lambda head: {**head, "versions": [1]}),
}
WRITERS = {job_file.JOB: "nbddp.export()", job_file.RESULT: "python -m nbddp ... --result"}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_broken_file_is_refused_and_not_unpickled(
    planted: tuple[dict[str, Path], Path], in_folder: Path, kind: str, how: str
) -> None:
    files, unpickled = planted
    path = files[kind]
    path.write_bytes(BROKEN[how](path.read_bytes()))
    told = re.escape(f"{path} was not written by {WRITERS[kind]}, or is truncated")
    with pytest.raises(nbddp.NbddpError, match=told):
        job_file.open_block(path, kind)
    if kind == job_file.RESULT:
        with pytest.raises(nbddp.NbddpError, match=told):
            nbddp.load_result(path)
    assert not unpickled.exists()


class Raising:
    """Who unpickles it gets an error that is not ours."""

    def __reduce__(self) -> Any:
        return {}.__getitem__, ("weights",)


def test_a_result_that_cannot_be_unpickled_is_one_error_with_file_and_cause(tmp_path: Path) -> None:
    path = tmp_path / "r"
    job_file.write(path, job_file.RESULT, "train", lambda fd: payload.pack(Raising(), fd, back=True).nbytes)
    with pytest.raises(nbddp.PayloadError, match=f"^{path} cannot be unpacked here: KeyError: 'weights'"):
        nbddp.load_result(path)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_flipped_bit_is_refused_before_anything_is_unpickled(
    planted: tuple[dict[str, Path], Path], kind: str
) -> None:
    files, unpickled = planted
    whole = bytearray(files[kind].read_bytes())
    for at in range(0, len(whole) - 13, 7):  # the mark has an error of its own
        whole[at] ^= 1
        files[kind].write_bytes(whole)
        with pytest.raises(nbddp.NbddpError, match="was not written by"):
            job_file.open_block(files[kind], kind)
        whole[at] ^= 1
    assert not unpickled.exists()


def test_a_result_of_an_older_format_is_refused_with_the_reason(planted: tuple[dict[str, Path], Path]) -> None:
    path = planted[0][job_file.RESULT]
    path.write_bytes(path.read_bytes()[:-13] + b"nbddp file 1\n")
    with pytest.raises(nbddp.NbddpError, match="was written by a version of nbddp with another format"):
        nbddp.load_result(path)


def test_an_unbroken_file_is_unpickled(planted: tuple[dict[str, Path], Path]) -> None:
    files, unpickled = planted
    nbddp.load_result(files[job_file.RESULT])
    assert unpickled.exists()
    unpickled.rmdir()
    assert alone(files[job_file.JOB]).returncode == 0
    assert unpickled.exists()


@pytest.mark.parametrize("broken", ["a pickle", "without its first byte", "its first half", "a pickle at its end"])
def test_a_broken_job_is_refused_and_not_unpickled_by_a_rank(
    planted: tuple[dict[str, Path], Path], in_folder: Path, broken: str
) -> None:
    files, unpickled = planted
    path = files[job_file.JOB]
    path.write_bytes(BROKEN[broken](path.read_bytes()))
    ended = alone(path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"nbddp: {path} was not written by nbddp.export(), or is truncated")
    assert ended.stderr.count("\n") == 1
    assert not unpickled.exists()


def test_a_job_is_refused_as_a_result_and_a_result_as_a_job(planted: tuple[dict[str, Path], Path]) -> None:
    files, unpickled = planted
    with pytest.raises(nbddp.NbddpError, match="was not written by python -m nbddp"):
        nbddp.load_result(files[job_file.JOB])
    assert "was not written by nbddp.export()" in alone(files[job_file.RESULT]).stderr
    assert not unpickled.exists()


def test_a_missing_job_file_is_reported_in_one_line(tmp_path: Path) -> None:
    ended = alone(tmp_path / "none")
    assert ended.returncode == 1
    assert ended.stderr == f"nbddp: [Errno 2] No such file or directory: '{tmp_path}/none'\n"


@pytest.mark.slow
def test_a_module_beside_the_notebook_is_found_and_a_missing_one_is_named(
    cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "datautils_of_job.py").write_text("def size(): return 42\n")
    monkeypatch.syspath_prepend(tmp_path / "beside")
    names = cell("import datautils_of_job\ndef train(): return datautils_of_job.size()")
    nbddp.export(names.train, tmp_path / "job.nbddp")
    assert alone(tmp_path / "job.nbddp", "--result", tmp_path / "r").returncode == 0
    assert nbddp.load_result(tmp_path / "r") == 42
    (tmp_path / "beside" / "datautils_of_job.py").unlink()
    ended = alone(tmp_path / "job.nbddp", PYTHONDONTWRITEBYTECODE="1")
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        "nbddp: train and its data cannot be unpacked here: ModuleNotFoundError: No module named 'datautils_of_job'. "
    )
    del sys.modules["datautils_of_job"]


def test_a_module_beside_the_notebook_takes_precedence_over_an_installed_one(
    cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hydra.py").write_text("where = 'beside the notebook'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hydra", raising=False)
    nbddp.export(cell("def train():\n    import hydra\n    return hydra.where").train, tmp_path / "job.nbddp")
    ended = alone(tmp_path / "job.nbddp", "--result", tmp_path / "r")
    assert ended.returncode == 0, ended.stderr
    assert nbddp.load_result(tmp_path / "r") == "beside the notebook"


def test_large_data_arrives_and_the_job_file_is_not_changed(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import numpy as np
        big = np.arange(1_000_000)
        def train():
            big[:] = 0
            return big.sum()
    """)
    nbddp.export(names.train, tmp_path / "job.nbddp")
    before = (tmp_path / "job.nbddp").read_bytes()
    assert alone(tmp_path / "job.nbddp", "--result", tmp_path / "r").returncode == 0
    assert nbddp.load_result(tmp_path / "r") == 0
    assert (tmp_path / "job.nbddp").read_bytes() == before
    assert isinstance(names.big, np.ndarray)
    assert names.big[-1] == 999_999


@pytest.mark.slow
def test_dataloader_workers_find_the_notebooks_classes(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import torch
        class Squares(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return i * i
        def train(method):
            loader = torch.utils.data.DataLoader(
                Squares(), 4, num_workers=1, multiprocessing_context=method, persistent_workers=True)
            return [batch.tolist() for batch in loader]
    """)
    for method in multiprocessing.get_all_start_methods():
        nbddp.export(names.train, tmp_path / "job.nbddp", (method,))
        ended = alone(tmp_path / "job.nbddp", "--result", tmp_path / "r")
        assert ended.returncode == 0, ended.stderr
        assert nbddp.load_result(tmp_path / "r") == [[0, 1, 4, 9], [16, 25, 36, 49]]
