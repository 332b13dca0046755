"""Makes environments with the packages of Colab and Kaggle, and with marimo: ``python -m tests.places.make FOLDER``.

Prints the path of each interpreter. torch and all other packages come from the environment that runs this.
"""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from pathlib import Path

_HERE = Path(__file__).parent
_KERNEL = (
    *("ipython", "ipykernel", "ipywidgets", "traitlets", "jupyter_client", "anywidget", "psygnal", "psutil", "tblib"),
    *("backcall", "decorator", "entrypoints", "ipython-genutils", "nest-asyncio", "pickleshare", "pyzmq", "tornado"),
)
_ALSO = {"colab": (), "kaggle": ("jupyter_server", "nbconvert", "nbclient>=0.5,<0.6", "mistune<2", "testpath")}


def make(place: str, folder: Path) -> Path:
    """Make one environment, and return its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True, clear=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    if place == "marimo":
        packages = ("marimo==0.25.2",)
    else:
        packages = ("--no-deps", *_KERNEL, *_ALSO[place], "-c", str(_HERE / f"{place}.txt"))
    subprocess.run([*pip, *packages], check=True)
    own = next(folder.glob("lib/python*/site-packages"))
    others = [str(_HERE.parent.parent), *site.getsitepackages()]
    (own / "others.pth").write_text("\n".join(others) + "\n")  # .pth: behind its own packages on sys.path
    return python


if __name__ == "__main__":
    for place in (*_ALSO, "marimo"):
        print(make(place, Path(sys.argv[1]).resolve() / place))
