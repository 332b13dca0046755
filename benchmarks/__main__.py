"""``python -m benchmarks [PART ...] [--rounds N] [--markdown FILE]``: measure, and print the table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks import curves, runs, sessions
from benchmarks.measure import Sizes, Table, surroundings

_OF_RUNS = [runs.warm, runs.data, runs.killed, runs.first, runs.nodes]
_OTHERS = [sessions.cell, sessions.memory, sessions.failure, curves.log, curves.panel]
PARTS: dict[str, Callable[..., None]] = {part.__name__: part for part in [*_OF_RUNS, *_OTHERS]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--rounds", type=int, default=Sizes.rounds)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="what is printed, for docs/benchmarks.md")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}")
    table, heading = Table(), surroundings(options.rounds)
    for name in options.parts or PARTS:
        PARTS[name](table, Sizes(rounds=options.rounds))
        text = f"{heading}\n\n{table.markdown()}\n"
        if options.markdown:
            options.markdown.write_text(text)  # what's cut off later isn't lost
    print(text)


if __name__ == "__main__":
    main()
