"""``run(stop_on_nan=True)``: the first NaN that a rank logs ends the run."""

from __future__ import annotations

import pytest

import nbddp
from tests.support import Cells, run

LOGS_NAN = """
    import nbddp, time
    def train(forever):
        for step in range(10):
            bad = step == 6 and nbddp.rank() == 1
            nbddp.log(loss=float("nan") if bad else float("inf") if step == 2 else 1.0)
        while forever:
            time.sleep(0.05)
"""


def test_the_first_nan_ends_the_run_and_names_metric_step_and_rank(cell: Cells) -> None:
    train = cell(LOGS_NAN).train
    with pytest.raises(nbddp.NanLogged, match=r"loss is NaN from step 6 on rank 1; .*lower learning rate") as caught:
        run(train, True, nprocs=2, stop_on_nan=True, max_restarts=1)
    assert (caught.value.metric, caught.value.step, caught.value.ranks) == ("loss", 6, [1])
    failed = nbddp.last_run()
    assert failed is not None
    assert (failed.state, failed.restarts) == ("failed", 0)
