"""Two things at once: a failure and its echo, a flood and a stop, a step that one rank skips, a view that breaks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import psutil
import pytest

import nbddp
from tests.support import Cells, run, start, wait_until


def test_a_step_logged_three_times_is_averaged_over_all_ranks_each_time(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for _ in range(3):
                nbddp.log(step=0, loss=float(nbddp.rank()), reduce="mean")
    """)
    assert run(names.train).history["loss"].values.tolist() == [0.5, 0.5, 0.5]


def test_a_step_that_one_rank_skips_does_not_end_the_curve(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for step in range(200):
                if not (nbddp.rank() == 1 and step == 50):
                    nbddp.log(step=step, loss=step + nbddp.rank(), reduce="mean")
    """)
    steps, values = run(names.train).history["loss"]
    assert steps.tolist() == list(range(200))
    assert values.tolist() == [50.0 if step == 50 else step + 0.5 for step in range(200)]


def test_values_of_a_failed_attempt_are_not_averaged_into_the_next(cell: Cells) -> None:
    names = cell("""
        import nbddp, time
        def train():
            if nbddp.restart_count() == 0 and nbddp.rank() == 1:
                time.sleep(0.3)
                raise ValueError("once")
            for step in range(3):
                nbddp.log(step=step, loss=100.0 if nbddp.restart_count() == 0 else nbddp.rank(), reduce="mean")
            if nbddp.restart_count() == 0:
                time.sleep(60)
    """)
    finished = run(names.train, max_restarts=1)
    assert finished.history["loss"].steps.tolist() == [0, 1, 2]
    assert finished.history["loss"].values.tolist() == [0.5, 0.5, 0.5]
    assert [rank.step for rank in finished.history.ranks] == [2, 2]


def test_stop_ends_a_flood_of_metrics_within_15_s(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            while True:
                nbddp.log(x=1.0, y=2.0, z=3.0, reduce="mean")
    """)
    started = start(names.train)
    wait_until(lambda: "x" in started.history)
    wait_until(lambda: max(len(series.steps) for series in started.history.by_rank("x").values()) > 50_000, 60)
    began = time.monotonic()
    started.stop(0.5)
    assert time.monotonic() - began < 15
    assert started.state == "stopped"


@pytest.mark.slow
def test_a_timeout_is_not_restarted(cell: Cells) -> None:
    names = cell("""
        import nbddp, time
        def train():
            print(f"attempt {nbddp.restart_count()}")
            time.sleep(60)  # here it hangs
    """)
    with pytest.raises(nbddp.RunTimeout, match="here it hangs"):
        run(names.train, timeout=4, max_restarts=2)
    last = nbddp.last_run()
    assert last is not None
    assert last.logs(0) == "attempt 0\n"


def test_a_peer_that_exits_later_is_not_reported_as_the_cause(cell: Cells) -> None:
    names = cell("""
        import nbddp, os, time
        def train():
            nbddp.barrier()
            if nbddp.rank() == 0:
                raise ValueError("the root")
            time.sleep(0.06)
            os._exit(3)
    """)
    with pytest.raises(nbddp.RankError, match="rank 0 of 2 failed: ValueError: the root"):
        run(names.train)


def test_stop_does_not_wait_for_a_thread_that_the_function_left(cell: Cells) -> None:
    names = cell("""
        import threading, time
        def train():
            threading.Thread(target=time.sleep, args=(40,)).start()
            return 7
    """)
    started = start(names.train)
    wait_until(lambda: started._state.rank_states() == ["finished"] * 2)
    began = time.monotonic()
    started.stop(0.2)
    assert time.monotonic() - began < 10
    assert started.values == [7, 7]


def test_a_spawn_joined_after_the_end_still_has_its_pids_and_error(cell: Cells) -> None:
    names = cell("def boom(rank):\n    raise ValueError('late')")
    context = nbddp.spawn(names.boom, nprocs=2, join=False)
    assert context is not None
    wait_until(lambda: context.run.state == "failed")
    with pytest.raises(Exception, match="ValueError: late") as caught:
        context.join()
    assert len(context.pids()) == 2
    again: Any = pickle.loads(pickle.dumps(caught.value))
    before: Any = caught.value
    assert (type(again), again.msg, again.error_pid) == (type(before), before.msg, before.error_pid)


def test_a_module_that_exits_while_it_is_imported_is_a_payload_error(cell: Cells, in_folder: Any) -> None:
    (in_folder / "no_guard.py").write_text("import os, sys\nif 'RANK' in os.environ: sys.exit(0)\ndef helper(): pass\n")
    names = cell("""
        import sys
        sys.path.insert(0, "")
        import no_guard
        def train():
            return no_guard.helper()
    """)
    with pytest.raises(nbddp.PayloadError, match="SystemExit"):
        run(names.train)
    names.sys.path.remove("")
    del names.sys.modules["no_guard"]


def test_sys_exit_minus_1_is_exit_code_255_and_not_a_signal(cell: Cells) -> None:
    names = cell("import sys\ndef train(): sys.exit(-1)")
    with pytest.raises(nbddp.RankDied) as caught:
        run(names.train)
    assert (caught.value.exitcode, caught.value.signal_name) == (255, None)


def test_a_lock_of_the_fork_context_is_refused_with_a_remedy(cell: Cells) -> None:
    lock = multiprocessing.get_context("fork").Lock()
    if not hasattr(lock, "_is_fork_ctx"):
        pytest.skip("this Python's locks do not tell")
    names = cell("def train(): return lock")
    cell("import __main__").__main__.lock = lock
    with pytest.raises(nbddp.PayloadError, match=r'train → lock: .*get_context\("spawn"\)\.Lock\(\)'):
        run(names.train)


def test_wrong_types_of_gpus_and_env_are_launch_errors() -> None:
    for options in ({"gpus": 2}, {"gpus": []}, {"env": ["A=B"]}, {"env": {"RANK": "1"}}):
        with pytest.raises(nbddp.LaunchError):
            nbddp.run(os.getpid, **options)  # type: ignore[arg-type]


def test_numpy_numbers_and_float_totals_are_accepted(cell: Cells) -> None:
    names = cell("""
        import nbddp, numpy as np
        def train():
            list(nbddp.progress(range(2), total=2.0))
            return nbddp.reduce(np.float32(0.5), "max"), nbddp.reduce(np.int64(2), "sum")
    """)
    assert run(names.train).value == (0.5, 4)


def test_a_run_can_be_stopped_after_its_view_raised_an_error(cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        live = False

        def update(self, status: Any) -> None:
            if status.state == "running":
                raise BrokenPipeError("nobody reads")

        def write(self, text: str) -> None:
            pass

    monkeypatch.setattr("nbddp.kernel.views.view_for", lambda *args, **options: Broken())
    names = cell("import time\ndef train(): time.sleep(60)")
    began = time.monotonic()
    with pytest.raises(BrokenPipeError):
        nbddp.run(names.train, nprocs=2, device="cpu")
    last = nbddp.last_run()
    assert last is not None
    last.stop()
    assert (last.state, time.monotonic() - began < 45) == ("stopped", True)


def _script(folder: Any, source: str, **env: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(textwrap.dedent(source))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), **env}
    return subprocess.Popen([sys.executable, "program.py"], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_ranks_end_with_a_killed_kernel_although_its_fork_lives_on(in_folder: Any) -> None:
    kernel = _script(
        in_folder,
        """
        import os, signal, time
        import nbddp
        from nbddp.forkserver import server as forkserver
        run = nbddp.run(time.sleep, (600,), nprocs=2, device="cpu", show=False, wait=False)
        while run.state != "running": time.sleep(0.01)
        child = os.fork()
        if child == 0: time.sleep(600)
        print(child, forkserver.pid(), *run.pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert kernel.stdout is not None
    child, *others = map(int, kernel.stdout.readline().split())  # the fork server, the ranks
    kernel.wait(10)
    try:
        wait_until(lambda: not any(map(psutil.pid_exists, others)))
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)
        kernel.stdout.close()


@pytest.mark.slow
def test_runs_work_when_the_fork_server_has_initialised_cuda(in_folder: Any) -> None:
    (in_folder / "initialises_cuda.py").write_text("import torch\ntorch.cuda._is_in_bad_fork = lambda: True\n")
    program = _script(
        in_folder,
        """
        import nbddp
        from nbddp.forkserver import server as forkserver
        from nbddp.forkserver import server_process
        server_process.IMPORTS.append("initialises_cuda")
        if __name__ == "__main__":
            run = nbddp.run(nbddp.rank, nprocs=2, device="cpu", show=False)
            print(run.values, forkserver.available())
        """,
    )
    shown, _ = program.communicate(timeout=90)
    assert shown == "[0, 1] False\n"
