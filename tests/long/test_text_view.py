"""A run as lines of text in a script, and a notebook that a program executes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import script
from tests.test_text_view import PICTURE, TRAIN


def test_a_script_says_how_a_run_ended_and_of_one_in_the_background_when_it_is_waited_for() -> None:
    """And no widget is loaded."""
    done = script(
        f"""
{TRAIN}
if __name__ == "__main__":
    nbddp.run(print, ("only printed",), nprocs=1, device="cpu")
    nbddp.run(train, nprocs=2, device="cpu")
    run = nbddp.run(train, nprocs=2, device="cpu", wait=False, name="second")
    while not run.done(): pass
    print("over")
    run.wait()
    run.wait()
    run.show()
    import sys, nbddp.panel.live, nbddp.panel.plotted
    print([m for m in ("anywidget", "ipywidgets", "matplotlib") if m in sys.modules])
"""
    )
    assert done.returncode == 0, done.stderr
    first, second = (f"{name}: finished after # · 2 ranks · gloo · loss 0.0500" for name in ("train", "second"))
    lines = re.sub(r" after .*? ·", " after # ·", done.stdout).splitlines()
    assert lines == ["only printed", "done", first, "over", second, second, "[]"]


def executed(*cells: str) -> list[Any]:
    """The outputs of each cell, as ``jupyter nbconvert --execute`` leaves them in the current folder."""
    new = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    code = [{**new, "id": f"c{number}", "source": source} for number, source in enumerate((TRAIN, *cells))]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    Path("test.ipynb").write_text(json.dumps({"cells": code, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}))
    command = ["jupyter", "nbconvert", "--to", "notebook", "--execute", "--inplace", "test.ipynb"]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
    after = json.loads(Path("test.ipynb").read_text())
    assert "widgets" not in after["metadata"]
    return [cell["outputs"] for cell in after["cells"]][1:]


def shown(outputs: list[Any]) -> list[Any]:
    """Text as it is, and of what's displayed the types."""
    return ["".join(out["text"]) if "text" in out else (out["output_type"], {*out["data"]}) for out in outputs]


def test_nbconvert_keeps_the_picture_of_a_run_once(in_folder: Path) -> None:
    call = "nbddp.run(train, nprocs=2, device='cpu'{})"
    at_once, background, waited, silent = executed(
        call.format(""), f"run = {call.format(', wait=False')}", "run.wait()", call.format(", show=False")
    )
    assert shown(at_once)[:2] == ["done\n", ("display_data", PICTURE)]
    text, html = ("".join(at_once[1]["data"][kind]) for kind in ("text/plain", "text/html"))
    assert text.startswith("train: finished after")
    assert "data:image/svg+xml" in html
    assert "Finished" in html
    assert not at_once[2:], "the run's value has no second picture"
    assert not background
    assert shown(waited) == [("display_data", PICTURE)]
    assert shown(silent) == [("execute_result", PICTURE)], "a run that isn't shown shows itself at the cell's end"
