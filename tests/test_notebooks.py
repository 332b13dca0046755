"""The notebooks: what they claim is true, in a kernel of its own, from an empty start, on two CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
MAX_KB = 400


def executed(name: str, probe: str, folder: Path) -> Any:
    """Run a copy of the notebook in ``folder``, and then ``probe``: a dict for JSON, of its variables."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({probe}))", id="probe"))
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    # In a process of its own: nbclient leaves an event loop open.
    done = subprocess.run([sys.executable, FOLDER / "execute.py", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(nbformat.read(path, as_version=4).cells[-1].outputs[-1]["text"])


def test_the_quickstart_does_not_learn_or_its_ranks_drift_apart(in_folder: Path) -> None:
    found = executed(
        "quickstart",
        """{
            "accuracy": test_accuracy,
            "prints": [[v["rank"], v["before"], v["after"]] for v in run.values],
            "returned": fingerprint(model),
            "steps": len(run.history["loss"].steps),
            "pictured": int(confusion.sum()),
        }""",
        in_folder,
    )
    assert found["accuracy"] > 0.95
    (rank_0, before_0, after_0), (rank_1, before_1, after_1) = found["prints"]
    assert (rank_0, rank_1) == (0, 1)
    assert before_0 == before_1 != after_0 == after_1 == found["returned"]
    assert found["steps"] == 10 * -(-4000 // 2 // 32)  # every rank saw half of the images, in every epoch
    assert found["pictured"] == 1000


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_its_outputs_or_with_an_error_or_too_large(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]
    assert any(o.output_type == "display_data" or "text" in o for cell in code for o in cell.outputs)
    assert path.stat().st_size < MAX_KB * 1000
