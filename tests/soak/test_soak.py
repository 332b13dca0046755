"""The soak in short: what a kernel holds does not grow, run by run and second by second."""

from __future__ import annotations

import pytest

from tests.soak import long_run, many_runs


@pytest.mark.slow
def test_sixty_runs_grow_nothing() -> None:
    assert many_runs.main(60) == []


@pytest.mark.slow
def test_a_kernel_that_grows_with_the_length_of_a_run() -> None:
    assert long_run.main(20.0, every_s=0.5) == []
