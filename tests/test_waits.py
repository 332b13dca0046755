"""What a run must not wait for: pools at a rank's end, workers, names that are too long, too many ranks, deep errors."""

from __future__ import annotations

import importlib.util
import multiprocessing.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbddp.kernel import supervisor
from tests.support import Cells, Notebook, run, script

# ---------------------------------------------------------------------------- the end of a rank

POOLS = {
    "ProcessPoolExecutor": "pool = concurrent.futures.ProcessPoolExecutor(1); pool.submit(abs, -5).result()",
    "ThreadPoolExecutor": "pool = concurrent.futures.ThreadPoolExecutor(1); pool.submit(abs, -5).result()",
    "joblib": "joblib.Parallel(n_jobs=2)(joblib.delayed(abs)(-i) for i in range(3))",
    "multiprocessing": "pool = multiprocessing.Pool(1); pool.apply(abs, (-5,))",
}


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("kind", POOLS)
def test_a_pool_that_stays_open_does_not_hold_up_the_end(
    cell: Cells, in_folder: Path, kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of any Python program; and the exit handlers have run."""
    if kind == "joblib" and importlib.util.find_spec("joblib") is None:
        pytest.skip("joblib is not installed")
    if method == "spawn" and kind != "ProcessPoolExecutor":
        pytest.skip("one is enough: it leaves in the same way")
    monkeypatch.setattr(supervisor, "_LEAVE_GRACE_S", grace := 60.0)
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


def test_a_thread_that_is_not_a_daemon_ends_before_the_exit_handlers(cell: Cells, in_folder: Path) -> None:
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
    import nbddp, sys, torch
    def train():
        data = torch.utils.data.TensorDataset(torch.arange(8.))
        loader = torch.utils.data.DataLoader(data, num_workers=2)
        return sum(batch.item() for (batch,) in loader)
    try:
        print(nbddp.run(train, nprocs=2, device="cpu", show=False, start_method=sys.argv[1], timeout=100).values)
    except nbddp.NbddpError as error:
        print(type(error).__name__, error)
    import psutil
    print(len(psutil.Process().children()))
"""


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


@pytest.mark.parametrize(("method", "length"), [("forkserver", 66), ("forkserver", 71), ("spawn", 75)])
def test_workers_of_a_dataloader_work_in_a_long_tmpdir(short_path: Path, method: str, length: int) -> None:
    done = script(LOADS, method, TMPDIR=_folder_of_length(short_path, length))
    assert done.stdout.splitlines()[0] == "[28.0, 28.0]", done.stderr


@pytest.mark.skipif(
    hasattr(multiprocessing.util, "_get_base_temp_dir"), reason="Python 3.14 finds a shorter one itself"
)
@pytest.mark.parametrize(
    ("method", "length", "most"),
    [("forkserver", 72, 71), ("forkserver", 77, 71), ("forkserver", 200, 71), ("spawn", 76, 75)],
)
def test_a_tmpdir_that_is_too_long_is_named_before_anything_starts(
    short_path: Path, method: str, length: int, most: int
) -> None:
    done = script(LOADS, method, TMPDIR=(folder := _folder_of_length(short_path, length)))
    assert done.stdout.splitlines() == [
        f"LaunchError TMPDIR is {length} characters long, and sockets of DataLoader workers lie in it, whose names the "
        f"system limits: at most {most}. Set TMPDIR to a shorter folder, e.g. /tmp, before the notebook starts "
        f"({folder})",
        "0",
    ]


def test_a_notebook_with_a_tmpdir_that_is_too_long_can_import_nbddp(short_path: Path) -> None:
    with Notebook({"TMPDIR": _folder_of_length(short_path, 100), "JUPYTER_RUNTIME_DIR": str(short_path)}) as notebook:
        notebook.ok("import nbddp\n%load_ext nbddp")
        reply = notebook.cell("nbddp.run(print, nprocs=1, device='cpu')")
        assert reply.ename == "LaunchError"
        assert "TMPDIR is 100 characters long" in reply.evalue
        assert notebook.cell("nbddp.preload('mailbox')").evalue == reply.evalue
