"""Downloads what a machine with nothing but a torch image needs, as wheels for that machine's Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOTS = ("nbddp", "ipykernel", "nbclient", "pytest", "pytest-timeout", "hypothesis", "mlxtend")
# An image with torch has these, and they are large.
IN_THE_IMAGE = {"torch", "numpy", "scipy", "scikit-learn", "pandas", "matplotlib", "joblib"}
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)] + ["manylinux2014_x86_64"]
MOST_MIB = 64


def download(folder: Path, python: str) -> None:
    """Fill the folder with one wheel for each need, of the version that is installed here.

    Raises:
        RuntimeError: they are larger than ``MOST_MIB``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
    command += ["-d", str(folder), "--implementation", "cp", "--python-version", python, *platforms]
    subprocess.run([*command, *(f"{name}=={metadata.version(name)}" for name in needs(python))], check=True)
    nbytes = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {nbytes / 2**20:.1f} MiB in {folder}")
    if nbytes > MOST_MIB << 20:
        raise RuntimeError(f"the wheels are larger than {MOST_MIB} MiB")


def needs(python: str) -> list[str]:
    """All that the roots need there, directly or not, without themselves' extras and without nbddp itself."""
    found: dict[str, None] = {}
    left = list(ROOTS)
    while left:
        name = left.pop()
        if name not in found and name not in IN_THE_IMAGE:
            found[name] = None
            left += _direct(name, python)
    return sorted(found.keys() - {"nbddp"})


def _direct(name: str, python: str) -> Iterator[str]:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    there = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    there |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(there):
            yield canonicalize_name(requirement.name)


def install(folder: Path, site: Path) -> None:
    """Unpack the wheels into ``site``, without a network."""
    if not site.exists():
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site)]
        wheels = [str(path) for path in sorted(folder.glob("*.whl"))]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)
