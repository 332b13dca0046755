"""Run notebooks in place, keep outputs: ``python execute.py [NAME or PATH ...]``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
CELL_TIMEOUT_S = 600
NEEDS_RAY = "several_machines"  # runs only when it's named


def execute(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, resources=where, record_timing=False
    )
    client.execute()
    nbformat.write(notebook, path)


if __name__ == "__main__":
    everything = sorted({path.stem for path in HERE.glob("*.ipynb")} - {NEEDS_RAY})
    for name in sys.argv[1:] or everything:
        path = Path(name) if name.endswith(".ipynb") else HERE / f"{name}.ipynb"
        began = time.monotonic()
        execute(path)
        size, took = path.stat().st_size / 1000, time.monotonic() - began
        print(f"{path.name}: {took:.0f} s, {size:.0f} kB")
