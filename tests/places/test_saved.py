"""Notebooks that a program has executed and saved: what they hold, and what is left of it without a kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

CELLS = (
    "%load_ext nbddp\nimport nbddp\n%ddp -n 2 --device cpu",
    "%%ddp\nfor step in range(50):\n    nbddp.log(loss=1 / (step + 1))",
    "def train():\n    nbddp.log(acc=0.5)\nrun = nbddp.run(train, nprocs=2, device='cpu', show=True)",
    "run.show()",
    "run = nbddp.run(train, nprocs=2, device='cpu', show='picture', wait=False)\nrun.wait();",
)
IMAGE, PICTURE = "data:image/svg+xml;base64,", 'class="nbddp-picture'


def a_notebook() -> nbformat.NotebookNode:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return made


def displays(notebook: nbformat.NotebookNode) -> list[list[Any]]:
    """What each cell displays beside lines of text."""
    return [[out.data for out in cell.outputs if out.output_type == "display_data"] for cell in notebook.cells]


def check(notebook: nbformat.NotebookNode) -> None:
    """Valid, with a picture per run, and without what GitHub calls an invalid notebook: a widget's state."""
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    shown = displays(notebook)
    assert [len(data) for data in shown] == [0, 1, 1, 1, 1]
    for data in (each for cell in shown for each in cell):
        assert set(data) == {"text/html", "text/plain"}
        assert IMAGE in data["text/html"]
        assert "Finished" in data["text/html"]
        assert len(data["text/html"]) <= 200_000
    assert "finished after" in "".join(out.text for out in notebook.cells[1].outputs if "text" in out) + str(shown[1])


def test_an_executed_notebook_holds_pictures_and_no_widget(tmp_path: Path) -> None:
    notebook = a_notebook()
    NotebookClient(notebook, timeout=120).execute()
    check(notebook)
    html, _ = HTMLExporter().from_notebook_node(notebook)
    assert html.count(PICTURE) == 4


def test_papermills_output_holds_the_pictures(tmp_path: Path) -> None:
    papermill = pytest.importorskip("papermill")
    nbformat.write(a_notebook(), tmp_path / "in.ipynb")
    papermill.execute_notebook(str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb"), progress_bar=False)
    check(nbformat.read(tmp_path / "out.ipynb", as_version=4))


KAGGLE = next((path for path in os.environ.get("NBDDP_TEST_PLACES", "").split(":") if "/kaggle/" in path), "")


needs_kaggle = pytest.mark.skipif(not KAGGLE, reason="needs NBDDP_TEST_PLACES, see tests/places/make.py")


def convert_on_kaggle(arguments: list[str], folder: Path) -> None:
    """Call nbconvert 6.4.5 in this folder, as Kaggle does."""
    environ = {**os.environ, "KAGGLE_KERNEL_RUN_TYPE": "Batch"}
    command = [KAGGLE, "-m", "nbconvert", "--log-level", "ERROR", *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


@needs_kaggle
def test_save_and_run_all_on_kaggle_saves_the_pictures(tmp_path: Path) -> None:
    """nbconvert 6.4.5 executes the notebook, and writes it once as a notebook and once as a page."""
    nbformat.write(a_notebook(), tmp_path / "in.ipynb")
    for arguments in (
        ["--to", "notebook", "--execute", "--output", "out.ipynb", "in.ipynb"],
        ["--to", "html", "out.ipynb"],
    ):
        convert_on_kaggle(arguments, tmp_path)
    check(nbformat.read(tmp_path / "out.ipynb", as_version=4))
    assert (tmp_path / "out.html").read_text().count(PICTURE) == 4
    assert not re.search("vnd.jupyter.widget", (tmp_path / "out.ipynb").read_text())


@needs_kaggle
def test_the_notebook_for_kaggle_runs_there_and_learns(tmp_path: Path) -> None:
    source = Path(__file__).parent.parent.parent / "notebooks" / "kaggle_two_gpus.ipynb"
    shutil.copy(source, tmp_path / "in.ipynb")
    convert_on_kaggle(["--to", "notebook", "--execute", "--output", "out.ipynb", "in.ipynb"], tmp_path)
    notebook = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    accuracies = [float(out.data["text/plain"]) for out in outputs if out.output_type == "execute_result"]
    assert len(accuracies) == 2
    assert min(accuracies) > 0.85
    assert sum(IMAGE in out.data["text/html"] for out in outputs if out.output_type == "display_data") == 1
