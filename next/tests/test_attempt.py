"""What a run decides, on events that are written down: which failure is the cause, restarts, stop, timeout."""

from __future__ import annotations

import functools
import signal
import threading
from pathlib import Path

import pytest

import nbddp
from nbddp.kernel.settings import Options, decide
from nbddp.kernel.start import carry_out, pack_call
from nbddp.messages import Failure, Report
from nbddp.process.machine import Event
from tests.machines import FakeMachine, exited, failed, finished, follow, message
from tests.support import wait_until

CLOSED = "Connection closed by peer"


def test_all_ranks_that_report_end_a_run() -> None:
    run = follow(3, [finished(2), finished(0), finished(1)])
    assert (run.state, run.error, run.values) == ("finished", None, [None] * 3)


def test_the_cause_is_no_broken_connection_even_if_that_was_first() -> None:
    run = follow(4, [failed(2, 5.0, CLOSED), failed(1, 5.1, "boom"), failed(0, 5.2, CLOSED), failed(3, 5.3, CLOSED)])
    assert (run.state, run.error.rank, str(run.error.cause)) == ("failed", 1, "RuntimeError: boom")


def test_of_two_causes_the_earlier_is_the_error_whichever_arrived_first() -> None:
    run = follow(3, [failed(2, 5.2, "later"), failed(1, 5.1, "earlier"), failed(0, 5.3, CLOSED)])
    assert run.error.rank == 1


def test_a_rank_that_died_is_the_cause_of_broken_connections() -> None:
    run = follow(3, [failed(0, 1.0, CLOSED), failed(2, 1.1, CLOSED), exited(1, -9)])
    assert (type(run.error), run.error.rank, run.error.signal_name) == (nbddp.RankDied, 1, "SIGKILL")


def test_a_failure_interrupts_the_others() -> None:
    machine = FakeMachine(failed(1, 1.0, "boom"))
    run = follow(3, machine)
    assert (run.error.rank, machine.closed) == (1, True)
    assert machine.signals == [([0, 2], signal.SIGINT), ([0, 1, 2], signal.SIGKILL)]


def test_a_failure_kills_ranks_that_do_not_end_when_interrupted() -> None:
    machine = FakeMachine(failed(1, 1.0, "boom"), deaf=True)
    follow(3, machine)
    assert machine.signals == [([0, 2], signal.SIGINT), ([0, 2], signal.SIGKILL), ([1], signal.SIGKILL)]


def test_the_last_words_of_a_rank_that_died_are_in_the_error() -> None:
    run = follow(3, [Event("output", 1, b"bye\n"), exited(1, -11)])
    assert (run.error.signal_name, run.error.exitcode) == ("SIGSEGV", -11)
    assert "bye" in str(run.error)


def test_a_failure_before_the_function_is_a_launch_error() -> None:
    report = Report(1.0, failure=Failure("setup", "RuntimeError", "RuntimeError: no such backend"))
    run = follow(2, [message(1, report)])
    assert type(run.error) is nbddp.LaunchError
    assert "no such backend" in str(run.error)


def test_sys_exit_is_a_death_with_its_code() -> None:
    run = follow(2, [message(0, Report(1.0, failure=Failure("call", "SystemExit", "", code=3)))])
    assert (type(run.error), run.error.exitcode) == (nbddp.RankDied, 3)
    assert "sys.exit(3)" in str(run.error)


@pytest.mark.parametrize("end", [exited(1, -9), failed(1, 1.0, "boom")], ids=["died", "raised"])
def test_restarts_start_all_ranks_again(end: Event) -> None:
    run = follow(2, [end], [failed(0, 1.0, "again"), finished(1)], [finished(0), finished(1)], max_restarts=2)
    assert (run.state, run.restarts, len(run.history.restarts)) == ("finished", 2, 2)


def test_the_last_failure_is_raised_when_restarts_are_used_up() -> None:
    run = follow(2, [failed(1, 1.0, "first")], [failed(0, 1.0, "last")], max_restarts=1)
    assert (run.state, run.restarts, str(run.error.cause)) == ("failed", 1, "RuntimeError: last")
    assert "the first failure was RankError: rank 1 of 2 failed: RuntimeError: RuntimeError: first" in str(run.error)


def test_each_attempt_knows_how_often_it_was_restarted() -> None:
    machines = [FakeMachine(failed(0, 1.0, "boom")), FakeMachine(finished(0))]
    follow(1, *machines, max_restarts=1)
    assert [machine.settings.restart_count for machine in machines] == [0, 1]


def test_a_timeout_ends_a_run_and_is_not_restarted() -> None:
    run = follow(2, [finished(0)], timeout=0.05, max_restarts=3)
    assert (type(run.error), run.restarts) == (nbddp.RunTimeout, 0)
    assert "its timeout of 0.05 s" in str(run.error)


def test_stop_interrupts_and_a_rank_that_reports_is_not_killed() -> None:
    machine, run, end = _in_the_background(FakeMachine())
    run.stop(60.0)
    end()
    assert (run.state, run.error) == ("stopped", None)
    assert machine.signals == [([0, 1], signal.SIGINT), ([0, 1], signal.SIGKILL)]  # the second one when it was over


def test_stop_kills_ranks_that_do_not_end_in_its_grace() -> None:
    machine, run, end = _in_the_background(FakeMachine(deaf=True))
    run.stop(0.05)
    end()
    assert run.state == "stopped"
    assert ([0, 1], signal.SIGKILL) in machine.signals


def test_a_stop_is_not_restarted() -> None:
    _, run, end = _in_the_background(FakeMachine(), max_restarts=3)
    run.stop(0.0)
    end()
    assert (run.state, run.restarts) == ("stopped", 0)


def test_output_belongs_to_its_rank() -> None:
    run = follow(2, [Event("output", 1, b"one\n"), Event("output", 0, b"t"), finished(0), finished(1)])
    assert (run.logs(0), run.logs(1), run.logs()) == ("t", "one\n", "[rank 0] t\n[rank 1] one\n")


def test_an_error_of_ours_is_the_runs_error_and_nothing_waits_forever() -> None:
    class Broken(FakeMachine):
        def call(self, order, block, ranks):
            raise ZeroDivisionError("a defect")

    run = follow(2, Broken())
    assert (run.state, type(run.error), type(run.error.__cause__)) == ("failed", nbddp.NbddpError, ZeroDivisionError)
    assert "nbddp itself failed" in str(run.error)


def _in_the_background(machine: FakeMachine, **options):
    """Carry out a run on another thread. Returns the machine, the run, and a function that waits for the thread."""
    given = Options(nprocs=2, show=False, device="cpu", wait=False, **options)
    run: nbddp.Run = nbddp.Run("train", 2)
    todo = functools.partial(
        carry_out, run, decide("train", given), pack_call("train", Path, (), {}), given, lambda: [machine]
    )
    thread = threading.Thread(target=todo)
    thread.start()
    wait_until(lambda: run.state == "running")
    return machine, run, thread.join
