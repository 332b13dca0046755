"""A short soak: what a kernel holds does not grow with the number of runs or with their length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.soak import long_run, many_runs


@pytest.mark.slow
def test_sixty_runs_leave_the_kernel_no_larger() -> None:
    assert many_runs.main(60) == []


@pytest.mark.slow
def test_a_kernel_does_not_grow_with_the_length_of_a_run() -> None:
    assert long_run.main(20.0, every_s=0.5) == []


def test_the_judge_sees_growth_of_each_kind() -> None:
    """The judge itself."""
    held = many_runs.Held(200 << 20, 100 << 20, 0, 0, 9, 9, 4, 0, 3)
    assert many_runs.growth(held, replace(held, kernel_bytes=held.kernel_bytes + (1 << 20))) == []
    for name, more in (("kernel_fds", 1), ("threads", 1), ("segments", 1), ("files", 1), ("server_bytes", 50 << 20)):
        assert many_runs.growth(held, replace(held, **{name: getattr(held, name) + more}))
