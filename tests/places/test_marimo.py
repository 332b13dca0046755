"""A marimo notebook, run by ``marimo export``, which has the kernel of its pages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import nbformat
import pytest

PYTHON = next((path for path in os.environ.get("NBDDP_TEST_PLACES", "").split(":") if "/marimo/" in path), "")
NOTEBOOK = """
import marimo

app = marimo.App()


@app.cell
def _():
    import nbddp
    return (nbddp,)


@app.cell
def _(nbddp):
    scale = 3

    def helper(x):
        return x * scale

    def train(n):
        for i in nbddp.progress(range(n)):
            nbddp.log(loss=1 / (i + 1))
        return helper(nbddp.rank() + 1)
    return (train,)


@app.cell
def _(nbddp, train):
    print("values", nbddp.run(train, (5,), nprocs=2, device="cpu").values)
    return


@app.cell
def _(nbddp):
    try:
        nbddp.run(lambda: 1 / nbddp.rank(), nprocs=2, device="cpu", show="text")
    except nbddp.RankError as error:
        print(type(error.cause).__name__)
    return


if __name__ == "__main__":
    app.run()
"""


@pytest.mark.skipif(not PYTHON, reason="needs NBDDP_TEST_PLACES, see tests/places/make.py")
def test_functions_of_cells_run_errors_arrive_and_the_output_is_a_picture(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NOTEBOOK)
    command = [PYTHON, "-m", "marimo", "export", "ipynb", "--include-outputs", "train.py", "-o", "out.ipynb"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    notebook = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    trained, failed = (cell.outputs for cell in notebook.cells[-2:])
    assert "values [3, 6]" in "".join(out.text for out in trained if out.output_type == "stream")
    pictures = [out.data["text/html"] for out in trained if out.output_type == "display_data"]
    assert len(pictures) == 1
    assert "Finished" in pictures[0]
    assert "data:image/svg+xml;base64," in pictures[0]
    printed = "".join(out.text for out in failed if out.output_type == "stream")
    assert "failed after" in printed
    assert "ZeroDivisionError" in printed
