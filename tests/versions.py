"""Runs the core tests with other versions of Python, torch and the needs: ``python -m tests.versions [NAME ...]``.

Makes a venv for each whose Python is on PATH, and prints a row of docs/places.md for each. It downloads gigabytes, so
it is not in CI. Only ``here`` takes torch from the environment that runs this, and downloads a few megabytes.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).parent.parent
CORE = ("tests/test_run.py", "tests/test_ranks.py", "tests/test_magic.py", "tests/test_first_run.py")
TEST_NEEDS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "ipykernel>=6.17", "jupyter_client>=7")
SHOWN = ("torch", "numpy", "ipython", "ipywidgets", "anywidget", "cloudpickle")
# What the lowest versions themselves need in place of the newest: IPython 7.34 and ipywidgets 7.7.
OLD_NEEDS = (
    *("ipykernel==6.17.1", "traitlets==5.7.1", "jupyter_client==7.4.9", "backcall", "pickleshare", "nest-asyncio"),
    *("ipython-genutils", "decorator", "entrypoints", "psygnal", "tornado", "pyzmq"),
)


@dataclass(frozen=True)
class Versions:
    """One environment.

    Attributes:
        python: the interpreter's name; "" for the one that runs this.
        lowest: every need of nbddp in the lowest version that pyproject.toml allows.
        more: requirements beside these.
        shares: all else, and torch, come from the environment that runs this.
    """

    python: str
    lowest: bool = False
    more: tuple[str, ...] = ()
    shares: bool = False


ENVIRONMENTS = {
    "lowest": Versions("python3.10", lowest=True),
    "cloud": Versions("python3.12", more=("torch==2.11.*",)),
    "newest": Versions("python3.13"),
    "3.14": Versions("python3.14"),
    "here": Versions("", lowest=True, shares=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*ENVIRONMENTS, []], help="default: all")
    parser.add_argument("--folder", type=Path, help="keep the environments here")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="nbv-", dir="/tmp"))
    failed = 0
    try:
        for name in options.names or ENVIRONMENTS:
            if shutil.which(wanted := ENVIRONMENTS[name].python or sys.executable) is None:
                print(f"| {name} | {wanted} | not run: it is not on PATH |", flush=True)
                failed += name in options.names
                continue
            python = make(ENVIRONMENTS[name], folder / name)
            outcome = outcome_of(python)
            failed += " failed" in outcome or " passed" not in outcome
            print(f"| {name} | {', '.join(versions_in(python))} | {outcome} |", flush=True)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    return failed


def make(versions: Versions, folder: Path) -> Path:
    """Make one environment, and return its interpreter."""
    base = versions.python or sys.executable
    subprocess.run([base, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    needs = [*requirements(versions.lowest, without_torch=versions.shares), *versions.more]
    if versions.lowest:
        needs += OLD_NEEDS
    # With the shared packages behind it, an environment needs only what differs; else all that pip finds.
    subprocess.run([*install, *(["--no-deps"] if versions.shares else TEST_NEEDS), *needs], check=True)
    others = [str(ROOT), *(path for path in sys.path if versions.shares and path.endswith("site-packages"))]
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "others.pth").write_text("\n".join(others) + "\n")
    return python


def requirements(lowest: bool, *, without_torch: bool) -> list[str]:
    """What pyproject.toml asks for; with ``lowest`` in exactly the lowest versions."""
    needs: Sequence[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    kept = [need for need in needs if not (without_torch and need.startswith("torch>"))]
    return [need.replace(">=", "==") + ".*" if lowest else need for need in kept]


def versions_in(python: Path) -> list[str]:
    """``["Python 3.11.7", "torch 2.13.0", ...]``."""
    program = "import sys; from importlib.metadata import version\n"
    program += "print('Python', sys.version.split()[0], *(f'\\n{name} {version(name)}' for name in sys.argv[1:]))"
    done = subprocess.run([python, "-c", program, *SHOWN], check=True, capture_output=True, text=True)
    return [line.strip() for line in done.stdout.splitlines()]


def outcome_of(python: Path) -> str:
    """The last line of pytest: ``61 passed, 1 skipped``."""
    command = [python, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--timeout=300", *CORE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["nothing"]
    if done.returncode:
        print(done.stdout[-8000:], done.stderr[-2000:], file=sys.stderr)
    return re.sub(r" in [\d.]+s.*", "", lines[-1])


if __name__ == "__main__":
    sys.exit(main())
