"""A history without a run, as its ranks would log it."""

from collections.abc import Sequence
from typing import Any

from nbddp.history.history import History
from nbddp.history.recording import Recording


class Recorded(History):
    """A history, and what its run does to it."""

    def __init__(self, world_size: int = 1) -> None:
        super().__init__(new := Recording(world_size))
        self.add, self.take, self.restart, self.settle = new.add, new.take, new.restart, new.settle


def logged(
    ranks: int = 1,
    *,
    history: Recorded | None = None,
    rank: int | None = None,
    first: int = 0,
    reduce: str | None = None,
    every_s: float = 0.1,
    **curves: Sequence[float],
) -> Recorded:
    """Each rank, or one, logs these values under these names, at the steps from ``first`` on."""
    history = Recorded(ranks) if history is None else history
    last = first + max(map(len, curves.values())) - 1
    for each in [rank] if rank is not None else range(ranks):
        for steps in (range(first, last), [last]):  # a speed needs two arrivals
            records: list[Any] = [
                [100 + step * every_s, step, False, reduce, 1.0, {name: float(values[step - first])}]
                for step in steps
                for name, values in curves.items()
                if step - first < len(values)
            ]
            history.add(each, records)
    return history
