"""``python -m tests.benchmarks [--rounds N] [--json FILE] [--markdown FILE] [PART ...]``: measure, print the tables."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks import data, ends, gpu, kept, log, memory, on_ray, start, timeline, training
from tests.benchmarks.measure import Table, as_json, heading
from tests.benchmarks.peers import CANDIDATES, installed, missing
from tests.benchmarks.settings import Settings

PARTS: dict[str, Callable[[Settings], list[Table]]] = {
    "cold": start.cold,
    "warm": start.warm,
    "timeline": timeline.measure,
    "memory": memory.measure,
    "data": data.into,
    "result": data.back,
    "log": log.measure,
    "training": training.measure,
    "failure": ends.failure,
    "stop": ends.stop,
    "death": ends.death,
    "restart": ends.restart,
    "session": kept.measure,
    "ray": on_ray.measure,
    "gpu": gpu.measure,
}


class Report:
    """Prints each table once it is complete; its files have all values so far, of what is cut off, too."""

    def __init__(self, markdown: Path | None, json: Path | None) -> None:
        self._blocks: list[str | Table] = []
        self._json = json
        self._markdown = markdown

    def say(self, text: str) -> None:
        self._blocks.append(text)
        print(text + "\n", flush=True)
        self._write()

    def keep(self, table: Table) -> None:
        self._blocks.append(table)
        table.news = self._hear

    def show(self, table: Table) -> None:
        if not any(block is table for block in self._blocks):
            self._blocks.append(table)
        print(table.markdown() + "\n", flush=True)
        self._write()

    def _hear(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}   {text}", file=sys.stderr, flush=True)
        self._write()

    def _write(self) -> None:
        tables = [block for block in self._blocks if isinstance(block, Table)]
        if self._markdown:
            texts = [block.markdown() if isinstance(block, Table) else block for block in self._blocks]
            self._markdown.write_text("\n\n".join(texts) + "\n")
        if self._json:
            self._json.write_text(as_json(tables))


def main() -> int:
    options = _options()
    report = Report(options.markdown, options.json)
    report.say(heading())
    if text := missing():
        report.say(text)
    peers = [peer for peer in installed(CANDIDATES) if not any(name in peer.name for name in options.without)]
    nbytes = options.mib and [m << 20 for m in options.mib]
    settings = Settings(options.rounds, options.ranks, nbytes, options.steps, peers, report.keep, report.show)
    failed = []
    for name in options.parts or PARTS:
        print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
        try:
            PARTS[name](settings)
        except Exception:  # the other parts are still worth having
            traceback.print_exc()
            report.say(f"### {name}\n\nfailed: {traceback.format_exc().splitlines()[-1]}")
            failed.append(name)
    return len(failed)


def _options() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="every value, for comparing")
    parser.add_argument("--markdown", type=Path, help="what is printed")
    parser.add_argument("--ranks", type=numbers, metavar="N,N", help="in place of the part's own numbers of ranks")
    parser.add_argument("--mib", type=numbers, metavar="N,N", help="in place of the part's own sizes of data")
    parser.add_argument("--steps", type=float, default=1.0, help="of training, times the part's own number")
    parser.add_argument(
        "--without", action="append", default=[], metavar="TEXT", help="candidates that have it in their name"
    )
    parser.add_argument(
        "--pinned",
        action="store_true",
        help="each rank of the training on one core, every way: where gloo's threads, which spin, happen to be put "
        "changes a small model's speed by half",
    )
    options = parser.parse_args()
    if options.pinned:
        os.environ["NBDDP_BENCH_PINNED"] = "1"  # of the kernels, and of their ranks
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; there is {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
