"""``Recording``: what the ranks of a run have logged, as it arrives; a ``History`` reads it."""

import collections
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from nbddp.history.points import RECORD, Generation, Metric, Points
from nbddp.history.progress import RankProgress
from nbddp.history.records import AUTOLOG

MAX_METRICS = 1_000  # a page with more charts no longer answers


class Recording:
    """The metrics of one run, and the progress of each rank. Readers hold the ``lock``."""

    def __init__(self, world_size: int = 1) -> None:
        self.lock = threading.Lock()
        self.metrics: dict[str, Metric] = {}
        self.left_out: set[str] = set()
        self.named: dict[int, dict[str, None]] = collections.defaultdict(dict)  # by rank, in its order
        self.generations = [Generation("", world_size)]
        self.ranks = [RankProgress() for _ in range(world_size)]
        self.snapshots: dict[str, int | None] = {}
        self.first_nan: tuple[str, int, int] | None = None
        self.broken: dict[str, dict[int, tuple[int, float]]] = {}  # by rank: step and value

    def add(self, rank: int, records: Iterable[Any]) -> None:
        """Add decoded records of that rank's metrics file."""
        logged: dict[Any, tuple[dict[str | None, None], list[Any]]] = collections.defaultdict(lambda: ({}, []))
        with self.lock:
            self.ranks[rank].arrived_at = time.time()
            for record in records:
                if isinstance(record, dict):
                    self._add_other(rank, record)
                    continue
                at, step, counted, reduce, weight, values = record
                place = np.nan if counted else step
                heard = reduce == AUTOLOG
                for name, value in values.items():
                    ops, rows = logged[name, heard]
                    ops[None if heard else reduce] = None
                    rows.append((at, step, place, weight, value))
            for (name, heard), (ops, rows) in logged.items():
                self._add(rank, name, ops, np.array(rows, RECORD), rows[0][1], heard)

    def take(self) -> dict[str, Points]:
        """The points that are new since the last call and will not change any more, for log_to=."""
        with self.lock:
            return {name: self.metrics[name].take() for name in self.names()}

    def restart(self, reason: str = "", world_size: int | None = None) -> None:
        """The ranks start again, in new processes: the steps that they repeat replace the old ones."""
        with self.lock:
            self.generations[-1].broken_off = True
            world_size = world_size or self.generations[-1].world_size
            self.generations.append(Generation(reason, world_size))
            self.broken.clear()
            self.ranks = [rank.after_restart() for rank in self.ranks]
            self.ranks += [RankProgress() for _ in range(world_size - len(self.ranks))]

    def settle(self, *, broken_off: bool = False) -> None:
        """The run is over; ``broken_off``: leave out the last points, which not every rank had reached."""
        with self.lock:
            self.generations[-1].broken_off = broken_off

    def names(self) -> list[str]:
        names = dict.fromkeys(name for rank in sorted(self.named) for name in self.named[rank])
        return [name for name in names if name in self.metrics]

    def metric(self, name: str) -> Metric:
        if name not in self.metrics:
            raise KeyError(f"no metric {name!r} was logged; the metrics are: {', '.join(self.names()) or 'none'}")
        return self.metrics[name]

    def _add(self, rank: int, name: str, ops: Iterable[str | None], rows: np.ndarray, first: int, heard: bool) -> None:
        known = self.metrics.get(name)
        if heard and known is not None and not known.heard:
            return
        generation = self.generations[-1]
        generation.first_steps.setdefault(rank, first)
        newest = int(rows["step"].argmax())
        self.ranks[rank].add_step(int(rows["step"][newest]), float(rows["time"][newest]))
        if self.first_nan is None and len(nan := np.flatnonzero(np.isnan(rows["value"]))):
            self.first_nan = name, int(rows["step"][nan[0]]), rank
        if known is None and len(self.metrics) == MAX_METRICS:
            self.left_out.add(name)
            return
        finite, since = np.flatnonzero(np.isfinite(rows["value"])), self.broken.setdefault(name, {})
        start = int(finite[-1]) + 1 if len(finite) else 0
        if start:
            since.pop(rank, None)
        if start < len(rows):
            since.setdefault(rank, (int(rows["step"][start]), float(rows["value"][start])))
        self.named[rank][name] = None
        if known is None or known.heard != heard:
            known = self.metrics[name] = Metric(heard=heard)
        known.add(rank, ops, rows, generation, first)

    def _add_other(self, rank: int, record: dict[str, Any]) -> None:
        if bar := record.get("bar"):
            self.ranks[rank].add_bar(bar[0], bar[1:], record["time"])
        elif "samples" in record:
            self.ranks[rank].add_samples(record["samples"], record["time"])
        elif "saved" in record:
            self.snapshots[record["saved"]] = record["step"]
        elif "metrics" in record:  # written by History.save()
            self.metrics = {name: Metric(ops=dict(ops)) for name, ops in record["metrics"]}
            self.named[rank].update(dict.fromkeys(self.metrics))
        elif "rows" in record:
            rows = np.frombuffer(record["rows"], RECORD)
            self._add(rank, record["name"], record["ops"], rows, record["first"], heard=False)
