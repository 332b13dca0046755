"""The quickstart's claims hold in a fresh kernel on two CPU ranks, and all notebooks are saved as they should be."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support import Notebook

FOLDER = Path(__file__).parent.parent / "notebooks"
MAX_KB = 400
MAX_COLUMNS = 88
CELL_TIMEOUT_S = 300.0
IMAGE = re.compile(r"!\[([^]]*)\]\(([^)]+)\)")


def executed(name: str, probe: str, folder: Path, **replaced: str) -> Any:
    """Run the notebook's cells in ``folder``, and then ``probe``: an expression for JSON, of its variables."""
    text = (FOLDER / f"{name}.ipynb").read_text()
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    with Notebook(cwd=folder) as notebook:
        for cell in nbformat.reads(text, as_version=4).cells:
            if cell.cell_type == "code":
                reply = notebook.cell(cell.source, CELL_TIMEOUT_S)
                assert (reply.status == "ok") != _fails(cell), f"{reply.shown}\n{reply.traceback}"
        return json.loads(notebook.ok(f"import json\nprint(json.dumps({probe}))").shown)


def test_the_quickstart_learns_and_its_ranks_hold_the_same_weights(in_folder: Path) -> None:
    found = executed(
        "quickstart",
        """{
            "accuracy": test_accuracy,
            "fingerprints": [[value["before"], value["after"]] for value in run.values],
            "returned": fingerprint(model),
            "steps": len(run.history["loss"].steps),
            "pictured": int(confusion.sum()),
            "by a cell": by_a_cell.value,
        }""",
        in_folder,
        **{"epochs=10": "epochs=2", "%%ddp -n 2": "%%ddp --as by_a_cell -n 2"},
    )
    (before_0, after_0), (before_1, after_1) = found["fingerprints"]
    assert before_0 == before_1 != after_0 == after_1 == found["returned"]
    assert found["accuracy"] > 0.9
    assert found["steps"] == 2 * -(-4000 // 2 // 32)  # every rank saw half of the images, in every epoch
    assert found["pictured"] == 1000
    assert found["by a cell"] == pytest.approx(found["accuracy"])  # the %%ddp cell, on both ranks


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_saved_with_its_outputs_small_and_fits_the_page(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    failed = [cell for cell in code if any(output.output_type == "error" for output in cell.outputs)]
    assert failed == [cell for cell in code if _fails(cell)]
    assert not [cell.source for cell in code if _shows(cell.source) and not cell.outputs]
    assert path.stat().st_size < MAX_KB * 1000
    assert [line for cell in code for line in cell.source.splitlines() if len(line) > MAX_COLUMNS] == []
    for cell in notebook.cells:
        for description, target in IMAGE.findall(cell.source) if cell.cell_type == "markdown" else []:
            assert (FOLDER / target).is_file()
            assert len(description) > 20


def _fails(cell: Any) -> bool:
    """Is it meant to?"""
    return "raises-exception" in cell.metadata.get("tags", [])


def _shows(source: str) -> bool:
    """Does this cell end with something to look at?"""
    return not source.startswith("%") and ("nbddp.run(" in source or isinstance(ast.parse(source).body[-1], ast.Expr))
