"""A ``Run`` as a ``Future``."""

from __future__ import annotations

import concurrent.futures

import pytest

import nbddp
from tests.support import Cells, start

SLEEPS = """
    import time
    def train(seconds):
        time.sleep(seconds)
        return "slept"
"""


def test_result_waits_for_rank_0s_value(cell: Cells) -> None:
    going = start(cell(SLEEPS).train, 0.2)
    assert not going.done()
    with pytest.raises(TimeoutError, match="still"):
        going.result(timeout=0.01)
    assert going.result() == "slept"
    assert (going.done(), going.exception()) == (True, None)


def test_a_run_has_the_methods_of_a_future() -> None:
    mine = {"result", "exception", "done", "cancel"}
    assert mine <= set(dir(concurrent.futures.Future)) & set(dir(nbddp.Run))
