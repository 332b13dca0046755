"""``python -m tests.soak --runs 300``, ``python -m tests.soak --minutes 30``: what a kernel holds, as time goes by."""

from __future__ import annotations

import argparse
import os
import sys

from tests import support
from tests.soak import long_run, many_runs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--runs", type=int, help="so many runs in one kernel")
    parser.add_argument("--minutes", type=float, help="one run of so long, 100 metrics a second, with the panel")
    options = parser.parse_args()
    wrong = []
    if options.minutes is None or options.runs is not None:
        wrong += many_runs.main(options.runs or 300)
    if options.minutes is not None:
        wrong += long_run.main(60 * options.minutes)
    print("\n".join(["FAILED", *wrong] if wrong else ["all flat"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    name, _, value = support.MARK.partition("=")
    os.environ[name] = value
    sys.exit(main())
