"""Ranks that stay on several hosts: the tests of a session on one machine, and what only hosts have."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import nbddp
from tests.hosts.rig import Rig
from tests.test_session import (  # noqa: F401 - collected here, too, with the session of this module
    quiet,
    test_a_call_may_open_and_destroy_the_group_as_scripts_do,
    test_a_call_on_some_ranks,
    test_a_collective_of_all_in_a_call_on_some_ranks_is_named_and_stopped,
    test_a_failure_frees_the_others_and_the_next_call_works,
    test_a_failure_in_a_call_on_some_ranks_frees_the_others,
    test_a_large_tensor_goes_out_and_comes_back,
    test_a_model_that_differs_after_a_failure_is_told_and_sync_mends_it,
    test_an_interrupt_ends_the_call_and_the_session_goes_on,
    test_each_call_has_its_own_curves_output_and_steps,
    test_failures_in_ddp_leave_the_training_as_if_they_had_never_been,
    test_groups_of_the_users_are_named_as_void_after_a_failure,
    test_metrics_are_combined_over_ranks_and_background_calls_are_shown_as_running,
    test_names_are_set_read_listed_and_freed,
    test_values_that_differ_between_ranks_are_told_and_synced,
)

pytestmark = pytest.mark.slow

SHARES = {"gpu1": 1, "gpu2": 2}


@pytest.fixture(scope="module")
def shared(rig: Rig) -> Iterator[nbddp.Session]:
    """One session for all tests that leave its ranks as they were."""
    with (
        nbddp.cluster(["gpu1", "gpu2"], launcher=rig.ssh, heartbeat=15.0) as hosts,
        nbddp.session(hosts=hosts, nprocs=SHARES, device="cpu") as session,
    ):
        yield session


@pytest.fixture
def session(shared: nbddp.Session, rig: Rig) -> nbddp.Session:
    shared.reset()
    return shared


def where() -> tuple[str, int, int]:
    return os.uname().nodename, nbddp.rank(), os.getpid()


def test_a_session_on_two_hosts_keeps_its_ranks_there(session: nbddp.Session) -> None:
    first, second = quiet(session, where), quiet(session, where)
    assert first.values == second.values
    assert [rank for _, rank, _ in first.values] == [0, 1, 2]
    assert len({name for name, _, _ in first.values}) == 2
    assert session.summary == "3 ranks on 2 hosts · gloo"


def test_all_output_and_metrics_of_a_call_are_in_its_run(session: nbddp.Session) -> None:
    def flood(points: int) -> None:
        for i in range(points):
            nbddp.log(i=float(i))
            print("x" * 1000)

    for _ in range(2):
        run = quiet(session, flood, 3000)
        assert run.history["i"].values.tolist() == [float(i) for i in range(3000)]
        assert [run.logs(rank).count("x" * 1000 + "\n") for rank in range(3)] == [3000] * 3
