"""``log`` on real ranks: which values are combined, what is refused, and the NaN that ends a run."""

import pytest

import nbddp
from tests.support import Cells, run, start, wait_until


def test_validation_on_rank_0_alone_does_not_shift_the_loss_of_other_ranks(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for epoch in range(4):
                for batch in range(3): nbddp.log(loss=100.0 * epoch + batch + nbddp.rank(), reduce="mean")
                if nbddp.rank() == 0:
                    for batch in range(3): nbddp.log(val=1.0)
    """)
    history = run(names.train).history
    assert history["loss"].values.tolist() == [100 * epoch + batch + 0.5 for epoch in range(4) for batch in range(3)]
    assert history["loss"].steps.tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14], "rank 0's"
    spread = history.spread("loss")
    assert spread.steps.tolist() == history["loss"].steps.tolist()
    assert ((spread.high - spread.low).tolist(), history.notices) == ([1.0] * 12, [])


def test_invalid_values_steps_and_weights_are_refused_alike_in_a_rank_and_in_the_notebook(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch, numpy as np
        def said(loss=1.0, **options):
            try: nbddp.log({"acc": 0.5, "loss": loss}, **options)
            except (TypeError, ValueError) as error: return f"{type(error).__name__}: {error}"
        def train():
            found = [said(step=step) for step in (0.5, "3", torch.tensor(3.0), 2**53 + 1, -2**63 - 1)]
            found += [said(weight=weight) for weight in (-1, float("nan"), float("inf"), "3", None)]
            found += [said(reduce="median"), *map(said, ("0.5", [1, 2], None, torch.ones(2), object))]
            for step in (4, np.int64(5), np.uint8(6), torch.tensor(7), True + 7): nbddp.log(loss=float(step), step=step)
            nbddp.log(loss=9.0, weight=np.float32(2))
            return found
    """)
    here, done = names.train(), run(names.train)
    assert (done.values, list(done.history)) == ([here, here], ["loss"])
    assert [column.tolist() for column in done.history["loss"]] == [[4, 5, 6, 7, 8, 9]] * 2
    kinds = [*["TypeError"] * 3, *["ValueError"] * 5, *["TypeError"] * 2, "ValueError", *["TypeError"] * 5]
    assert [text.split(":")[0] for text in here] == kinds
    assert here[0] == "TypeError: log(step=0.5): a step must be an integer"
    assert here[5] == "ValueError: log(weight=-1): a weight must be finite and at least 0, e.g. the number of samples"
    assert here[10] == "ValueError: reduce must be None, 'mean', 'sum', 'min', or 'max', not 'median'"
    assert all(text.startswith("TypeError: log(loss=") for text in here[11:])
    for wrong in (5, {1: 0.5}):
        with pytest.raises(TypeError, match=r"log\(\) takes metrics by name, log\(loss=0\.5\) or"):
            nbddp.log(wrong)  # type: ignore[arg-type]


def test_a_number_from_a_device_is_shown_when_it_arrives_also_if_nothing_is_logged_after_it(cell: Cells) -> None:
    names = cell("""
        import nbddp, time
        from nbddp.helpers import log
        class Pending:
            def __init__(self, *_): self.at = time.monotonic() + 0.2
            def arrived(self): return time.monotonic() > self.at
            def read(self): return 3.0
        def train():
            log._Copy = log._number = Pending
            nbddp.log(loss=3)
            while True: time.sleep(0.05)
    """)
    going = start(names.train, nprocs=1)
    wait_until(lambda: "loss" in going.history)
    assert not going.done()
    going.stop(0)


def test_a_device_that_fails_does_not_hide_the_functions_error(cell: Cells) -> None:
    names = cell("""
        import nbddp
        from nbddp.helpers import log
        class Pending:
            def __init__(self, value): pass
            def arrived(self): return False
            def read(self): raise RuntimeError("CUDA error: device-side assert triggered")
        def train():
            log._Copy = Pending
            nbddp.log(loss=1.0)
            log._log.waiting.append((0.0, 1, True, None, 1, {"loss": Pending(0)}))
            raise ValueError("on purpose")
    """)
    with pytest.raises(nbddp.RankError, match="ValueError: on purpose"):
        run(names.train, nprocs=1)


def test_the_first_nan_ends_the_run_and_names_metric_step_and_rank(cell: Cells) -> None:
    names = cell("""
        import nbddp, time
        def train():
            for step in range(10):
                bad = step == 6 and nbddp.rank() == 1
                nbddp.log(loss=float("nan") if bad else float("inf") if step == 2 else 1.0)
                if bad: nbddp.log(loss=float("nan")), nbddp.log(loss=float("nan"))  # in one batch of records
            while True: time.sleep(0.05)
    """)
    with pytest.raises(nbddp.NanLogged, match=r"loss became NaN at step 6 on rank 1; .*lower learning rate") as caught:
        run(names.train, stop_on_nan=True, max_restarts=1)
    assert (caught.value.metric, caught.value.step, caught.value.ranks) == ("loss", 6, [1])
    failed = nbddp.last_run()
    assert (failed.state, failed.restarts) == ("failed", 0)
