"""``log`` on real ranks."""

from __future__ import annotations

from tests.support import Cells, run


def test_steps_that_restart_every_epoch_are_combined_by_epoch(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for epoch in range(3):
                for batch in range(4):
                    nbddp.log(loss=100.0 * epoch + batch + nbddp.rank(), step=batch, reduce="max")
    """)
    history = run(names.train).history
    assert history["loss"].steps.tolist() == [0, 1, 2, 3] * 3
    assert history["loss"].values.tolist() == [100.0 * epoch + batch + 1 for epoch in range(3) for batch in range(4)]
