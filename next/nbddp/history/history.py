"""``History``: the metrics of a run, its restarts and the progress of each rank. It draws nothing."""

from __future__ import annotations

import csv
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbddp.history.points import RECORD, Metric, Points, Series
from nbddp.history.progress import RankProgress

MAX_METRICS = 1_000


@dataclass(frozen=True)
class Restart:
    step: int | None
    reason: str


class History(Mapping[str, Series]):
    """The metrics of one run: ``steps, values = history["loss"]``."""

    def __init__(self, world_size: int = 1) -> None:
        self._world_size = world_size
        self._lock = threading.Lock()
        self._metrics: dict[str, Metric] = {}
        self._left_out: set[str] = set()
        self.restarts: list[Restart] = []
        self.ranks = [RankProgress() for _ in range(world_size)]
        self.snapshots: dict[str, int | None] = {}  # the last step, by path
        self.first_nan: tuple[str, int, int] | None = None  # metric, step, rank
        self.over = False

    # ------------------------------------------------------------------ for the user

    def __getitem__(self, name: str) -> Series:
        points = self.points(name)
        return Series(points.steps.copy(), points.values.copy())

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._metrics))

    def __len__(self) -> int:
        return len(self._metrics)

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __repr__(self) -> str:
        shown = [f"{name}: {len(series.steps)} points" for name, series in self.items()]
        return f"History({', '.join(shown) or 'nothing logged'})"

    def points(self, name: str) -> Points:
        """Steps, times, values, and the lowest and highest value over the ranks."""
        with self._lock:
            return self._metric(name).points(self._world_size)

    def by_rank(self, name: str) -> dict[int, Series]:
        """The values that each rank logged under this name."""
        with self._lock:
            metric = self._metric(name)
            return {rank: metric.by_rank(rank) for rank in metric.ranks}

    def latest(self) -> dict[str, float]:
        return {name: float(series.values[-1]) for name, series in self.items() if len(series.values)}

    def to_pandas(self) -> Any:
        """A DataFrame with one row per step and one column per metric."""
        import pandas

        columns = {name: pandas.Series(values, index=steps) for name, (steps, values) in self.items()}
        columns = {name: column[~column.index.duplicated(keep="last")] for name, column in columns.items()}
        return pandas.DataFrame(columns).sort_index().rename_axis("step")

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """One line per step, one column per metric; a missing value is an empty field."""
        rows: dict[int, dict[str, float]] = {}
        for name, (steps, values) in self.items():
            for step, value in zip(steps.tolist(), values.tolist()):
                rows.setdefault(step, {})[name] = value
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["step", *self])
            writer.writeheader()
            writer.writerows({"step": step, **rows[step]} for step in sorted(rows))

    # ------------------------------------------------------------------ for the run

    def add(self, rank: int, records: Iterable[Any], arrived_at: float = 0.0) -> None:
        """Add decoded records of that rank's metrics file."""
        logged: dict[tuple[str, str | None], list[tuple[float, int, bool, float, float]]] = {}
        with self._lock:
            self.ranks[rank].arrived_at = arrived_at
            for record in records:
                if isinstance(record, dict):
                    self._add_progress(self.ranks[rank], record)
                    continue
                at, step, counted, reduce, weight, values = record
                for name, value in values.items():
                    logged.setdefault((name, reduce), []).append((at, step, counted, weight, value))
            for (name, reduce), rows in logged.items():
                self._add(rank, name, reduce, np.array(rows, RECORD))

    def restart(self, reason: str = "", world_size: int | None = None) -> None:
        """The ranks start again, in new processes: the steps that they repeat replace the old ones."""
        with self._lock:
            self.restarts.append(Restart(None, reason))
            for metric in self._metrics.values():
                metric.restart(self._world_size)
            self._world_size = world_size or self._world_size
            self.ranks = [rank.after_restart() for rank in self.ranks]
            self.ranks += [RankProgress() for _ in range(self._world_size - len(self.ranks))]

    def settle(self, *, broken_off: bool = False) -> None:
        """The run is over; ``broken_off``: leave out the last points, which not every rank had reached."""
        with self._lock:
            self.over = True
            for metric in self._metrics.values():
                if broken_off:
                    metric.restart(self._world_size)
                metric.over = True

    def _add(self, rank: int, name: str, reduce: str | None, rows: np.ndarray) -> None:
        first = int(rows["step"][0])
        self.restarts = [r if r.step is not None else Restart(first, r.reason) for r in self.restarts]
        newest = int(rows["step"].argmax())
        self.ranks[rank].add_step(int(rows["step"][newest]), float(rows["time"][newest]))
        if self.first_nan is None and np.isnan(rows["value"]).any():
            self.first_nan = name, int(rows["step"][np.isnan(rows["value"])][0]), rank
        if name in self._metrics or len(self._metrics) < MAX_METRICS:
            self._metrics.setdefault(name, Metric(reduce)).add(rank, rows)
        else:
            self._left_out.add(name)

    def _add_progress(self, progress: RankProgress, record: dict[str, Any]) -> None:
        if bar := record.get("bar"):
            level, name, done, total = bar
            progress.add_bar(level, name, total, done, record["time"])
        elif "samples" in record:
            progress.add_samples(record["samples"], record["time"])
        elif "saved" in record:
            self.snapshots[record["saved"]] = record["step"]

    def _metric(self, name: str) -> Metric:
        if name not in self._metrics:
            raise KeyError(f"no metric {name!r} was logged; the metrics are: {', '.join(self._metrics) or 'none'}")
        return self._metrics[name]
