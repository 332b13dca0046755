"""Rounds of several candidates in turn, so that a machine's drift meets all alike, and their table."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata

import psutil


@dataclass
class Table:
    """Seconds (or another unit) by candidate, over rounds; the first candidate is what ratios refer to."""

    title: str
    unit: str = "ms"
    scale: float = 1e3
    rows: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: float) -> None:
        self.rows.setdefault(name, []).append(value)

    def markdown(self) -> str:
        reference = statistics.median(next(iter(self.rows.values())))
        lines = [
            f"### {self.title}",
            "",
            f"| | median {self.unit} | min | max | ratio |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for name, values in self.rows.items():
            low, middle, high = (f(values) * self.scale for f in (min, statistics.median, max))
            ratio = middle / self.scale / reference
            lines.append(f"| {name} | {middle:,.3g} | {low:,.3g} | {high:,.3g} | {ratio:.2f} |")
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])

    def as_json(self) -> dict[str, object]:
        return {"title": self.title, "unit": "s", "rows": self.rows, "notes": self.notes}


def in_turn(table: Table, rounds: int, candidates: dict[str, Callable[[], object]]) -> Table:
    """Time each candidate once per round."""
    for _ in range(rounds):
        for name, candidate in candidates.items():
            began = time.perf_counter()
            candidate()
            table.add(name, time.perf_counter() - began)
    return table


def surroundings() -> str:
    """The machine and the versions, as one line."""
    names = ("nbddp", "torch", "accelerate", "tqdm", "numpy")
    versions = [f"{name} {version}" for name in names if (version := _version(name))]
    memory = psutil.virtual_memory().total / 2**30
    machine = f"{psutil.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}"
    return f"{time.strftime('%Y-%m-%d')} · {machine} · Python {platform.python_version()} · {' · '.join(versions)}"


def report(tables: list[Table]) -> str:
    """All tables as markdown."""
    return "\n\n".join([surroundings(), *(table.markdown() for table in tables)])


def as_json(tables: list[Table]) -> str:
    """All tables as JSON, every value kept."""
    return json.dumps({"surroundings": surroundings(), "tables": [t.as_json() for t in tables]}, indent=1)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
