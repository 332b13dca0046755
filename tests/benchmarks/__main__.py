"""``python -m tests.benchmarks [--rounds N] [--json FILE] [PART ...]``: measure, and print the tables."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.benchmarks import data, log, start, training
from tests.benchmarks.measure import Table, as_json, report

PARTS = ("start", "spawn", "memory", "data", "log", "training")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tables: list[Table] = []
    for part in options.parts or PARTS:
        tables += _measure(part, options.rounds)
    print(report(tables))
    if options.json:
        options.json.write_text(as_json(tables))


def _measure(part: str, rounds: int) -> list[Table]:
    if part == "start":
        return [start.warm_start(rounds * 3)]
    if part == "spawn":
        return [start.against_spawn(max(3, rounds // 2))]
    if part == "memory":
        return [start.memory()]
    if part == "data":
        return data.measure(rounds)
    if part == "log":
        return [log.measure(rounds)]
    if part == "training":
        return training.measure(rounds)
    raise SystemExit(f"there is no part {part!r}; there is {', '.join(PARTS)}")


if __name__ == "__main__":
    main()
