"""What a run must not wait for: pools at a rank's end, workers of another start method, names too long, errors too deep."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from nbddp.kernel import supervisor
from tests.support import Cells, run

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
