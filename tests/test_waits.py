"""What a run must not wait for: pools at a rank's end, workers of another start method, names too long, errors too deep."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from nbddp.kernel import supervisor
from tests.support import Cells, run, script

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
    """A server of the rank's own would have to import torch in every epoch, 10 s; a child of the notebook's is not it."""
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
