"""The parts that a new Python breaks first: multiprocessing's internals, tracebacks, faulthandler and buffers."""

from __future__ import annotations

import compileall
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import psutil
import pytest

import nbddp
from nbddp import tracebacks
from nbddp.errors import RankError
from nbddp.forkserver import server as forkserver
from nbddp.forkserver.process import ForkedProcess
from nbddp.history.history import History
from nbddp.launch import dumps
from nbddp.launch.output import RankOutput, open_output
from nbddp.panel.text import TextView
from nbddp.panel.view import Status
from nbddp.worker.output import STACKS_SIGNAL
from tests.portable import far_side

PACKAGE = Path(nbddp.__file__).parent


def test_this_python_compiles_every_file() -> None:
    assert compileall.compile_dir(str(PACKAGE), quiet=1, force=True)


@contextmanager
def started(target: Any, *args: Any) -> Iterator[tuple[Any, Any]]:
    ours, theirs = Pipe()
    process = ForkedProcess(target=target, args=(theirs, *args))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        process.close()
        ours.close()


def test_a_process_of_the_fork_server_has_its_exit_code_and_not_our_main() -> None:
    sys.modules["__main__"].__dict__["marker"] = 1
    with started(far_side.answer) as (process, ours):
        pid, parent, has_our_main = ours.recv()
        process.join(10)
        assert (pid, process.exitcode) == (process.pid, 7)
        assert parent == forkserver.pid() != os.getpid()
        assert not has_our_main
    del sys.modules["__main__"].__dict__["marker"]


@pytest.mark.slow
def test_a_fork_server_killed_between_two_processes_is_replaced() -> None:
    with started(far_side.answer) as (process, _):
        process.join(10)
    server = forkserver.pid()
    assert server is not None
    os.kill(server, signal.SIGKILL)
    with started(far_side.answer) as (process, ours):
        assert ours.recv()[1] == forkserver.pid() != server
        process.join(10)
        assert process.exitcode == 7


@pytest.mark.slow
def test_a_run_leaves_the_default_start_method_unset() -> None:
    code = (
        "import multiprocessing as mp\n"
        "from tests.portable.test_without_torch import started, far_side\n"
        "with started(far_side.answer) as (process, ours): ours.recv(); process.join(10)\n"
        "assert mp.get_start_method(allow_none=True) is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=PACKAGE.parent)


KERNEL = """
import os, signal
from tests.portable.test_without_torch import started, far_side
with started(far_side.live_for_ever) as (process, ours):
    print(*ours.recv(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread watches")
def test_a_rank_that_swallows_every_exception_ends_with_a_killed_kernel() -> None:
    kernel = subprocess.run([sys.executable, "-c", KERNEL], capture_output=True, timeout=60, cwd=PACKAGE.parent)
    assert kernel.returncode == -signal.SIGKILL
    rank, child, session = map(int, kernel.stdout.split())
    assert session == rank
    deadline = time.monotonic() + 10
    while any(map(_runs, (rank, child))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(rank)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_stacks_are_parsed_in_this_pythons_format(tmp_path: Path) -> None:
    dump = tmp_path / "stacks"
    dump.touch()
    with started(far_side.show_stacks, str(dump)) as (process, ours):
        ours.recv()
        while "wait_somewhere" not in dump.read_text():
            process.join(0.1)
            os.kill(process.pid, STACKS_SIGNAL)
    frames = dumps.main_thread(dump.read_text())
    functions = [function for file, _, function in frames if file == far_side.__file__]
    assert functions[:2] == ["show_stacks", "wait_somewhere"]


def outer(divisor: int) -> float:
    before = 1
    return inner(before, divisor)


def inner(a: int, b: int) -> float:
    return a / b


def test_a_pickled_traceback_keeps_its_lines() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        outer(0)
    error = caught.value
    lines = [(e.tb_lineno, e.tb_frame.f_code.co_name) for e in tracebacks._entries(error.__traceback__)]
    tracebacks.make_picklable(error)
    back = pickle.loads(cloudpickle.dumps(error))
    entries = tracebacks._entries(back.__traceback__)
    assert [(e.tb_lineno, e.tb_frame.f_code.co_name) for e in entries] == lines
    assert lines[-1] == (inner.__code__.co_firstlineno + 1, "inner")
    assert entries[-2].tb_frame.f_code.co_firstlineno == outer.__code__.co_firstlineno
    assert "rank 1 of 2 failed: ZeroDivisionError" in str(RankError(1, 2, back))


def test_a_burst_of_metrics_arrives_whole() -> None:
    history = History(1)
    with started(far_side.log_a_burst) as (process, ours):
        os.set_blocking(ours.fileno(), False)
        while process.exitcode is None:
            _drain(ours.fileno(), history)
            process.join(0.01)
        _drain(ours.fileno(), history)
        assert process.exitcode == 0
    steps, values = history["loss"]
    assert steps.tolist() == list(range(far_side.BURST))
    assert values.sum() == sum(range(far_side.BURST)) / 2
    assert history.names == ["loss", far_side.LONG_NAME]


def _drain(reader: int, history: History) -> None:
    try:
        while data := os.read(reader, 10_007):  # cuts records
            history.feed(0, data)
    except BlockingIOError:
        return


def test_output_that_exceeds_the_limit_keeps_its_newest_part() -> None:
    fd = open_output()
    output = RankOutput(fd)
    os.write(fd, b"10%\r50%\r100%\nwhole \xc3")
    assert output.take() == "10%\r50%\r100%\nwhole "
    os.write(fd, b"\xa9\n")
    assert output.take() == "é\n"
    assert output.text() == "100%\nwhole é\n"
    os.write(fd, b"x" * (5 << 20))
    output.close()
    assert re.match(r"\[1,048,\d+ older bytes", output.text())


def test_the_text_view_reports_the_start_output_and_end_once() -> None:
    stream = io.StringIO()
    view = TextView(SimpleNamespace(history=History(2)), stream)
    for state in ("starting", "running", "finished"):
        view.update(Status("train", state, "2 processes · gloo", "", 1.5))
        view.write("a line\n" if state == "running" else "")
    assert stream.getvalue().splitlines() == [
        "train: 2 processes · gloo",
        "a line",
        "train: finished after 1.5 s · 2 processes · gloo",
    ]
