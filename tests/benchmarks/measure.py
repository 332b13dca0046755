"""The tables of measurements, and a description of the machine."""

from __future__ import annotations

import functools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata

import psutil

VERSIONS_OF = (
    "nbddp",
    "torch",
    "accelerate",
    "lightning-fabric",
    "ipyparallel",
    "nbdistributed",
    "tensorboard",
    "tqdm",
    "numpy",
    "pandas",
    "ipykernel",
)


class LeftOut(Exception):
    """A candidate is not tried here; says why."""


@dataclass
class Table:
    """Seconds (or another unit) by candidate and column, over rounds; the first candidate is what ratios refer to.

    Attributes:
        values: by candidate and column, in the base unit (seconds, bytes); a column of "" is a table without columns.
        failures: why a candidate has no value in a column.
        corner: "ranks": what the columns are, for the table's corner.
        news: told in words of each value and failure, for who waits.
    """

    title: str
    columns: Sequence[object] = ("",)
    unit: str = "ms"
    scale: float = 1e3
    corner: str = ""
    ratios: bool = True
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    news: Callable[[str], None] = lambda text: None

    def add(self, name: str, value: float, column: object = "") -> None:
        self._row(name).setdefault(str(column), []).append(value)
        self.news(f"{_label(name, column)}: {_number(value * self.scale)} {self.unit}")

    def fail(self, name: str, why: BaseException | str, column: object = "") -> None:
        """Remember why there is no value; the first reason counts."""
        self._row(name)
        text = str(why) if isinstance(why, (str, LeftOut)) else f"failed: {_first_line(why)}"
        self.failures.setdefault((name, str(column)), text)
        self.news(f"{_label(name, column)}: {text}")

    def failed(self, name: str, column: object = "") -> bool:
        return (name, str(column)) in self.failures

    def median(self, name: str, column: object = "") -> float | None:
        values = self.values.get(name, {}).get(str(column))
        return statistics.median(values) if values else None

    def _row(self, name: str) -> dict[str, list[float]]:
        return self.values.setdefault(name, {})

    def markdown(self) -> str:
        lines = self._one_column() if [str(c) for c in self.columns] == [""] else self._many_columns()
        notes = [f"\n{note}" for note in self.notes]
        return "\n".join([f"### {self.title}", "", *lines, *notes])

    def _one_column(self) -> list[str]:
        lines = [f"| | median {self.unit} | min | max | ratio |", "| --- | ---: | ---: | ---: | ---: |"]
        for name, row in self.values.items():
            if values := row.get(""):
                low, middle, high = (_number(f(values) * self.scale) for f in (min, statistics.median, max))
                note = f" ({self.failures[name, '']})" if (name, "") in self.failures else ""
                lines.append(f"| {name}{note} | {middle} | {low} | {high} | {self._ratio(name, '')} |")
            else:
                lines.append(f"| {name} | {self.failures.get((name, ''), '')} | | | |")
        return lines

    def _many_columns(self) -> list[str]:
        heads = " | ".join(str(column) for column in self.columns)
        lines = [
            f"| {self.corner}, {self.unit} | {heads} |".replace("| , ", "| "),
            "| --- |" + " ---: |" * len(self.columns),
        ]
        for name in self.values:
            cells = (self._cell(name, str(column)) for column in self.columns)
            lines.append(f"| {name} | {' | '.join(cells)} |")
        ratio = f", × {next(iter(self.values), '')}" if self.ratios else ""
        return [*lines, f"\nmedian (min-max){ratio}"]

    def _cell(self, name: str, column: str) -> str:
        why = self.failures.get((name, column), "")
        values = self.values[name].get(column)
        if not values:
            return why
        low, middle, high = (_number(f(values) * self.scale) for f in (min, statistics.median, max))
        text = f"{middle} ({low}-{high})" if len(values) > 1 else middle
        ratio = self._ratio(name, column) if self.ratios else ""
        return text + (f" ×{ratio}" if ratio else "") + (f" {why}" if why else "")

    def _ratio(self, name: str, column: str) -> str:
        reference = self.median(next(iter(self.values)), column)
        value = self.median(name, column)
        if not reference or reference < 0 or value is None or value < 0:
            return ""
        ratio = value / reference
        return f"{ratio:.3f}" if 0.9 < ratio < 1.1 else _number(ratio)

    def as_json(self) -> dict[str, object]:
        failures = [{"row": row, "column": column, "why": why} for (row, column), why in self.failures.items()]
        shown = {"unit": self.unit, "scale": self.scale, "columns": [str(column) for column in self.columns]}
        return {"title": self.title, **shown, "values": self.values, "failures": failures, "notes": self.notes}


@functools.cache  # as it was when the program began
def surroundings() -> dict[str, str]:
    """The day, the machine and the versions."""
    found = {name: version for name in VERSIONS_OF if (version := version_of(name))}
    memory = psutil.virtual_memory().total / 2**30
    machine = f"{psutil.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}"
    load = f"load {psutil.getloadavg()[0]:.1f} when it began"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{machine}, {load}",
        "Python": platform.python_version(),
        **found,
    }


def heading() -> str:
    """The surroundings as one line, and how busy the machine is otherwise."""
    day_and_machine, versions = list(surroundings().items())[:2], list(surroundings().items())[2:]
    return " · ".join([*(value for _, value in day_and_machine), *(f"{name} {value}" for name, value in versions)])


def as_json(tables: list[Table]) -> str:
    """All tables as JSON, every value kept."""
    return json.dumps({"surroundings": surroundings(), "tables": [table.as_json() for table in tables]}, indent=1)


def version_of(distribution: str) -> str:
    """Of what is installed; "" if it is not."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _label(name: str, column: object) -> str:
    return f"{name}, {column}" if str(column) else name


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:120].replace("|", "/")
