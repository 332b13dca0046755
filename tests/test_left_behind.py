"""Whatever a rank leaves is removed when it or the run ends: detached processes, shared memory, semaphores."""

from __future__ import annotations

import contextlib
import os
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

import nbddp
from nbddp.forkserver import server as forkserver
from tests.support import Cells, Notebook, gone, marked_pids, run, script, start, wait_until

SHM = Path("/dev/shm")
_DETACH = """
import os, signal, subprocess, time, nbddp
def daemon():
    if os.fork():
        return os.wait()
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(1001)
def detach():
    subprocess.Popen(["sleep", "1002"], start_new_session=True)
    subprocess.Popen(["sleep", "1003"], preexec_fn=os.setpgrp)
    subprocess.run(["setsid", "sh", "-c", "exec sleep 1004 &"])
    subprocess.Popen(["setsid", "sh", "-c", "sleep 1005 & setsid sleep 1006 & wait"])
def detach_all():
    detach()
    subprocess.Popen(["sleep", "1007"], start_new_session=True, env={})
    daemon()
def end_by(how, detach):
    detach()
    time.sleep(0.2)
    open(f"rank-{nbddp.rank()}", "w").close()
    if how == "finish": return nbddp.rank()
    nbddp.barrier()
    if how == "raise": raise ValueError("boom")
    if how == "kill" and nbddp.rank(): os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave" and nbddp.rank(): os._exit(3)
    time.sleep(1000)
"""


def _in_folder(folder: Path) -> list[str]:
    """The command lines of the processes that were started in this folder: the ranks of a test, and what they start."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if os.getpid() not in (process.pid, process.ppid()) and process.cwd().startswith(str(folder)):
                found.append(" ".join(process.cmdline()))
    return sorted(found)


def _ready(folder: Path) -> bool:
    return len(list(folder.glob("rank-*"))) == 2


# ---------------------------------------------------------------------------- processes


@pytest.mark.parametrize("end", ["finish", "raise", "kill", "leave", "stop"])
def test_processes_detached_by_a_rank_end_with_it(cell: Cells, in_folder: Path, end: str) -> None:
    names = cell(_DETACH)
    going = start(names.end_by, end, names.detach_all)
    if end == "stop":
        wait_until(lambda: _ready(in_folder))
        sleeps = [line for line in _in_folder(in_folder) if line.startswith("sleep")]
        assert sleeps == sorted(2 * [f"sleep {1000 + i}" for i in range(2, 8)])
        going.stop(0)
    with contextlib.suppress(nbddp.RankError, nbddp.RankDied):
        going.wait()
    assert _ready(in_folder)
    assert _in_folder(in_folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["finish", "kill"])
def test_processes_detached_by_a_spawned_rank_end_with_it(cell: Cells, in_folder: Path, end: str) -> None:
    names = cell(_DETACH)
    with contextlib.suppress(nbddp.RankDied):
        run(names.end_by, end, names.detach, start_method="spawn")
    assert _ready(in_folder)
    assert _in_folder(in_folder) == []


@pytest.mark.slow
def test_processes_detached_by_a_rank_end_with_it_without_the_fork_server(cell: Cells, in_folder: Path) -> None:
    names = cell(_DETACH)
    going = start(names.end_by, "stop", names.detach)
    wait_until(lambda: _ready(in_folder))
    server = forkserver.pid()
    assert server is not None
    psutil.Process(server).kill()
    time.sleep(0.2)
    going.stop(0)
    assert _in_folder(in_folder) == []
    assert run(names.time.time).state == "finished"  # a new server, for the tests that follow


@pytest.mark.slow
def test_processes_detached_by_a_rank_end_with_a_killed_kernel(in_folder: Path) -> None:
    before = marked_pids()
    with Notebook() as notebook:
        notebook.ok(f"import os; os.chdir({str(in_folder)!r})\n{_DETACH}")
        notebook.begin("nbddp.run(end_by, ('stop', detach_all), nprocs=2, device='cpu')")
        wait_until(lambda: _ready(in_folder), 90)  # its fork server imports torch first
        notebook.kill()
        wait_until(lambda: [line for line in _in_folder(in_folder) if "sleep" in line] == [], 5)
    wait_until(lambda: marked_pids() <= before)


STEPS_OF_A_START = [
    "nbddp.launch.crew.LocalCrew.start",  # the run has its folder's name, and no process was asked for
    "nbddp.forkserver.server_process.ForkServer.start_process",
    "nbddp.forkserver.process.read_signed",  # the server is starting a rank
    "nbddp.launch.rank.LocalRank.send",
    "nbddp.launch.rank.LocalRank.update",
]


@pytest.mark.slow
def test_a_kernel_killed_at_any_step_of_a_start_leaves_no_folder(tmp_path: Path) -> None:
    done = script(
        """
        import os, signal, sys, tempfile, torch
        from unittest import mock
        import nbddp
        nbddp.run  # all that a kernel imports, once for all of them
        for number, step in enumerate(sys.argv[1:]):
            if pid := os.fork():
                assert os.waitpid(pid, 0)[1] == signal.SIGKILL, step
                continue
            tempfile.tempdir = os.path.join(tempfile.gettempdir(), str(number))
            os.mkdir(tempfile.tempdir)
            nbddp.run(int, nprocs=1, device="cpu", show=False)  # the server has imported everything
            with mock.patch(step, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)):
                nbddp.run(int, nprocs=1, device="cpu", show=False)
            os._exit(0)
        """,
        *STEPS_OF_A_START,
        TMPDIR=str(tmp_path),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(tmp_path.iterdir())) == len(STEPS_OF_A_START)
    wait_until(lambda: not list(tmp_path.glob("*/nb-*")), 5)


def test_detached_processes_of_a_living_rank_are_left_alone(cell: Cells, in_folder: Path) -> None:
    """Also when another rank, or a child of its own, ends meanwhile."""
    names = cell(
        _DETACH
        + """
def lives():
    detach_all()
    time.sleep(0.2)
    open(f"rank-{nbddp.rank()}", "w").close()
    while not os.path.exists("go"): time.sleep(0.01)
"""
    )
    going = start(names.lives)
    wait_until(lambda: _ready(in_folder))
    before = _in_folder(in_folder)
    assert run(names.time.time).state == "finished"
    assert _in_folder(in_folder) == before
    (in_folder / "go").touch()
    assert going.wait(20).state == "finished"
    assert _in_folder(in_folder) == []


@pytest.mark.slow
def test_keep_children_lets_a_detached_process_go_on(cell: Cells) -> None:
    """A tracking daemon, say. What stays in the rank's group ends with it all the same."""
    names = cell("""
        import subprocess
        def train():
            own, ours = (subprocess.Popen(["sleep", "1000"], start_new_session=own) for own in (True, False))
            return own.pid, ours.pid
    """)
    own, ours = run(names.train, nprocs=1, keep_children=True).value
    assert gone(ours)
    assert psutil.Process(own).status() == psutil.STATUS_SLEEPING
    psutil.Process(own).kill()
    wait_until(lambda: gone(own))


@pytest.mark.slow
def test_keep_children_works_for_scripts_and_cells(notebook: Notebook, in_folder: Path) -> None:
    (in_folder / "detaches.py").write_text(
        "import subprocess\n"
        "open('pid', 'w').write(str(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid))"
    )
    notebook.ok(f"import os; os.chdir({str(in_folder)!r})\n%load_ext nbddp")
    for cell in (
        "nbddp.run_script('detaches.py', nprocs=1, keep_children=True)",
        "%ddp run -n 1 --keep-children detaches.py",
    ):
        notebook.ok(cell)
        pid = int((in_folder / "pid").read_text())
        assert psutil.Process(pid).status() == psutil.STATUS_SLEEPING, cell
        psutil.Process(pid).kill()


# ---------------------------------------------------------------------------- shared memory


_MAKES = """
import multiprocessing, os, time, torch, nbddp
from multiprocessing.shared_memory import SharedMemory
kept = []
def make(name=None):
    kept.append(SharedMemory(create=True, size=1 << 20))
    kept.append(multiprocessing.get_context("spawn").Semaphore())
    if name: kept.append(SharedMemory(f"{name}-{nbddp.rank()}", create=True, size=1 << 20))
def left_by_torch(name="torch_%d_1_0"):
    open("/dev/shm/" + name % os.getpid(), "w").close()
def in_children():
    for _ in torch.utils.data.DataLoader(Data(), num_workers=1): break
    if not os.fork():
        left_by_torch(), os._exit(0)
    os.wait()
class Data(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, i):
        if i == 0: left_by_torch()
        return i
def until_stopped(name=None):
    make(name), left_by_torch()
    if name: in_children()
    open(f"rank-{nbddp.rank()}", "w").close()
    time.sleep(1000)
def name_of_one():
    make()
    kept[0].buf[0] = 5
    return kept[0].name
"""


@pytest.fixture
def name() -> str:
    """For segments, of this test alone."""
    return f"nbddp-test-{os.getpid()}-{time.monotonic_ns()}"


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_shared_memory_and_semaphores_of_a_stopped_run_are_removed(
    cell: Cells, in_folder: Path, name: str, start_method: str
) -> None:
    before = set(os.listdir(SHM))
    forked = start_method == "forkserver"
    going = run(cell(_MAKES).until_stopped, name if forked else None, start_method=start_method, wait=False)
    wait_until(lambda: _ready(in_folder), 90)
    made = set(os.listdir(SHM)) - before
    # A spawned rank has no book.
    kinds = {"psm_": 2, "sem.mp-": 2, "torch_": 6 if forked else 2, name: 2 if forked else 0}
    assert {kind: sum(entry.startswith(kind) for entry in made) for kind in kinds} == kinds
    going.stop(0)
    assert set(os.listdir(SHM)) - before == set()


def test_shared_memory_of_a_finished_run_can_be_read_in_the_notebook(cell: Cells) -> None:
    name = run(cell(_MAKES).name_of_one, nprocs=1).value
    segment = SharedMemory(name)
    assert segment.buf[0] == 5
    segment.close()
    segment.unlink()
    assert not [entry for entry in os.listdir(SHM) if entry.startswith("sem.mp-")]


def test_shared_memory_of_other_processes_is_left_alone(cell: Cells, in_folder: Path, name: str) -> None:
    """The notebook's own, which the ranks use; and what has the name of something that a rank has removed."""
    names = cell(
        _MAKES
        + """
def train(ours, name):
    theirs = SharedMemory(ours)
    theirs.buf[1] = 7
    if nbddp.rank() == 0:
        once = SharedMemory(name, create=True, size=10)
        once.close(), once.unlink()
    open(f"rank-{nbddp.rank()}", "w").close()
    time.sleep(1000)
"""
    )
    ours = SharedMemory(create=True, size=100)
    going = start(names.train, ours.name, name)
    wait_until(lambda: _ready(in_folder))
    others = [SHM / name, SHM / "torch_1_2_3", SHM / f"torch_{os.getpid()}_1_2", SHM / "sem.mp-abcdefgh"]
    for path in others:
        path.touch()
    with (SHM / "sem.AbCd12").open("w"):  # a semaphore in the making
        going.stop(0)
        assert (SHM / "sem.AbCd12").exists()
    assert all(path.exists() for path in others)
    assert ours.buf[1] == 7
    ours.close()
    ours.unlink()
    for path in others:
        path.unlink()
    with pytest.raises(nbddp.RankDied):  # and the one that nobody makes any more
        run(cell("import os\ndef dies(): os._exit(3)").dies, nprocs=1)
    assert not (SHM / "sem.AbCd12").exists()


@pytest.mark.slow
def test_a_killed_kernel_leaves_nothing_in_shared_memory(in_folder: Path, name: str) -> None:
    before, others = set(os.listdir(SHM)), marked_pids()
    with Notebook() as notebook:
        notebook.ok(f"import os; os.chdir({str(in_folder)!r})\n{_MAKES}")
        notebook.begin(f"nbddp.run(until_stopped, [{name!r}], nprocs=2, device='cpu')")
        wait_until(lambda: _ready(in_folder), 90)
        assert len(set(os.listdir(SHM)) - before) == 12
        notebook.kill()
        wait_until(lambda: set(os.listdir(SHM)) == before, 5)
    wait_until(lambda: marked_pids() <= others)


@pytest.mark.slow
def test_the_resource_tracker_does_not_complain_of_removed_segments(in_folder: Path, name: str) -> None:
    """At its end it would list what is registered, and complain of each that is not there."""
    ended = script(
        f"""
        import linecache, sys, types, time, nbddp
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        source = {_MAKES!r}
        exec(source, main.__dict__)
        going = nbddp.run(main.until_stopped, ({name!r},), nprocs=2, device="cpu", show=False, wait=False)
        import glob
        while len(glob.glob("rank-*")) < 2: time.sleep(0.01)
        going.stop(0)
        """
    )
    assert (ended.returncode, ended.stderr) == (0, "")
