"""Sinks that are objects of the user's: TensorBoard's, W&B's, MLflow's, a logger of Lightning's, a function.

None of these packages is imported: the object that the user passes brings its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nbddp.history.history import History
from nbddp.sinks.interface import Points, Remaining, Sink, rows

_MLFLOW_BATCH = 1_000  # metrics in one request, MLflow's limit
_NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w\-. :/]")


class TensorBoard(Sink):
    """A ``SummaryWriter``, of torch or of tensorboardX. It stays open: the user may write more to it."""

    def __init__(self, writer: Any) -> None:
        self.name = type(writer).__name__
        self._writer = writer
        self._remaining = Remaining()

    def write(self, points: Sequence[Points], history: History) -> None:
        for name, steps, values, times in self._remaining.of(points):
            for step, value, time in zip(steps.tolist(), values.tolist(), times.tolist()):
                self._writer.add_scalar(name, value, step, walltime=time)
        self._writer.flush()  # what is only in its queue is lost with the notebook kernel


class TensorBoardFolder(Sink):
    """``"tensorboard:FOLDER"``: a ``SummaryWriter`` of torch for this run."""

    def __init__(self, folder: str) -> None:
        self.name = f"tensorboard:{folder}"
        self._folder = Path(folder).absolute()
        self._writer: Any = None
        self._sink: TensorBoard | None = None

    def write(self, points: Sequence[Points], history: History) -> None:
        if self._sink is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
            self._sink = TensorBoard(self._writer)
        self._sink.write(points, history)

    def close(self, history: History) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbRun(Sink):
    """A run of W&B's, from ``wandb.init()``. It stays open: ``finish()`` is the user's.

    The steps are a metric named ``step``, which all charts have as their x axis: W&B's own steps may only grow, and the
    user may have logged some.
    """

    def __init__(self, run: Any) -> None:
        self.name = f"wandb run {run.name or run.id}"
        self._run = run
        self._known: set[str] = set()
        self._remaining = Remaining()

    def write(self, points: Sequence[Points], history: History) -> None:
        for name in [each.name for each in points if each.name not in self._known]:
            self._run.define_metric(name, step_metric="step")
            self._known.add(name)
        for row in self._remaining.of(rows(points)):
            self._run.log({**row.values, "step": row.step, "_timestamp": row.time})


class MlflowRun(Sink):
    """A run of MLflow's, from ``mlflow.start_run()``. It stays open: ``end_run()`` is the user's."""

    def __init__(self, run: Any) -> None:
        self.name = f"mlflow run {run.info.run_name or run.info.run_id}"
        self._run_id = run.info.run_id
        self._client = sys.modules["mlflow"].MlflowClient()
        self._metric = sys.modules["mlflow"].entities.Metric
        self._remaining = Remaining()

    def write(self, points: Sequence[Points], history: History) -> None:
        metrics = [
            self._metric(_NOT_IN_MLFLOW_NAMES.sub("_", name), value, round(time * 1000), step)
            for name, steps, values, times in points
            for step, value, time in zip(steps.tolist(), values.tolist(), times.tolist())
        ]
        for start in self._remaining.of(range(0, len(metrics), _MLFLOW_BATCH)):
            self._client.log_batch(self._run_id, metrics[start : start + _MLFLOW_BATCH])


class Logger(Sink):
    """An object with ``log_metrics(metrics, step)``, such as Lightning's loggers."""

    def __init__(self, logger: Any) -> None:
        self.name = type(logger).__name__
        self._logger = logger
        self._remaining = Remaining()

    def write(self, points: Sequence[Points], history: History) -> None:
        for row in self._remaining.of(rows(points)):
            self._logger.log_metrics(row.values, step=row.step)

    def close(self, history: History) -> None:
        if callable(save := getattr(self._logger, "save", None)):
            save()


class Function(Sink):
    """A function ``f(step, metrics)``, called once per step. A step's later metrics come in another call."""

    def __init__(self, function: Callable[[int, dict[str, float]], object]) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self._function = function
        self._remaining = Remaining()

    def write(self, points: Sequence[Points], history: History) -> None:
        for row in self._remaining.of(rows(points)):
            self._function(row.step, row.values)
