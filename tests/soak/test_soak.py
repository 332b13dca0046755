"""The soak in short: what a kernel holds does not grow, run by run and second by second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.soak import long_run, many_runs


@pytest.mark.slow
def test_sixty_runs_grow_nothing() -> None:
    assert many_runs.main(60) == []


@pytest.mark.slow
def test_a_kernel_that_grows_with_the_length_of_a_run() -> None:
    assert long_run.main(20.0, every_s=0.5) == []


def test_a_growth_that_nobody_sees() -> None:
    """The judge itself."""
    held = many_runs.Held(200 << 20, 100 << 20, 0, 0, 9, 9, 4, 0, 3)
    assert many_runs.growth(held, replace(held, kernel_bytes=held.kernel_bytes + (1 << 20))) == []
    for name, more in (("kernel_fds", 1), ("threads", 1), ("segments", 1), ("files", 1), ("server_bytes", 50 << 20)):
        assert many_runs.growth(held, replace(held, **{name: getattr(held, name) + more}))
