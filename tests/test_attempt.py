"""What a run decides, on events that are written down: which failure is the cause, restarts, stop, timeout."""

import builtins
import contextlib
import functools
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import pytest
from torch.distributed import distributed_c10d

import nbddp
from nbddp import payload
from nbddp.kernel import advice, attempt, crew, failure, prompt, start
from nbddp.kernel.attempt import OF_A_RUN, OF_A_SESSION, Attempt, Patience
from nbddp.kernel.crew import Crew
from nbddp.kernel.page import Page
from nbddp.kernel.settings import Options, decide
from nbddp.kernel.start import carry_out, pack_call
from nbddp.messages import Answer, Asks, Called, CountSteps, Failure, Function, Ready, Release, Report, Steps, StopAfter
from nbddp.process.machine import Event
from tests.machines import FakeMachine, exited, failed, finished, follow, message, run_on
from tests.support import wait_until

CLOSED = "Connection closed by peer"
INT, KILL = signal.SIGINT, signal.SIGKILL
NEVER_S = 60.0  # a case that comes to it fails by pytest's time limit
PATIENT = Patience(NEVER_S, (NEVER_S, 0.0))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Windows of milliseconds. A case in which one must not end, or that waits for another, sets it to NEVER_S."""
    for module in (attempt, crew):
        monkeypatch.setattr(module, "POLL_S", 0.002)
    for name in ("_CONSEQUENCE_WINDOW_S", "_COUNT_S", "_SAME_STEP_S", "_FIRST_STEP_S", "_OWN_INTERRUPT_S"):
        monkeypatch.setattr(attempt, name, 0.003)
    monkeypatch.setattr(attempt, "_RELEASE_S", 0.001)
    monkeypatch.setattr(attempt, "_AGAIN_S", NEVER_S)
    monkeypatch.setattr(prompt, "_OTHERS_S", 0.001)
    monkeypatch.setattr(start, "OF_A_RUN", PATIENT)
    return monkeypatch


@contextlib.contextmanager
def order(
    machine: FakeMachine,
    nprocs: int = 2,
    patience: Patience = PATIENT,
    called: Callable[[Attempt], object] = lambda attempt: None,
    look: Callable[[Attempt], object] = lambda attempt: None,
) -> Iterator[tuple[Attempt, Crew]]:
    """An order on this machine's ranks, to be followed.

    Args:
        called: done once, on the thread that follows, when the function has begun on every rank.
        look: done again and again, after that.
    """
    todo = [called]

    def look_at(attempt: Attempt) -> None:
        if all(rank.interruptible for rank in opened.ranks):
            (todo.pop() if todo else look)(attempt)

    opened = Crew(decide("train", Options(nprocs=nprocs, device="cpu")), [machine])
    opened.open()
    try:
        page = Page(opened.ranks, quiet=True)
        yield Attempt(opened, Function("train"), opened.ranks, page, patience, look=look_at), opened
    finally:
        opened.end()


def followed(machine: FakeMachine, nprocs: int = 2, **given) -> tuple[Attempt, Crew, list[tuple[list[int], int]]]:
    """Follow an order to its end. Returns also the signals until then."""
    with order(machine, nprocs, **given) as (attempt, crew):
        attempt.follow()
        return attempt, crew, [*machine.signals]


def two_ranks(max_restarts: int = 0) -> nbddp.Run:
    given = Options(nprocs=2, show=False, device="cpu", wait=False, max_restarts=max_restarts)
    return nbddp.Run(decide("train", given), given)


def carry_out_on(run: nbddp.Run, machine: FakeMachine) -> None:
    carry_out(run, pack_call("train", print, (), {}), lambda: [machine])


def steps(rank: int, taken: int, ago_s: float = 0.0) -> Event:
    return message(rank, Steps(taken, 0.0, ago_s))


def interrupted(*ranks: int) -> list[Event]:
    return [failed(rank, 9.0, "", "KeyboardInterrupt") for rank in ranks]


def stop(attempt: Attempt) -> None:
    attempt.stop(NEVER_S)


CONSEQUENCES = (
    *("Connection closed by peer [127.0.0.1]:1234", "recv: connection reset by peer", "[Errno 32] Broken pipe"),
    "ncclRemoteError: a call failed possibly due to a network error or a remote process exiting",
    *("NCCL communicator was aborted on rank 1", "there was a remote worker crashing", "KeyboardInterrupt"),
    "Socket closed",
)


@pytest.mark.parametrize(
    ("script", "rank"),
    [
        ([failed(2, 5.0, CLOSED), failed(1, 5.1, "boom"), failed(0, 5.2, CLOSED), failed(3, 5.3, CLOSED)], 1),
        *(([failed(0, 5.0, text), failed(1, 5.1, "boom")], 1) for text in CONSEQUENCES),
        ([failed(2, 5.2, "later"), failed(1, 5.1, "earlier"), failed(0, 5.3, CLOSED)], 1),
        ([failed(0, 1.0, "first"), failed(0, 0.5, "second"), failed(1, 2.0, "other")], 0),
        ([failed(0, 1.0, CLOSED), failed(2, 1.1, CLOSED), exited(1, -9)], 1),
        ([exited(1, 1), failed(0, 0.0, "boom")], 0),
        ([exited(1, 1), failed(0, math.inf, "boom")], 1),
    ],
)
def test_the_cause_is_the_earliest_failure_that_follows_from_no_other_ranks_end(script: list[Event], rank: int) -> None:
    run = follow(1 + max(event.rank for event in script), script)
    assert (run.state, run.error.rank) == ("failed", rank)
    first = next(event.data for event in script if event.rank == rank)
    if isinstance(first, Report):
        assert str(run.error.cause) == first.failure.text
    else:
        assert (type(run.error), run.error.exitcode) == (nbddp.RankDied, first)


def test_a_consequence_waits_for_its_cause(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(attempt, "_CONSEQUENCE_WINDOW_S", NEVER_S)
    machine, looks = FakeMachine(failed(0, 1.0, CLOSED)), itertools.count(1)
    _, crew, signals = followed(machine, look=lambda _: next(looks) == 5 and machine.tell(failed(1, 2.0, "boom")))
    assert (failure.first(crew.ranks).number, signals) == (1, [])


def test_a_rank_that_has_ended_after_its_report_is_the_cause_if_there_is_no_other(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(attempt, "_CONSEQUENCE_WINDOW_S", NEVER_S)
    closed, boom, end = failed(0, 1.0, CLOSED), failed(0, math.inf, "boom"), exited(1, -9)
    scripts = [closed, end], [end, closed], [end, boom]
    assert [follow(2, [finished(1), *script]).error.rank for script in scripts] == [1, 1, 0]
    quick.setattr(attempt, "_CONSEQUENCE_WINDOW_S", 0.003)
    machine = FakeMachine(finished(1), closed)
    done, *_ = followed(machine, look=lambda attempt: attempt._waiting() or setattr(attempt, "_deadline", 0.0))
    assert (done.ending, done.where) == ("failed", "")  # it isn't late


def test_a_consequence_without_a_cause_is_the_error_when_its_time_is_over() -> None:
    machine = FakeMachine(failed(1, 5.1, CLOSED), failed(0, 5.0, CLOSED))
    run = follow(3, machine)
    assert (run.error.rank, run.error.alike, machine.signals[0]) == (0, False, ([2], INT))


@pytest.mark.parametrize(
    ("texts", "header"),
    [
        (["size 3 on cuda:0", "size 4 on cuda:1"], "both ranks failed, rank 0 first: "),
        (["size 3", "shape 3"], "rank 0 of 2 failed: "),
        (["size 3"] * 3, "all 3 ranks failed, rank 0 first: "),
    ],
)
def test_ranks_that_all_fail_alike_say_so(texts: list[str], header: str) -> None:
    error = follow(len(texts), [failed(rank, 1.0 + rank, text) for rank, text in enumerate(texts)]).error
    assert str(error).startswith(header)
    assert error.alike == ("first" in header)


MINE, THEIRS = ("/tmp/ipykernel_1/1.py", 3, "train"), (distributed_c10d.__file__, 7, "all_reduce")


@pytest.mark.parametrize(("frames", "said"), [((), ""), ((MINE,), ""), ((MINE, THEIRS), "rank 0 failed in all_reduce")])
def test_a_timeout_in_a_collective_and_no_other_says_where_the_ranks_were(frames: tuple, said: str) -> None:
    report = Report(1.0, failure=Failure("call", "TimeoutError", "TimeoutError: timed out", frames=frames))
    assert follow(1, [message(0, report)]).error.where == (said and f"{said} (train, line 3)")


def test_a_failure_releases_the_others_from_a_collective_and_then_interrupts_them() -> None:
    class Noting(FakeMachine):
        def signal(self, ranks, number):
            self.sent.append(number)
            super().signal(ranks, number)

    machine = Noting(failed(1, 1.0, "boom"))
    assert (follow(3, machine).error.rank, machine.closed) == (1, True)
    assert (machine.signals, machine.sent[:2]) == ([([0, 2], INT), ([0, 1, 2], KILL)], [Release(), INT])


@pytest.mark.parametrize(("patience", "second"), [(OF_A_RUN, KILL), (OF_A_SESSION, INT)], ids=["run", "session"])
def test_ranks_that_do_not_end_are_killed_in_a_run_and_interrupted_again_in_a_session(
    quick: pytest.MonkeyPatch, patience: Patience, second: int
) -> None:
    quick.setattr(attempt, "_RELEASE_S", 0.03 / 500)
    quick.setattr(attempt, "_AGAIN_S", 1.0 / 500)
    shorter = Patience(patience.after_failure_s / 500, patience.after_interrupts_s)
    signals = followed(FakeMachine(failed(1, 1.0, "boom"), deaf=True), patience=shorter)[2]
    assert signals[:2] == [([0], INT), ([0], second)]


def unable(phase: str, kind: str = "OSError") -> Event:
    return message(1, Report(1.0, failure=Failure(phase, kind, f"{kind}: no such thing")))


UNPICKLED = "rank 1 couldn't unpickle train and its data: "


@pytest.mark.parametrize(
    ("comes_to", "event", "kind", "text"),
    [
        ("starting", exited(1, 1), nbddp.LaunchError, "before it was ready, rank 1 of 2 ended with exit code 1"),
        ("starting", exited(1, -9), nbddp.LaunchError, "before it was ready, rank 1 of 2 was killed by SIGKILL"),
        ("starting", unable("setup"), nbddp.LaunchError, "rank 1 failed during setup: OSError: no such thing"),
        ("ready", exited(1, 1), nbddp.RankDied, "rank 1 of 2 ended with exit code 1 while unpacking train"),
        ("ready", exited(1, -9), nbddp.RankDied, "rank 1 of 2 was killed by SIGKILL"),
        ("ready", unable("unpack"), nbddp.PayloadError, f"{UNPICKLED}OSError: no such thing"),
        ("ready", unable("unpack", "KeyError"), nbddp.PayloadError, f"{UNPICKLED}KeyError: no such thing. One of the"),
        ("ready", unable("unpack", "ImportError"), nbddp.PayloadError, f"{UNPICKLED}ImportError: no such thing. The"),
    ],
)
def test_a_failure_before_the_function_says_how_far_it_came(comes_to: str, event: Event, kind: type, text: str) -> None:
    machine = FakeMachine(event, comes_to=comes_to)
    error = follow(2, machine).error
    assert (type(error), str(error)[: len(text)]) == (kind, text)
    assert machine.signals[0] == ([0], KILL)  # nothing of the user's that an interrupt could end


@pytest.mark.parametrize(
    ("kind", "why"), [(OSError, "no memory"), (EOFError, "the fork server exited unexpectedly; its")]
)
@pytest.mark.parametrize("broken", [0, 1])
def test_a_machine_that_cannot_start_ranks_fails_the_run_and_ends_those_of_the_others(
    quick: pytest.MonkeyPatch, kind: type, why: str, broken: int
) -> None:
    quick.setattr(crew, "_END_S", 0.0)  # the ranks that have not begun do not end

    class Broken(FakeMachine):
        def start(self, settings, ranks):
            raise kind("no memory")

    machines = [FakeMachine(), FakeMachine()]
    machines[broken] = Broken()
    run = run_on(lambda: machines, print, nprocs=4)
    assert type(run.error) is nbddp.LaunchError
    assert str(run.error).startswith(f"the ranks couldn't be started: {why}")
    assert machines[0].signals == ([([0, 1], KILL)] if broken else [])
    assert machines[broken].closed


@pytest.mark.parametrize(
    ("met", "remark"),
    [([False, False], "no collective was called, so the 2 ranks"), ([True, False], ""), ([False], "")],
)
def test_ranks_that_worked_side_by_side_are_remarked_on(met: Sequence[bool], remark: str) -> None:
    advice._said.clear()  # it's said once per kernel
    run = follow(len(met), [message(rank, Report(1.0, met=it)) for rank, it in enumerate(met)])
    assert (run.state, run.remark.partition(" shared")[0]) == ("finished", remark)


def test_an_error_of_ours_is_the_runs_error_and_nothing_waits_forever() -> None:
    class Broken(FakeMachine):
        def send(self, ranks, what):
            raise ZeroDivisionError("a defect")

    run = follow(2, Broken())
    assert (run.state, type(run.error), type(run.error.__cause__)) == ("failed", nbddp.NbddpError, ZeroDivisionError)
    assert "nbddp itself failed" in str(run.error)


def test_the_last_failure_is_raised_when_the_only_restart_is_used_up() -> None:
    run = follow(2, [failed(1, 1.0, "first")], [failed(0, 1.0, "last")], max_restarts=1)
    assert (run.state, run.restarts, str(run.error.cause)) == ("failed", 1, "RuntimeError: last")
    first = "the first failure was RankError: rank 1 of 2 failed: RuntimeError: RuntimeError: first"
    assert f"Failed after 1 restart; {first}" in str(run.error)
    run = follow(2, FakeMachine(exited(1, -9), comes_to="starting"), [failed(0, 1.0, "last")], max_restarts=1)
    assert "Failed after 1 restart; the first failure was LaunchError: before it was ready, rank 1" in str(run.error)


@pytest.mark.parametrize(
    "report", [Report(1.0, failure=Failure("unpack", "E", "E")), Report(1.0, lost="a lock")], ids=["unpack", "lost"]
)
def test_what_would_fail_again_is_not_restarted(report: Report) -> None:
    run = follow(1, [message(0, report)], max_restarts=3)
    assert (type(run.error), run.restarts) == (nbddp.PayloadError, 0)


@pytest.mark.parametrize(
    ("comes_to", "state", "number", "timeout_s"),
    [("called", "running", INT, 0.05), ("ready", "starting", KILL, 0.01), ("starting", "starting", KILL, 0.01)],
)
def test_a_timeout_ends_a_run_and_is_not_restarted(comes_to: str, state: str, number: int, timeout_s: float) -> None:
    machine = FakeMachine(comes_to=comes_to)
    run = follow(2, machine, timeout=timeout_s, max_restarts=3)
    assert (type(run.error), run.restarts) == (nbddp.RunTimeout, 0)
    assert f"train was still {state} after its timeout of {timeout_s} s and was stopped" in str(run.error)
    assert machine.signals[0] == ([0, 1], number)


@pytest.mark.parametrize(("deaf", "grace_s"), [(False, NEVER_S), (True, 0.005)])
def test_a_stop_interrupts_kills_what_does_not_end_in_grace_and_is_not_restarted(deaf: bool, grace_s: float) -> None:
    machine, run = FakeMachine(deaf=deaf), two_ranks(3)
    thread = threading.Thread(target=functools.partial(carry_out_on, run, machine))
    thread.start()
    wait_until(lambda: run.state == "running")
    run.stop(grace_s)
    thread.join()
    assert (run.state, run.error, run.restarts) == ("stopped", None, 0)
    assert machine.signals == [([0, 1], INT), ([0, 1], KILL)]  # the second one when it was over, or for the deaf


def test_a_stop_that_is_asked_for_when_all_have_failed_keeps_the_error_and_is_not_restarted() -> None:
    class Slow(FakeMachine):
        def signal(self, ranks, number):
            run._ask_to_stop(NEVER_S)
            super().signal(ranks, number)

    run = two_ranks(3)
    carry_out_on(run, Slow(failed(0, 1.0, "boom"), failed(1, 2.0, CLOSED)))
    assert (run.state, run.error.rank, run.restarts) == ("failed", 0, 0)


def test_a_value_that_nobody_takes_since_another_rank_failed_is_closed() -> None:
    block = payload.pack(1).block
    run = follow(2, [message(0, Report(1.0, block=block)), failed(1, 2.0, "boom")])
    assert (run.error.rank, block.fd) == (1, -1)


FAILING = {CountSteps: [failed(0, 1.0, "boom"), *interrupted(1)]}


@pytest.mark.parametrize(
    "given", [{"comes_to": "starting"}, {"comes_to": "ready"}, {"when": FAILING}], ids=["starting", "ready", "failing"]
)
def test_a_stop_before_the_function_has_begun_or_while_ranks_fail_has_no_error_and_kills(
    quick: pytest.MonkeyPatch, given: dict
) -> None:
    quick.setattr(attempt, "_COUNT_S", NEVER_S if CountSteps in given.get("when", ()) else 0.003)
    machine, run = FakeMachine(**given), two_ranks()
    run._ask_to_stop(NEVER_S)
    carry_out_on(run, machine)
    assert (run.state, run.error, machine.signals) == ("stopped", None, [([0, 1], KILL)])


@pytest.mark.parametrize("graces_s", [(NEVER_S, 0.0), (NEVER_S, 0.002), (0.002, NEVER_S), (0.0,)])
def test_a_second_stop_can_only_shorten_the_grace_and_one_without_asks_for_nothing(
    quick: pytest.MonkeyPatch, graces_s: tuple[float, ...]
) -> None:
    quick.setattr(attempt, "_COUNT_S", NEVER_S)  # nor does it ask for the same step again

    def stop_each(attempt: Attempt) -> None:
        for grace_s in graces_s:
            attempt.stop(grace_s)

    machine = FakeMachine(deaf=True)
    assert followed(machine, called=stop_each)[2] == [([0, 1], INT), ([0, 1], KILL)]
    assert machine.sent.count(CountSteps()) == (graces_s[0] > 0)


def test_a_flood_of_metrics_does_not_hold_up_a_stop() -> None:
    machine, left = FakeMachine(*[Event("metrics", 0, b"")] * 400), []

    def stop_amid(attempt: Attempt) -> None:
        wait_until(lambda: crew.inbox.qsize() > 16)
        time.sleep(0.005)  # what is to follow has time to come
        crew.inbox.put(functools.partial(attempt.stop, 0.0))

    look = lambda _: machine.signals and left.append(machine._events.qsize())  # noqa: E731
    with order(machine, called=stop_amid, look=look) as (attempt, crew):
        attempt.follow()
    assert left[0] > 300


@pytest.mark.parametrize("at", [(10, 12), (0, 1), (0, 0)], ids=["amid", "first step", "no step yet"])
def test_training_ranks_stop_after_the_same_step_uninterrupted(quick: pytest.MonkeyPatch, at: tuple[int, int]) -> None:
    quick.setattr(attempt, "_COUNT_S", NEVER_S)
    quick.setattr(attempt, "_SAME_STEP_S", NEVER_S)
    machine = FakeMachine(when={CountSteps: [*map(steps, (0, 1), at)], StopAfter: interrupted(1, 0)})
    assert (followed(machine, called=stop)[2], machine.sent) == ([], [CountSteps(), StopAfter(at[1] + 1)])


@pytest.mark.parametrize(
    ("answers", "count_s", "asked"),
    [
        ([steps(0, 10), steps(1, 12, 5.0)], NEVER_S, []),
        ([steps(0, 10)], 0.003, []),
        ([steps(0, 10), steps(1, 12)], NEVER_S, [StopAfter(13)]),
    ],
    ids=["does not train", "does not say where it is", "does not come to the step"],
)
def test_a_rank_that_cannot_stop_after_the_step_has_all_interrupted(
    quick: pytest.MonkeyPatch, answers: list[Event], count_s: float, asked: list[StopAfter]
) -> None:
    quick.setattr(attempt, "_COUNT_S", count_s)
    machine = FakeMachine(when={CountSteps: answers})
    assert followed(machine, called=stop)[2] == [([0, 1], INT)]
    assert [sent for sent in machine.sent if sent != Release()] == [CountSteps(), *asked]


def test_a_rank_that_is_done_is_not_waited_for_and_does_not_count(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(attempt, "_COUNT_S", NEVER_S)
    quick.setattr(attempt, "_SAME_STEP_S", NEVER_S)
    machine = FakeMachine(when={CountSteps: [steps(0, 90), finished(0), steps(1, 10)], StopAfter: interrupted(1, 2)})
    looks = itertools.count(1)
    look = lambda _: next(looks) == 8 and machine.tell(steps(2, 12))  # noqa: E731
    assert (followed(machine, 3, called=stop, look=look)[2], machine.sent) == ([], [CountSteps(), StopAfter(13)])


def test_a_late_answer_of_an_earlier_order_ends_no_later_one() -> None:
    machine = FakeMachine(steps(0, 10), steps(1, 12), finished(0), finished(1))
    attempt, crew, signals = followed(machine)
    assert (attempt.ending, signals, machine.sent) == ("", [], [])
    assert not any(rank.failed for rank in crew.ranks)


def test_a_late_answer_of_an_earlier_order_is_no_answer_to_the_next_stop(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(attempt, "_COUNT_S", NEVER_S)
    quick.setattr(attempt, "_SAME_STEP_S", NEVER_S)
    late = [steps(0, 50), steps(1, 50), message(0, Called()), message(1, Called())]
    answers = {CountSteps: [steps(0, 3), steps(1, 4)], StopAfter: interrupted(0, 1)}
    machine = FakeMachine(*late, comes_to="ready", when=answers)
    assert (followed(machine, called=stop)[2], machine.sent) == ([], [CountSteps(), StopAfter(5)])


def test_an_answer_after_the_interrupt_changes_nothing() -> None:
    machine = FakeMachine(deaf=True, when={Release: [steps(0, 10), steps(1, 12), *interrupted(0, 1)]})
    assert (followed(machine, called=stop)[2], machine.sent) == ([([0, 1], INT)], [CountSteps(), Release()])


def test_ranks_that_swallow_an_interrupt_get_another_one(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(attempt, "_AGAIN_S", 0.005)
    machine = FakeMachine(deaf=True)
    look = lambda _: machine.signals.count(([0, 1], INT)) == 2 and machine.tell(*interrupted(0, 1))  # noqa: E731
    assert followed(machine, called=stop, look=look)[2] == [([0, 1], INT)] * 2


@pytest.mark.parametrize(("asked", "line"), [("name? ", None), ("(Pdb) ", "c"), ("ipdb> ", "c")])
def test_where_nobody_can_answer_a_debugger_goes_on_and_input_fails(
    quick: pytest.MonkeyPatch, asked: str, line: str | None
) -> None:
    quick.setattr(builtins, "input", mock.Mock(side_effect=EOFError))
    machine = FakeMachine(message(0, Asks(asked)), when={Answer: [finished(0), finished(1)]})
    followed(machine)
    assert machine.sent == [Answer(line)]


def test_the_memory_of_a_rank_that_comes_later_is_asked_for_at_once() -> None:
    with order(machine := FakeMachine(comes_to="starting")) as (_, crew):
        for rank in range(2):
            machine.tell(message(rank, Ready(rank)))
            crew.take(NEVER_S)
            wait_until(lambda: [*crew.memory(at_most_s=NEVER_S)] == [each.number for each in crew.ranks if each.ready])


def test_a_rank_that_dies_at_a_prompt_ends_it(quick: pytest.MonkeyPatch) -> None:
    machine, seen = FakeMachine(*[message(rank, Asks("name? ")) for rank in (0, 1)]), []

    def wait_for_a_line(prompt: str) -> None:  # as ipykernel does
        seen.append(prompt)
        machine.tell(exited(1, -9))
        while True:
            time.sleep(0.001)

    quick.setattr(builtins, "input", wait_for_a_line)
    _, crew, signals = followed(machine)
    assert (failure.first(crew.ranks).number, signals, seen) == (1, [([0], INT)], ["name? "])
    assert Answer not in map(type, machine.sent)
