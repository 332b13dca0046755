"""A ``Run`` as a ``Future``."""

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import sys
import threading
import time

import pytest

import nbddp
from nbddp.kernel.settings import Options
from nbddp.messages import Settings
from tests.support import Cells, run, script, wait_until


def test_runs_can_be_listed_on_another_thread_while_runs_come_and_go() -> None:
    kept = [nbddp.Run(Settings("kept", 1), Options()) for _ in range(30)]
    over, listed = threading.Event(), []

    def list_them() -> None:
        while not over.is_set():
            listed.append([run.name for run in nbddp.runs()].count("kept"))

    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(1) as pool:
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(1e-6)  # threads take turns as often as possible
        listing = pool.submit(list_them)
        for _ in range(500):
            nbddp.Run(Settings("passing", 1), Options())
        wait_until(lambda: listed)
        over.set()
        listing.result()
    assert set(listed) == {len(kept)}
    for each in (*kept, nbddp.last_run()):
        each._conclude("finished")


def test_a_run_ends_although_an_event_loop_that_waited_for_it_is_closed() -> None:
    run, answers = nbddp.Run(Settings("train", 1), Options()), []

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run, 0.01)  # type: ignore[arg-type]

    async def wait() -> None:
        threading.Timer(0.01, run._conclude, ["finished"]).start()
        answers.append(await run)

    asyncio.run(give_up())
    asyncio.run(wait())
    assert (answers, run.state, run.done()) == ([run], "finished", True)


def test_a_script_that_ends_stops_its_runs_and_its_open_session() -> None:
    source = """
        import time, nbddp
        session = nbddp.Session(nprocs=2, device="cpu", show=False)
        nbddp.run(time.sleep, [90], nprocs=2, device="cpu", wait=False).wait(0.5)
    """
    assert "TimeoutError" in script(source, timeout_s=60).stderr


def test_shutdown_stops_the_runs_and_the_fork_server_which_the_next_run_starts_again() -> None:
    said = script("""
        import nbddp, psutil, time
        run = nbddp.run(time.sleep, [90], nprocs=2, device="cpu", wait=False)
        while run.state != "running": time.sleep(0.05)
        servers = [each for each in psutil.Process().children() if "forkserver" in str(each.cmdline())]
        print(run.done(), run.cancel(), len(servers))
        nbddp.shutdown()
        print(run.state, psutil.wait_procs(servers, 10)[1])
        print(nbddp.run(abs, [-1], nprocs=1, device="cpu").value)
    """)
    assert (said.stdout, said.stderr) == ("False False 1\nstopped []\n1\n", "")


@pytest.mark.parametrize("name", ["x" * 5000, "雪" * 300, "a\0b\nc/d", "\udc80"], ids=["long", "wide", "null", "half"])
def test_a_run_may_have_any_name(cell: Cells, name: str) -> None:
    going = run(cell("def train(): return 1").train, name=name, wait=False)
    assert (going.wait().values, going.name) == ([1, 1], name)


def test_the_end_of_what_a_rank_has_printed_is_as_a_terminal_shows_it_without_colors() -> None:
    assert run(print, "old\n10 %\r20 %\r\x1b[1mend\x1b[0m")._tail(0, 6) == "d\nend\n"


def test_an_interrupt_while_metrics_are_sent_changes_no_outcome() -> None:
    def send(step: int, metrics: dict[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)

    def fail() -> None:
        nbddp.log(loss=1.0)
        raise ValueError("mine")

    with pytest.raises(KeyboardInterrupt):
        nbddp.run(fail, nprocs=1, device="cpu", log_to=send)
    run = nbddp.last_run()
    assert (run.state, run.done(), isinstance(run.error, nbddp.RankError)) == ("failed", True, True)


def test_a_method_of_a_builtin_type_runs() -> None:
    assert (run(str.upper, "a").value, run(dict.get, {"a": 1}, "a").value) == ("A", 1)
