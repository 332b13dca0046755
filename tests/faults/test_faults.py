"""A short run of the fault suite: new faults each time, drawn from a seed that the report shows."""

from __future__ import annotations

import os
import random

import pytest

from tests.faults import cases, pace
from tests.faults.suite import able, explain, run_all, table

SEED = os.environ.get("NBDDP_FAULTS_SEED") or str(random.SystemRandom().randrange(10**6))
IN_DRIVERS, IN_NOTEBOOKS = 30, 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_faults_at_random_moments_end_as_specified(capsys: pytest.CaptureFixture[str]) -> None:
    possible = {sort for sort, why in able().items() if not why} - {"notebook"}
    drawn = [cases.draw(f"{SEED}:{number}", kernels=possible) for number in range(IN_DRIVERS)]
    drawn += [cases.draw(f"{SEED}:n{number}", only="notebook") for number in range(IN_NOTEBOOKS)]
    verdicts = run_all(drawn)
    with capsys.disabled():
        lacking = {sort: why for sort, why in able().items() if why}
        print(f"\nfaults from seed {SEED} (NBDDP_FAULTS_SEED); not on this machine: {lacking or 'none'}")
        print(table(verdicts))
    assert len(verdicts) == IN_DRIVERS + IN_NOTEBOOKS
    failed = [explain(verdict) for verdict in verdicts if verdict.wrong]
    assert not failed, "\n".join(failed)


def test_the_judge_rejects_each_kind_of_wrong_outcome() -> None:
    """The judge itself: it must not let pass what is wrong."""
    case = cases.draw("1:1", only="rank SIGKILL", kernels={"shared"})
    run = {"program": "plain", "nprocs": 2, "token": 7, "seconds": 0.0}
    case.runs, case.target, case.applied = [run], 0, {"at": 10.0, "rank": 1}
    told = {"error": "RankDied", "is": ["RankDied"], "text": "rank 1 of 2 was killed", "rank": 1, "signal": "SIGKILL"}
    right = {**told, "state": "failed", "ended": 10.2, "cause_text": ""}

    def judged(**other: object) -> list[str]:
        return cases.judge(case, {"outcomes": [{**right, **other}]})

    assert judged() == []
    assert judged(ended=10.5 + cases.BUSY_S + 0.1)  # too late
    case.slowness = 3.0
    assert judged(ended=10.5 + cases.BUSY_S + 0.1) == []  # on a machine with other work
    assert judged(ended=10.0 + 3 * (0.5 + cases.BUSY_S) + 0.1)
    case.slowness = 1.0
    assert judged(rank=0, text="rank 0 of 2 was killed")  # its echo
    assert judged(error="RankError", **{"is": ["RankError"]})
    assert judged(signal="SIGTERM")
    assert cases.judge(case, {"outcomes": [{"good": False, "ended": 10.1, "state": "finished"}]})
    case.applied = {}
    assert judged()  # an error out of nothing


def test_patience_stretches_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processes that want a core, whatever they are: Linux counts them."""
    now = [100.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pace, "slowness", lambda: 4.0)
    patience = pace.Patience(2.0)
    for at, over in ((104.0, False), (107.9, False), (108.0, True)):
        now[0] = at
        assert patience.is_over() == over


def test_slowness_is_at_least_one_and_grows_with_what_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    for runnable, slow in ((0, 1.0), (4, 1.0), (20, 5.0)):
        monkeypatch.setattr(pace.Path, "read_text", lambda _, n=runnable: f"9.1 8.0 7.0 {n}/200 4711\n")
        assert pace.slowness() == slow
