"""Draws two runs over each other: the earlier one is grey, behind the later one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from html import escape
from typing import Any, Protocol

import numpy as np

from nbddp.history.history import History, Spread
from nbddp.panel import numbers
from nbddp.panel.curves import Charts, Family, Line, charts
from nbddp.panel.picture import MAX_ROWS, NAME_CHARS, Picture, table_end, table_head, table_row, value
from nbddp.text import plain

_GREY = "#8a8a8a"
_NOTHING = Spread(np.empty(0, np.int64), np.empty(0), np.empty(0))


class HasHistory(Protocol):
    """A ``Run``."""

    @property
    def history(self) -> History: ...


def compare(before: HasHistory | History, after: HasHistory | History, *names: str, log: bool = False) -> Comparison:
    """Compare two runs: the curves of ``before`` in grey behind those of ``after``, and a table of the differences.

    ``nbddp.compare(first, second)`` in a cell's last line shows both; ``.svg`` is the image as text, ``.figure()`` the
    charts with matplotlib.

    Args:
        before: the earlier run, or its history.
        after: the later run, or its history.
        names: the metrics to compare. Default: all that one of them has logged.
        log: True: a logarithmic axis for the values; values that are not positive are left out.

    Raises:
        KeyError: neither of them has logged a metric of this name.
        TypeError: one of them is neither a run nor a history.
    """
    old, new = _history(before), _history(after)
    for name in names:
        if name not in old and name not in new:
            new[name]  # raises, and lists the names that there are
    return Comparison(old, new, names, log)


def _history(source: Any) -> History:
    history = getattr(source, "history", source)
    if not isinstance(history, History):
        raise TypeError(f"compare() takes two runs or histories, not {type(source).__name__}")
    return history


class Comparison(Picture):
    """What ``compare`` returns. A notebook displays it."""

    def __init__(self, before: History, after: History, names: tuple[str, ...], log: bool) -> None:
        super().__init__(after, names=names, log=log)
        self._before = before

    def __repr__(self) -> str:
        parts = [
            f"{plain(name[:NAME_CHARS])} {numbers.metric(old)} → {numbers.metric(new)}"
            for name, old, new in self._last_values()
            if old is not None and new is not None
        ]
        return f"Comparison({', '.join(parts[:8])})"

    def _drawn(self, points: int, lines: int) -> Charts:
        """The charts of the later run, with the lines of the earlier one before its own, so that they lie behind."""
        old, new = (
            self._charts_of(history, points // 2, max(1, lines // 2)) for history in (self._before, self._history)
        )
        grey = {_name(family): family for family in old.families}
        shown = [_over(grey.pop(_name(family), None), family) for family in new.families]
        return dataclasses.replace(new, families=shown + [_over(family, None) for family in grey.values()])

    def _charts_of(self, history: History, points: int, lines: int) -> Charts:
        names = [name for name in self._names if name in history]
        if self._names and not names:
            return Charts([], [], [])
        return charts(history, points, lines, names, log=self._log)

    def _last_values(self) -> list[tuple[str, float | None, float | None]]:
        old, new = self._before.latest(), self._history.latest()
        names = self._names or dict.fromkeys([*new, *old])
        return [(name, old.get(name), new.get(name)) for name in names]

    def _metrics(self) -> Iterable[str]:
        rows = self._last_values()
        yield table_head("Metric", "Before", "After", "Difference")
        for name, old, new in rows[:MAX_ROWS]:
            cells = ["–" if number is None else value(number) for number in (old, new)]
            yield table_row(escape(plain(name[:NAME_CHARS])), *cells, _difference(old, new))
        yield table_end(4, len(rows) - MAX_ROWS)


def _difference(old: float | None, new: float | None) -> str:
    """``−0.0412 (−12 %)``."""
    if old is None or new is None or not math.isfinite(new - old):
        return "–"
    share = f" ({(new - old) / abs(old):+.0%})" if old else ""
    sign = "+" if new > old else ""
    return f"{sign}{numbers.metric(new - old)}{share}".replace("-", "−").replace("%", " %").replace("e−", "e-")


def _name(family: Family) -> str:
    return family.lines[0].metric.family


def _over(old: Family | None, new: Family | None) -> Family:
    """One chart of two: the old lines are grey and have no band."""
    grey = [] if old is None else [_in_grey(line) for line in old.lines]
    lines = [*grey, *(new.lines if new else [])]
    families = [family for family in (old, new) if family is not None]
    return Family(lines, sum(family.undrawn for family in families), families[0].log)


def _in_grey(line: Line) -> Line:
    metric = line.metric
    alone = metric.label.lower() == metric.family
    label = "before" if alone else f"{metric.label} before"
    return dataclasses.replace(line, color=_GREY, spread=_NOTHING, metric=dataclasses.replace(metric, label=label))
