"""A Run as a Future, the runs of a notebook kernel, and their common end."""

from __future__ import annotations

import concurrent.futures
import gc
import threading
from typing import Any

import psutil
import pytest

import nbddp
from nbddp.forkserver import server as forkserver
from nbddp.kernel.attempt import Attempt
from tests.support import Cells, Notebook, run, start, wait_until

SLEEPS = """
    import time
    def train(seconds):
        time.sleep(seconds)
        return "slept"
"""


def test_result_waits_for_rank_0s_value(cell: Cells) -> None:
    going = start(cell(SLEEPS).train, 0.2)
    assert not going.done()
    with pytest.raises(TimeoutError, match="still"):
        going.result(timeout=0.01)
    assert going.result() == "slept"
    assert (going.done(), going.exception()) == (True, None)


def test_a_result_of_none_takes_no_bytes_and_no_thread(cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, threads = [], set()
    result_of = Attempt._result_of

    def noting(attempt: Attempt, worker: Any) -> Any:
        sizes.append(worker.report.nbytes)
        threads.add(threading.current_thread().name)
        return result_of(attempt, worker)

    monkeypatch.setattr(Attempt, "_result_of", noting)
    names = cell("def nothing(): pass\ndef a_list(): return [None]")
    assert run(names.nothing).values == [None, None]
    assert (sizes, threads) == ([0, 0], {"nbddp-nothing"})
    assert run(names.a_list).values == [[None], [None]]
    assert all(sizes[2:])
    assert "nbddp-unpack" in threads


def test_exception_is_what_result_raises(cell: Cells) -> None:
    going = start(cell("def train(): return 1 / 0").train)
    error = going.exception(timeout=60)
    assert isinstance(error, nbddp.RankError)
    with pytest.raises(nbddp.RankError) as raised:
        going.result()
    assert raised.value is error


def test_cancel_stops_a_run_that_goes_on_and_no_other(cell: Cells) -> None:
    going = start(cell(SLEEPS).train, 300)
    wait_until(lambda: len(going.pids) == 2)
    assert going.cancel()
    assert (going.state, going.done(), going.cancel()) == ("stopped", True, False)


def test_a_run_knows_its_world_size_its_pids_and_its_restarts(cell: Cells) -> None:
    names = cell("""
        import nbddp, os
        def train():
            assert nbddp.restart_count() == 1
            return os.getpid()
    """)
    done = run(names.train, nprocs=3, max_restarts=1)
    assert (done.world_size, done.pids, done.restarts) == (3, done.values, 1)


def test_a_run_has_the_methods_of_a_future() -> None:
    mine = {"result", "exception", "done", "cancel"}
    assert mine <= set(dir(concurrent.futures.Future)) & set(dir(nbddp.Run))


def test_runs_lists_what_goes_on_and_what_is_held(cell: Cells) -> None:
    gc.collect()
    names = cell(SLEEPS)
    first = run(names.train, 0.0)
    run(names.train, 0.0)  # held by nobody but last_run()
    going = start(names.train, 300)
    gc.collect()
    assert [r for r in nbddp.runs() if r in (first, going)] == [first, going]
    assert len(nbddp.runs()) >= 2
    going.stop()


@pytest.mark.slow
def test_shutdown_ends_runs_and_fork_server_and_a_later_run_starts_anew(cell: Cells) -> None:
    names = cell(SLEEPS)
    going = start(names.train, 300)
    wait_until(lambda: going.state == "running")
    server = forkserver.pid()
    assert server is not None
    nbddp.shutdown()
    assert going.state == "stopped"
    wait_until(lambda: not psutil.pid_exists(server))
    assert forkserver.pid() is None
    assert run(names.train, 0.0).value == "slept"
    assert forkserver.pid() not in (None, server)


def test_an_unknown_option_is_refused_with_the_one_that_was_meant(cell: Cells) -> None:
    with pytest.raises(TypeError, match=r"run\(\) got an unexpected keyword argument 'nproc'; did you mean nprocs\?"):
        nbddp.run(cell(SLEEPS).train, (0.0,), nproc=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"run_script\(\) got an unexpected keyword argument 'sed'"):
        nbddp.run_script("train.py", sed=2)  # type: ignore[call-arg]


def test_a_run_and_a_history_show_their_curves_but_not_in_the_cell_that_shows_them_anyway(notebook: Notebook) -> None:
    notebook.ok("""
        import nbddp
        def kinds(shown): return sorted(get_ipython().display_formatter.format(shown)[0])
        def train(): nbddp.log(loss=0.5)
        run = nbddp.run(train, nprocs=2, device="cpu", show=True)
        same = kinds(run)
    """)
    assert notebook.ok("same").shown.strip() == "['text/plain']"
    for each in ("run", "run.history", "nbddp.run(train, nprocs=2, device='cpu', show=False)"):
        assert notebook.ok(f"kinds({each})").shown.strip() == "['text/html', 'text/plain']"
    assert notebook.ok("'data:image/svg+xml;base64' in run._repr_html_()").shown.strip() == "True"
    without = notebook.ok("kinds(nbddp.run(lambda: 1, nprocs=2, device='cpu', show=False))").shown.strip()
    assert without == "['text/plain']"
