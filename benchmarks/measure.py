"""The table of all figures, the turns of those that are compared, and a description of the machine."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import psutil

_UNITS = {"s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")), "B": ((1e6, "MB"), (1e3, "kB"), (1.0, "B"))}
_VERSIONS_OF = ("torch", "accelerate", "ipyparallel", "ray", "tqdm", "ipykernel")


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        mib: of the tensor that's sent to the ranks.
        calls: of ``log()`` in a loop.
        steps: that each rank logs for the panel.
    """

    rounds: int = 5
    ranks: int = 4
    mib: int = 1024
    calls: int = 50_000
    steps: int = 800


@dataclass
class Figure:
    """One figure, measured for several ways to do it; ratios refer to the first way.

    Attributes:
        unit: seconds (``"s"``) or bytes (``"B"``).
        values: by the name of the way.
        failures: why a way has no more values.
    """

    unit: str
    values: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.values[name])

    def rows(self) -> list[str]:
        """Return a row of cells for each way: its name, the median, from least to most, the ratio."""
        found = []
        first = next(iter(self.values), "")
        for name, values in self.values.items():
            low, middle, high = (shown(of(values), self.unit) for of in (min, statistics.median, max))
            is_compared = name != first and first.startswith("nbddp")
            ratio = f"{self.median(first) / self.median(name):.2g}" if is_compared else ""
            found.append(f"{name} | {middle} | {low} to {high} | {ratio}")
        return found + [f"{name} | {why} | | " for name, why in self.failures.items()]


class Table:
    """All figures that have been measured."""

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = {}

    def add(self, figure: str, name: str, value: float, unit: str = "s") -> None:
        self.figures.setdefault(figure, Figure(unit)).values.setdefault(name, []).append(value)
        print(f"{time.strftime('%H:%M:%S')} {figure}: {name}: {shown(value, unit)}", file=sys.stderr)

    def turns(
        self, figure: str, rounds: int, ways: Sequence[Any], turn: Callable[[Any], None], unit: str = "s"
    ) -> None:
        """Give each way a turn in every round, there and back; one that fails gets no more."""
        left = list(ways)
        for _ in range(rounds):
            for way in list(left):
                try:
                    turn(way)
                except Exception as error:  # the others' figures are still worth having
                    why = f"{type(error).__name__}: {error}".splitlines()[0][:100].replace("|", "/")
                    self.figures.setdefault(figure, Figure(unit)).failures[way.name] = why
                    left.remove(way)
            left.reverse()

    def markdown(self) -> str:
        """Return the table as it's in the docs."""
        lines = ["| | | median | range | nbddp ÷ other |", "| --- | --- | ---: | ---: | ---: |"]
        for title, figure in self.figures.items():
            lines += [f"| {'' if number else title} | {row} |" for number, row in enumerate(figure.rows())]
        return "\n".join(lines)


def shown(value: float, unit: str) -> str:
    """Return a value with three digits, in the largest unit that it fills."""
    scales = _UNITS[unit]
    scale, name = next((each for each in scales if abs(value) >= each[0]), scales[-1])
    return f"{value / scale:.3g} {name}"


def surroundings(rounds: int) -> str:
    """Describe the day, the machine, and the versions, as it's in the docs above the table."""
    found = [f"{name} {version}" for name in _VERSIONS_OF if (version := version_of(name))]
    memory, load = psutil.virtual_memory().total / 2**30, psutil.getloadavg()[0]
    machine = f"{psutil.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}, load {load:.1f} at the start"
    versions = ", ".join([f"Python {platform.python_version()}", *found])
    when = f"`python -m benchmarks --rounds {rounds}` on {time.strftime('%Y-%m-%d')}"
    return f"Measured with {when}: {machine}, {versions}."


def version_of(distribution: str) -> str:
    """Return the version that's installed, or ``""``."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
