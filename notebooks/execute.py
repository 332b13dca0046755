"""Run the notebooks in place and keep their outputs.

``python notebooks/execute.py [NAME or PATH ...]``
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbclient
import nbformat

HERE = Path(__file__).parent
CELL_TIMEOUT_S = 600
NEEDS_HOSTS = {"several_machines"}  # run when they are named


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with new outputs; a new kernel runs it in the notebook's folder."""
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
    ).execute()
    return notebook


def main(names: list[str]) -> None:
    names = names or sorted({path.stem for path in HERE.glob("*.ipynb")} - NEEDS_HOSTS)
    paths = [
        Path(name) if name.endswith(".ipynb") else HERE / f"{name}.ipynb"
        for name in names
    ]
    for path in paths:
        began = time.monotonic()
        notebook = execute(path)
        for cell in notebook.cells:
            cell.get("metadata", {}).pop("execution", None)
        nbformat.write(notebook, path)
        size, took = path.stat().st_size / 1000, time.monotonic() - began
        print(f"{path.name}: {took:.0f} s, {size:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
