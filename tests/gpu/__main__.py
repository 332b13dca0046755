"""Run what needs a GPU, part by part: ``python -m tests.gpu FOLDER``.

FOLDER gets gpu.json with every result, and gpu.log with all output; each result is printed as soon as it is there. A
part that fails, or takes too long, does not end the others. A second call goes on with the parts that have no result.

A machine that is there for a short time, has torch and no network:

  here    python -m tests.gpu wheels wheels        downloads the other packages, for Python 3.12
          copy the clone and the folder wheels there
  there   python -m tests.gpu /tmp/gpu --wheels wheels        within ten minutes; again, until no part is left
          take gpu.json and gpu.log back
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.gpu.parts import MOST_S, PARTS
from tests.gpu.runner import ROOT, Results, run_all


def main() -> int:
    if sys.argv[1:2] == ["wheels"]:
        return _download(sys.argv[2:])
    options = _options()
    if options.list:
        print("\n".join(f"{part.name:12} {part.limit_s:4.0f} s  {part.what}" for part in PARTS))
        return 0
    if options.child:
        return _be_a_part(options)
    if options.wheels is not None:
        _use(options.wheels, Path(options.folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    results = Results(Path(options.folder), options.device)
    chosen = [part for part in PARTS if not options.part or part.name in options.part]
    return run_all(chosen, results, options.device, options.within)


def _be_a_part(options: argparse.Namespace) -> int:
    from tests.gpu.parts import Part
    from tests.gpu.report import run_part

    run_part(Part("", options.child, 0, "").function(), options.device, options.fd)
    return 0


def _use(wheels: Path, folder: Path) -> None:
    """Make the wheels importable, here and in every process that is started from here."""
    from tests.gpu import wheels as needs

    site = folder.resolve() / "site"
    needs.install(wheels, site)
    sys.path.insert(1, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))


def _download(arguments: list[str]) -> int:
    from tests.gpu import wheels

    parser = argparse.ArgumentParser(prog="python -m tests.gpu wheels", description=wheels.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the version there")
    options = parser.parse_args(arguments)
    wheels.download(options.folder, options.python)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", default="gpu-results", help="for gpu.json and gpu.log")
    parser.add_argument("--part", action="append", choices=[part.name for part in PARTS], help="these parts alone")
    parser.add_argument("--list", action="store_true", help="the parts and their time limits")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the script out")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to be used")
    parser.add_argument("--within", type=float, default=MOST_S, metavar="SECONDS", help="begin no part beyond this")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
