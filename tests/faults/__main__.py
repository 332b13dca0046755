"""``python -m tests.faults --count 500 --seed 1``: many faults; ``--case 1:17`` does one of them again."""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import time

from tests import support
from tests.faults import cases
from tests.faults.suite import able, run_all, table


def main() -> int:
    options = _options()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    if options.lines:
        seed = "line"
    first = options.first if options.lines else 0
    seeds = options.case or [f"{seed}:{number}" for number in range(first, first + options.count)]
    lacking = {sort: why for sort, why in able().items() if why}
    for sort, why in lacking.items():
        skipped = [name for name, fault in cases.FAULTS.items() if fault.kernel == sort]
        print(f"not on this machine: {', '.join(skipped)}: {why}")
    possible = set(able()) - set(lacking) - ({"notebook"} if options.no_notebooks else set())
    print(f"seed {seed}, {len(seeds)} faults", flush=True)
    began = time.monotonic()
    drawn = [_case(one, options.only, possible) for one in seeds]
    verdicts = run_all(drawn, options.jobs, options.minutes, options.verbose)
    seconds = time.monotonic() - began
    failed = sum(bool(v.wrong) for v in verdicts)
    print(table(verdicts))
    done = len(verdicts)
    print(f"seed {seed}: {done} faults in {seconds:.0f} s ({done / seconds:.1f} a second), {failed} failed")
    return 1 if failed else 0


def _case(seed: str, only: str, possible: set[str]) -> cases.Case:
    kind, _, number = seed.partition(":")
    return cases.at_line(int(number)) if kind == "line" else cases.draw(seed, only, possible)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, help="default: a new one, which is printed")
    parser.add_argument("--lines", action="store_true", help="interrupt one run at every line of the kernel's in turn")
    parser.add_argument("--first", type=int, default=1, help="of those lines")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--only", default="", metavar="KIND", help="faults whose name holds this")
    parser.add_argument("--case", action="append", metavar="SEED", help="one case alone, by its seed (with its --only)")
    parser.add_argument("--no-notebooks", action="store_true", help="without real Jupyter kernels")
    parser.add_argument("--jobs", type=int, default=2, help="so many lanes of cases side by side")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    name, _, value = support.MARK.partition("=")
    os.environ[name] = value
    faulthandler.register(signal.SIGUSR1)  # where is the suite itself?
    sys.exit(main())
