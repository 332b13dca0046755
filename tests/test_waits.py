"""What a run does not wait for: open pools, DataLoader workers, too long a TMPDIR, too many ranks, deep errors."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing.util
import os
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import nbddp
from nbddp.forkserver import server as forkserver
from nbddp.kernel import attempt
from nbddp.launch import devices
from tests.support import Cells, Notebook, _kind, open_fds, run, script, start, wait_until, wait_until_alone

# ---------------------------------------------------------------------------- the end of a rank

POOLS = {
    "ProcessPoolExecutor": "pool = concurrent.futures.ProcessPoolExecutor(1); pool.submit(abs, -5).result()",
    "ThreadPoolExecutor": "pool = concurrent.futures.ThreadPoolExecutor(1); pool.submit(abs, -5).result()",
    "joblib": "joblib.Parallel(n_jobs=2)(joblib.delayed(abs)(-i) for i in range(3))",
    "multiprocessing": "pool = multiprocessing.Pool(1); pool.apply(abs, (-5,))",
}


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("kind", POOLS)
def test_an_open_pool_does_not_delay_the_end_of_a_run(
    cell: Cells, in_folder: Path, kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of any Python program; and the exit handlers have run."""
    if kind == "joblib" and importlib.util.find_spec("joblib") is None:
        pytest.skip("joblib is not installed")
    if method == "spawn" and kind != "ProcessPoolExecutor":
        pytest.skip("one is enough: it leaves in the same way")
    monkeypatch.setattr(attempt, "_LEAVE_GRACE_S", grace := 60.0)
    train = cell(f"""
        import atexit, concurrent.futures, multiprocessing, pathlib, time
        def train():
            import nbddp
            global pool  # it stays open
            {"import joblib" if kind == "joblib" else ""}
            {POOLS[kind]}
            atexit.register(pathlib.Path(f"{{nbddp.rank()}}").touch)
            return time.time()
    """).train
    done = run(train, start_method=method)
    assert done.seconds < grace
    assert sorted(path.name for path in in_folder.iterdir()) == ["0", "1"]


def test_a_non_daemon_thread_ends_before_the_exit_handlers(cell: Cells, in_folder: Path) -> None:
    """As in any Python program: what it still writes is there for them."""
    train = cell("""
        import atexit, pathlib, threading, time
        def train():
            path = pathlib.Path("written")
            threading.Thread(target=lambda: (time.sleep(0.5), path.write_text("by the thread"))).start()
            atexit.register(lambda: pathlib.Path("seen").write_text(path.read_text()))
    """).train
    run(train, nprocs=1)
    assert (in_folder / "seen").read_text() == "by the thread"


# ---------------------------------------------------------------------------- workers of a DataLoader

# As on Linux from Python 3.14 on, in the notebook, its fork server and every process: read when Python starts.
SITECUSTOMIZE = """
from multiprocessing import context
if not hasattr(context._default_context, "_default_context"): raise SystemExit("test_waits needs another way")
context._default_context._default_context = context._concrete_contexts["forkserver"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_dataloader_workers_are_forked_where_the_platform_has_a_fork_server(in_folder: Path, method: str) -> None:
    """A server of the rank's own would have to import torch in every epoch, 10 s."""
    (in_folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    done = script(
        f"""
        import multiprocessing, os, torch, nbddp
        class Parents(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return os.getppid()
        def train():
            before = multiprocessing.get_start_method(allow_none=True)
            loader = torch.utils.data.DataLoader(Parents(), num_workers=2)
            forked = [int(parent) == os.getpid() for epoch in range(2) for parent in loader]
            mine = before, multiprocessing.get_start_method()
            multiprocessing.set_start_method("spawn", force=True)  # a program's own choice holds
            return forked, mine, multiprocessing.get_start_method()
        def chooses():
            multiprocessing.set_start_method("spawn")
        print(multiprocessing.get_start_method())
        for value in nbddp.run(train, nprocs=2, device="cpu", show=False, start_method={method!r}).values:
            print(*value)
        nbddp.run(chooses, nprocs=1, device="cpu", show=False)
        """,
        PYTHONPATH=str(in_folder),
    )
    assert done.stderr == ""
    assert done.stdout == "forkserver\n" + f"{[True] * 8} (None, 'fork') spawn\n" * 2


# ---------------------------------------------------------------------------- the names of sockets

LOADS = """
    import nbddp, os, psutil, sys, tempfile, torch
    def train():
        data = torch.utils.data.TensorDataset(torch.arange(8.))
        loader = torch.utils.data.DataLoader(data, num_workers=2)
        return sum(batch.item() for (batch,) in loader)
    nbddp.run  # all that a notebook imports, once for all of them
    for case in sys.argv[1:]:
        if pid := os.fork():
            assert os.waitpid(pid, 0)[1] == 0
            continue
        method, os.environ["TMPDIR"] = case.split(":")
        tempfile.tempdir = None
        try:
            print(nbddp.run(train, nprocs=2, device="cpu", show=False, start_method=method, timeout=100).values)
        except nbddp.NbddpError as error:
            print(type(error).__name__, error)
            print(len(psutil.Process().children()))
        sys.stdout.flush()
        os._exit(0)
"""


FINDS_A_SHORTER_FOLDER = hasattr(multiprocessing.util, "_get_base_temp_dir")


def _folder_of_length(parent: Path, length: int) -> str:
    folder = parent / ("x" * (length - len(str(parent)) - 1))
    folder.mkdir()
    assert len(str(folder)) == length
    return str(folder)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a name that leaves room for names of any length below it."""
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as folder:
        yield Path(folder)


def _loads_in(folders: list[str], methods: list[str]) -> list[str]:
    """The lines of a program that loads data with each start method, each time with another TMPDIR."""
    done = script(LOADS, *(f"{method}:{folder}" for method, folder in zip(methods, folders)))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_dataloader_workers_work_in_a_long_tmpdir(short_path: Path) -> None:
    folders = [_folder_of_length(short_path, length) for length in (70, 77, 75)]
    assert _loads_in(folders, ["forkserver", "forkserver", "spawn"]) == ["[28.0, 28.0]"] * 3


@pytest.mark.slow
@pytest.mark.skipif(FINDS_A_SHORTER_FOLDER, reason="Python 3.14 finds a shorter one itself")
def test_a_too_long_tmpdir_is_refused_before_a_process_starts(short_path: Path) -> None:
    lengths = [78, 200, 76]
    folders = [_folder_of_length(short_path, length) for length in lengths]
    lines = _loads_in(folders, ["forkserver", "forkserver", "spawn"])
    expected = []
    for folder, length, most in zip(folders, lengths, (77, 77, 75)):
        expected += [
            f"LaunchError TMPDIR is {length} characters long, but DataLoader workers create sockets in it, and the "
            f"system limits their paths: it may have at most {most}. Set TMPDIR to a shorter folder, e.g. /tmp, before "
            f"the notebook starts ({folder})",
            "0",
        ]
    assert lines == expected


def test_a_notebook_with_a_too_long_tmpdir_can_import_nbddp(short_path: Path) -> None:
    with Notebook({"TMPDIR": _folder_of_length(short_path, 100), "JUPYTER_RUNTIME_DIR": str(short_path)}) as notebook:
        notebook.ok("import nbddp\n%load_ext nbddp")
        if FINDS_A_SHORTER_FOLDER:
            notebook.ok("assert nbddp.run(nbddp.rank, nprocs=1, device='cpu').value == 0\nnbddp.preload('mailbox')")
            return
        reply = notebook.cell("nbddp.run(print, nprocs=1, device='cpu')")
        assert reply.ename == "LaunchError"
        assert "TMPDIR is 100 characters long" in reply.evalue
        assert notebook.cell("nbddp.preload('mailbox')").evalue == reply.evalue


# ---------------------------------------------------------------------------- too many ranks


def test_many_more_ranks_than_cores_need_oversubscribe(cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    names = cell("def train(): return 1")
    cores = len(os.sched_getaffinity(0))
    most = max(64, 16 * cores)
    with pytest.raises(nbddp.LaunchError) as raised:
        run(names.train, nprocs=most + 1)
    assert str(raised.value) == (
        f"nprocs={most + 1} on {cores} cores would take minutes and much memory; at most {most} start here. "
        f"Use nprocs={cores}, or oversubscribe=True if you mean it"
    )
    with pytest.raises(nbddp.LaunchError, match="nprocs=500"):
        nbddp.spawn(lambda rank: None, nprocs=500)
    with pytest.raises(nbddp.LaunchError, match="nprocs=500"):
        nbddp.run_script(__file__, nprocs=500, device="cpu")
    monkeypatch.setattr(devices, "_ALWAYS_ALLOWED_RANKS", 1)
    monkeypatch.setattr(devices, "_MAX_RANKS_PER_CORE", 1)
    with pytest.raises(nbddp.LaunchError, match="oversubscribe=True"):
        run(names.train, nprocs=cores + 1)
    assert run(names.train, nprocs=cores + 1, oversubscribe=True).values == [1] * (cores + 1)


# ---------------------------------------------------------------------------- errors

ERRORS = {
    "deeper with every pickling": (
        """
        class Deeper(Exception):
            def __reduce__(self): return Deeper, (Deeper("deeper"),)
        def train(): raise Deeper("the user's text")
        """,
        "Deeper: the user's text",
    ),
    "two of it": (
        """
        class Deeper(Exception):
            def __reduce__(self): return Deeper, (Deeper(1), Deeper(2))
        def train(): raise Deeper("the user's text")
        """,
        "Deeper: the user's text",
    ),
    "never ends": (
        """
        import itertools
        class Endless(Exception):
            def __reduce__(self): return Endless, ("x",), None, map(float, itertools.count())
        def train(): raise Endless("the user's text")
        """,
        "Endless: the user's text",
    ),
    "sleeps": (
        """
        import time
        class Sleeps(Exception):
            def __reduce__(self): time.sleep(10000)
        def train(): raise Sleeps("the user's text")
        """,
        "Sleeps: the user's text",
    ),
    "a chain of 3,000 causes": (
        """
        def train():
            error = None
            for number in range(3000):
                try:
                    raise ValueError(f"number {number}") from error
                except ValueError as raised:
                    error = raised
            raise error
        """,
        "ValueError: number 2999",
    ),
    "a chain of 3,000 contexts": (
        """
        def train():
            error = None
            for number in range(3000):
                following = ValueError(f"number {number}")
                following.__context__ = error
                error = following
            raise error
        """,
        "ValueError: number 2999",
    ),
    "a group in a group, 3,000 times": (
        """
        def train():
            error = ValueError("inside")
            for number in range(3000): error = ExceptionGroup(f"number {number}", [error])
            raise error
        """,
        "ExceptionGroup: number 2999 (1 sub-exception)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_too_deep_to_pickle_arrives_at_once(cell: Cells, kind: str) -> None:
    if "ExceptionGroup" in ERRORS[kind][1] and sys.version_info < (3, 11):
        pytest.skip("from Python 3.11 on")
    source, text = ERRORS[kind]
    with pytest.raises(nbddp.RankError) as raised:
        run(cell(source).train, nprocs=1, timeout=60)
    cause = raised.value.cause
    assert f"{type(cause).__name__}: {cause}" == text
    assert cause.__traceback__ is not None
    assert "".join(traceback.format_exception(raised.value)).count("\n") < 1000


# ---------------------------------------------------------------------------- what is left of a fork server


@pytest.mark.slow
def test_a_dead_fork_server_is_reaped_when_the_run_is_over(cell: Cells, in_folder: Path) -> None:
    """Without the help of the garbage collector; and the next run has another one."""
    train = cell("""
        import os, time
        def train(wait):
            while wait and not os.path.exists("go_on"): time.sleep(0.01)
            return os.getppid()
    """).train
    run(train, False)
    gc.collect()
    gc.disable()
    try:
        before = Counter(map(_kind, open_fds().values()))
        going = start(train, True)
        server = forkserver.pid()
        assert server is not None
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: psutil.Process(server).status() == psutil.STATUS_ZOMBIE)
        (in_folder / "go_on").touch()
        assert going.wait(30).state == "finished"
        assert not psutil.pid_exists(server)
        assert forkserver.pid() is None
        assert not Counter(map(_kind, open_fds().values())) - before
        assert set(run(train, False).values) == {forkserver.pid()}
    finally:
        gc.enable()


@pytest.mark.slow
def test_runs_work_after_the_user_reaped_the_fork_server(cell: Cells) -> None:
    """``os.waitpid(-1, 0)``: multiprocessing does not find it any more, and raised ChildProcessError in every run."""
    names = cell("def train(): return 1")
    run(names.train)
    server = forkserver.pid()
    assert server is not None
    os.kill(server, signal.SIGKILL)
    assert os.waitpid(server, 0)[0] == server
    assert run(names.train).values == [1, 1]


def test_a_kernel_killed_while_torch_is_imported_leaves_nothing(short_path: Path) -> None:
    """However long that takes, and though no thread of the server's can run meanwhile."""
    (short_path / "torch").mkdir()
    endless = "import collections, itertools\nopen({!r}, 'w').close()\ncollections.deque(itertools.count(), maxlen=0)\n"
    (short_path / "torch" / "__init__.py").write_text(endless.format(str(short_path / "begun")))
    (short_path / "tmp").mkdir()
    done = script(
        """
        import os, signal, sys, time
        from nbddp.forkserver import server as forkserver
        forkserver.warm()
        while not os.path.exists(sys.argv[1]): time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        str(short_path / "begun"),
        TMPDIR=str(short_path / "tmp"),
        PYTHONPATH=str(short_path),
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "", "")
    wait_until_alone(os.getpid())
    assert os.listdir(short_path / "tmp") == []
