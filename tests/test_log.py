"""``log`` on real ranks: which values are combined, what is refused, and which notices the notebook gets."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import nbddp
from nbddp.history.history import History
from nbddp.worker import metrics, metrics_pipe
from nbddp.worker.metrics_pipe import MetricsPipe
from tests.support import Cells, run

# ---------------------------------------------------------------------------- which values belong together


def test_validation_on_rank_0_alone_does_not_shift_the_loss_of_other_ranks(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for epoch in range(4):
                for batch in range(3):
                    nbddp.log(loss=100.0 * epoch + batch + nbddp.rank(), reduce="mean")
                if nbddp.rank() == 0:
                    for batch in range(3):
                        nbddp.log(val=1.0)
    """)
    history = run(names.train).history
    assert history["loss"].values.tolist() == [100 * epoch + batch + 0.5 for epoch in range(4) for batch in range(3)]
    assert history["loss"].steps.tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14], "rank 0's"
    spread = history.spread("loss")
    assert spread.steps.tolist() == history["loss"].steps.tolist()
    assert (spread.high - spread.low).tolist() == [1.0] * 12
    assert history.notices == []


def test_a_step_that_rank_0_logs_twice_does_not_shift_the_others(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for step in range(5):
                nbddp.log(loss=10.0 * step + nbddp.rank(), step=step, reduce="mean")
                if nbddp.rank() == 0 and step == 1:
                    nbddp.log(loss=7.0, step=step, reduce="mean")
    """)
    history = run(names.train).history
    assert history["loss"].steps.tolist() == [0, 1, 1, 2, 3, 4]
    assert history["loss"].values.tolist() == [0.5, 10.5, 7.0, 20.5, 30.5, 40.5]
    assert history.counts("loss").ranks.tolist() == [2, 2, 1, 2, 2, 2]


def test_steps_logged_in_different_orders_are_combined_by_number(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for step in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 0, 1])[nbddp.rank()]:
                nbddp.log(total=10.0**nbddp.rank() * step, step=step, reduce="sum")
    """)
    history = run(names.train, nprocs=3).history
    assert history["total"].steps.tolist() == [0, 1, 2, 3]
    assert history["total"].values.tolist() == [0.0, 111.0, 222.0, 333.0]


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


def test_a_step_that_some_ranks_skip_is_left_out_of_the_sums(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for step in range(6):
                if nbddp.rank() < 2 or step not in (2, 4):
                    nbddp.log(total=1.0, loss=float(nbddp.rank()), step=step, reduce="sum")
                    nbddp.log(mean=float(nbddp.rank()), step=step, reduce="mean")
    """)
    history = run(names.train, nprocs=4).history
    assert history["total"].steps.tolist() == [0, 1, 3, 5]
    assert history["total"].values.tolist() == [4.0] * 4
    steps, ranks, of = history.counts("total")
    assert (steps.tolist(), ranks.tolist(), of.tolist()) == ([*range(6)], [4, 4, 2, 4, 2, 4], [4] * 6)
    assert history["mean"].values.tolist() == [1.5, 1.5, 0.5, 1.5, 0.5, 1.5]
    assert history.notices[0] == (
        "total: 2 of 6 steps were logged by only 2 of 4 ranks (the first is step 2); the sums leave out these steps"
    )
    assert history.notices[2] == (
        "mean: 2 of 6 steps were logged by only 2 of 4 ranks (the first is step 2); "
        "there the mean is over the ranks that logged it"
    )


def test_a_metric_that_only_one_rank_reduces_is_its_values_with_a_notice(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for step in range(3):
                nbddp.log(loss=1.0, reduce="mean")
            if nbddp.rank() == 1:
                nbddp.log(val=7.0, reduce="sum")
    """)
    history = run(names.train, nprocs=3).history
    assert history["val"].values.tolist() == [7.0]
    assert history.notices == ["val: only 1 of 3 ranks logged it; the sum is over that rank"]


def test_ranks_that_log_different_counts_are_combined_by_number(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for batch in range(3 - nbddp.rank()):
                nbddp.log(loss=10.0 * batch + nbddp.rank(), total=1.0, reduce="sum")
                nbddp.log(mean=10.0 * batch + nbddp.rank(), reduce="mean")
    """)
    history = run(names.train).history
    assert history["loss"].values.tolist() == [1.0, 21.0]
    assert history["mean"].values.tolist() == [0.5, 10.5, 20.0]


def test_a_failed_runs_combined_curves_end_at_the_last_common_step(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for step in range(8 - nbddp.rank()):
                nbddp.log(loss=float(step), reduce="mean")
            nbddp.barrier()
            raise ValueError("broken off")
    """)
    with pytest.raises(nbddp.RankError):
        run(names.train)
    last = nbddp.last_run()
    assert last is not None
    assert last.history["loss"].values.tolist() == [float(step) for step in range(7)]
    assert last.history.notices == []


def test_a_resumed_run_continues_the_curve_although_ranks_log_different_counts(cell: Cells, in_folder: str) -> None:
    names = cell("""
        import nbddp, os, signal
        def train():
            found = nbddp.load_snapshot("snapshot") or {"epoch": 0}
            for epoch in range(found["epoch"], 4):
                for batch in range(3):
                    nbddp.log(loss=100.0 * epoch + batch + nbddp.rank(), reduce="mean")
                if nbddp.rank() == 0:
                    for batch in range(3): nbddp.log(val=1.0)
                nbddp.barrier()
                if epoch == 2 and nbddp.restart_count() == 0:
                    if nbddp.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
                    nbddp.barrier()
                if epoch == 1: nbddp.save_snapshot("snapshot", epoch=2)
    """)
    finished = run(names.train, max_restarts=1)
    assert [restart.step for restart in finished.history.restarts] == [8]
    steps, values = finished.history["loss"]
    assert values.tolist() == [100 * epoch + batch + 0.5 for epoch in range(4) for batch in range(3)]
    assert steps.tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14]


def test_what_a_rank_logged_before_a_snapshot_survives_its_sigkill(cell: Cells, in_folder: str) -> None:
    names = cell("""
        import nbddp, os, signal
        def train():
            for batch in range(5): nbddp.log(loss=float(batch), reduce="mean")
            nbddp.save_snapshot("snapshot", epoch=1)
            if nbddp.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
            nbddp.barrier()
    """)
    with pytest.raises(nbddp.RankDied):
        run(names.train)
    last = nbddp.last_run()
    assert last is not None
    assert last.history["loss"].values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


# ---------------------------------------------------------------------------- one reduce, one order


def test_the_lowest_ranks_first_reduce_holds_and_a_change_is_noticed_once(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for step in range(300):
                late = step >= 150
                nbddp.log(mine=1.0 + nbddp.rank(), reduce="mean" if not late else "sum")
                nbddp.log(theirs=1.0 + nbddp.rank(), reduce="max" if nbddp.rank() == 0 else "min")
                nbddp.log(plain=1.0 + nbddp.rank(), reduce=None if not late else "sum")
    """)
    history = run(names.train).history
    assert history["mine"].values.tolist() == [1.5] * 300
    assert history["theirs"].values.tolist() == [2.0] * 300
    assert history["plain"].values.tolist() == [1.0] * 300
    assert history.notices == [
        "mine: rank 0 logged it with reduce='mean' and later with reduce='sum'; the first counts for the whole run",
        "theirs: rank 0 logged it with reduce='max', rank 1 with reduce='min'; rank 0's counts for the whole run",
        "plain: rank 0 logged it with reduce=None and later with reduce='sum'; the first counts for the whole run",
    ]


def test_nan_on_any_rank_makes_min_and_max_nan_as_in_numpy(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train(order):
            for rank in order:  # of arrival
                if nbddp.rank() == rank:
                    value = [1.0, float("nan"), 3.0][rank]
                    nbddp.log(low=value, reduce="min"); nbddp.log(high=value, reduce="max")
                nbddp.barrier()
    """)
    for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0]):
        history = run(names.train, order, nprocs=3).history
        assert math.isnan(history["low"].values[0])
        assert math.isnan(history["high"].values[0])


def test_sums_are_added_in_rank_order_whatever_arrives_first(cell: Cells) -> None:
    names = cell("""
        import nbddp, time
        def train(order):
            value, weight = [(1e16, 1.0), (1.0, 0.1), (-1e16, 0.3)][nbddp.rank()]
            time.sleep(0.3 * order.index(nbddp.rank()))
            nbddp.log(total=value, reduce="sum")
            nbddp.log(mean=0.1 * value, weight=weight, reduce="mean")
    """)
    found = [run(names.train, order, nprocs=3).history for order in ([0, 1, 2], [2, 0, 1])]
    assert [history["total"].values.tolist() for history in found] == [[0.0], [0.0]]
    bits = {history["mean"].values.tobytes() for history in found}
    assert bits == {np.float64((1e15 * 1.0 + 0.1 * 0.1 + -1e15 * 0.3) / (1.0 + 0.1 + 0.3)).tobytes()}


def test_metrics_are_in_the_order_of_rank_0_whatever_arrives_first(cell: Cells) -> None:
    names = cell("""
        import nbddp, time
        def train():
            if nbddp.rank() == 0: time.sleep(0.5)
            for name in ("abc", "cab")[nbddp.rank()]: nbddp.log({name: 1.0})
            if nbddp.rank() == 1: nbddp.log(own=1.0)
    """)
    assert run(names.train).history.names == ["a", "b", "c", "own"]


# ---------------------------------------------------------------------------- steps, weights, names

REFUSED = """
    import nbddp, torch, numpy as np
    def said(**options):
        try:
            nbddp.log({"loss": 1.0}, **options)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    def train():
        found = [said(step=step) for step in (0.5, 3.0, "3", torch.tensor(3.0), np.float64(3), 2**63, -2**63 - 1)]
        found += [said(weight=weight) for weight in (-1, float("nan"), float("inf"), "3", None, 10**400)]
        for step in (4, np.int64(5), np.uint8(6), torch.tensor(7), torch.tensor([8]), True + 8):
            nbddp.log(loss=float(step), step=step)
        nbddp.log(loss=10.0)
        return found
"""


def test_invalid_steps_and_weights_are_refused_alike_in_a_rank_and_in_the_notebook(cell: Cells) -> None:
    names = cell(REFUSED)
    here = names.train()
    done = run(names.train)
    assert done.values == [here, here]
    steps, values = done.history["loss"]
    assert steps.tolist() == values.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert here[0].startswith("TypeError: log(step=0.5): a step must be an integer")
    assert [text.split(":")[0] for text in here] == ["TypeError"] * 5 + ["ValueError"] * 5 + ["TypeError"] * 2 + [
        "ValueError"
    ]
    assert here[5] == "ValueError: log(step=9223372036854775808): a step must fit into 64 bits"
    assert here[7] == "ValueError: log(weight=-1): a weight must be finite and at least 0, e.g. the number of samples"
    assert here[10] == "TypeError: log(weight='3'): a weight must be a number, e.g. the number of samples"


def test_weights_are_kept_in_double_precision(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            nbddp.log(mean=float(nbddp.rank()), weight=2**24 + 1 if nbddp.rank() else 1 / 3, reduce="mean")
    """)
    assert run(names.train).history["mean"].values.tolist() == [(2**24 + 1) / (1 / 3 + 2**24 + 1)]


def test_a_refused_call_does_not_shift_later_steps(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            for i in range(6):
                for bad in ({"loss": 9.0, "acc": object()}, {"loss": 9.0, 7: 1.0}):
                    try: nbddp.log(bad)
                    except TypeError: pass
                try: nbddp.log(loss=9.0, step=2**64)
                except ValueError: pass
                nbddp.log(loss=float(i), acc=0.5)
    """)
    history = run(names.train).history
    assert history["loss"].steps.tolist() == history["loss"].values.tolist() == [0, 1, 2, 3, 4, 5]
    assert history["acc"].steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert history.names == ["loss", "acc"]


def test_steps_stay_at_the_largest_int64(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            nbddp.log(loss=1.0, step=2**63 - 1)
            for i in range(3): nbddp.log(loss=2.0 + i)
            nbddp.log(other=3.0)
    """)
    history = run(names.train).history
    assert history["loss"].values.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert history["loss"].steps.tolist() == [2**63 - 1] * 4
    assert history["other"].values.tolist() == [3.0]


def test_threads_that_log_at_once_keep_names_and_steps_apart(cell: Cells) -> None:
    names = cell("""
        import nbddp, sys, threading
        def train(threads=8, names=60):
            sys.setswitchinterval(1e-6)
            start = threading.Barrier(threads)
            def chatter(thread):
                start.wait()
                for i in range(names):
                    nbddp.log({f"{thread}/{i}": 1000.0 * thread + i})
                    nbddp.log(shared=1.0, step=None)
            for t in (all_ := [threading.Thread(target=chatter, args=(t,)) for t in range(threads)]): t.start()
            for t in all_: t.join()
    """)
    history = run(names.train, nprocs=1).history
    for thread in range(8):
        for i in range(60):
            assert history[f"{thread}/{i}"].values.tolist() == [1000.0 * thread + i]
    assert history["shared"].steps.tolist() == list(range(480))


# ---------------------------------------------------------------------------- a rank's end of the pipe, without a rank


class OnDevice:
    """A tensor of one element, of a device that has not come to it yet."""

    is_cpu = False

    def __init__(self, value: float) -> None:
        self.value, self.arrived = value, False

    def numel(self) -> int:
        return 1

    def detach(self) -> OnDevice:
        return self

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self.arrived = True

    def item(self) -> float:
        assert self.arrived
        return self.value


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MetricsPipe, History]]:
    """A rank's end, and the history that its records go to."""
    history, fd = History(1), os.open(os.devnull, os.O_WRONLY)
    made = MetricsPipe(fd)
    monkeypatch.setattr(made, "_put", lambda records: history.feed(0, records))
    monkeypatch.setattr(made, "_help", lambda: None)
    monkeypatch.setattr(metrics_pipe, "_fetch", lambda tensor: (tensor, tensor))
    monkeypatch.setattr(metrics, "_pipe", made)
    yield made, history
    os.close(fd)


def test_values_logged_after_a_device_tensor_stay_after_it(pipe: tuple[MetricsPipe, History]) -> None:
    made, history = pipe
    first, third = OnDevice(0.0), OnDevice(2.0)
    for value in (first, 1.0, third, 3.0):
        nbddp.log(loss=value, lr=0.5)
    third.arrived = True
    made._move(0.0)
    assert history.names == []
    first.arrived = True
    made._move(0.0)
    assert history["loss"].values.tolist() == history["loss"].steps.tolist() == [0, 1, 2, 3]
    nbddp.log(loss=OnDevice(4.0))
    assert made.last_step() == 4
    metrics.flush()
    assert history["loss"].values.tolist() == [0, 1, 2, 3, 4]


class OnFailedDevice(OnDevice):
    """A tensor of a device whose kernels have failed, as after a device-side assert."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    synchronize = query  # type: ignore[assignment]


def test_a_failed_device_loses_its_numbers_and_nothing_else(pipe: tuple[MetricsPipe, History]) -> None:
    _, history = pipe
    nbddp.log(loss=1.0)
    nbddp.log(loss=OnFailedDevice(2.0))
    metrics.flush()
    nbddp.log(loss=3.0)
    metrics.flush()
    assert history["loss"].values.tolist() == [1, 3]


def test_numbers_of_a_device_are_copied_on_its_own_stream_into_memory_pinned_for_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded, blocks, empty = [], [], torch.empty

    def pinned(count: int, *, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
        assert (device, pin_memory) == ("cpu", True)
        blocks.append(count)
        return empty(count, dtype=dtype)

    class Event:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def record(self, stream: str) -> None:
            recorded.append((self.device, stream))

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(metrics_pipe, "_pinned", metrics_pipe._PinnedNumbers())
    with torch.inference_mode():  # a validation
        numbers = [metrics_pipe._fetch(torch.zeros(1))[1]]
    numbers += [metrics_pipe._fetch(torch.tensor([float(i)]))[1] for i in range(1, 600)]
    assert [number.item() for number in numbers] == list(range(600))
    assert blocks == [512, 512]
    assert recorded == [(torch.device("cpu"), "the stream of cpu")] * 600


def test_a_signal_handler_can_log_while_its_thread_logs(pipe: tuple[MetricsPipe, History]) -> None:
    made, history = pipe
    packed = made._records

    def interrupted(logged: Any) -> bytes:
        if not isinstance(logged, bytes) and "inside" not in logged[0]:
            nbddp.log(inside=1.0)
        return packed(logged)

    made._records = interrupted  # type: ignore[method-assign]
    for value in range(3):
        nbddp.log(loss=float(value))
    metrics.flush()
    assert history["loss"].values.tolist() == [0, 1, 2]
    assert history["inside"].values.tolist() == [1, 1, 1]


def test_two_threads_that_define_a_metric_at_once_define_it_once(pipe: tuple[MetricsPipe, History]) -> None:
    made, history = pipe
    made._define("loss")
    made._ids.clear()  # the other thread has looked before
    made._define("loss")
    for name in ("loss", "acc"):
        nbddp.log({name: 1.0})
    metrics.flush()
    assert {name: history[name].values.tolist() for name in history.names} == {"loss": [1.0], "acc": [1.0]}
    assert len(set(made._ids.values())) == 2


def test_a_full_pipe_loses_no_value_and_repeats_none() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.set_blocking(reader, False)
    made, history = MetricsPipe(writer), History(1)
    made._help = lambda: None  # type: ignore[method-assign]
    for value in range(20_000):
        made.log({"loss": float(value)}, None, 0, 1.0)
        if value % 5000 == 4999:
            history.feed(0, os.read(reader, 50_001))
    while made._has_unsent():
        made._move(0.0)
        history.feed(0, os.read(reader, 1 << 16))
    assert history["loss"].values.tolist() == list(range(20_000))
    os.close(reader)
    os.close(writer)
