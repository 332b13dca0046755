"""A saved notebook without a kernel in JupyterLab and Notebook 7, and one in Voila, in a real browser."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from lab import IN_A_BROWSER, START_S, TOKEN, Lab
from nbclient import NotebookClient
from playwright.sync_api import Page, expect

# A folder made by `pip install --no-deps --target FOLDER voila websockets`; JupyterLab has all else that it needs.
VOILA = os.environ.get("NBDDP_TEST_VOILA", "")

pytestmark = IN_A_BROWSER

CELLS = (
    "%load_ext nbddp\n%ddp -n 2 --device cpu",
    "%%ddp\nfor step in range(50):\n    nbddp.log(loss=1 / (step + 1))",
)
PICTURE = "img[alt^='Chart of']"


@pytest.fixture(scope="module")
def notebook() -> nbformat.NotebookNode:
    """A notebook that a program has not executed yet."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return made


@pytest.fixture(scope="module")
def executed(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The same with its outputs, for a kernel that this machine does not have."""
    made = nbformat.from_dict(notebook)
    NotebookClient(made, timeout=120).execute()
    made.metadata.kernelspec = {"name": "gone", "display_name": "Gone", "language": "python"}
    return made


def check_the_picture(page: Page) -> None:
    picture = page.locator(PICTURE)
    expect(picture).to_have_count(1, timeout=60_000)
    page.wait_for_function("image => image.naturalWidth > 0", arg=picture.element_handle(), timeout=10_000)
    expect(page.get_by_text("Finished").first).to_be_visible()


@pytest.mark.parametrize("tree", ["lab/tree", "notebooks"])  # JupyterLab's server has the pages of Notebook 7, too
def test_the_picture_is_there_without_a_kernel(
    tree: str, executed: nbformat.NotebookNode, shared_lab: Lab, own_page: Page
) -> None:
    nbformat.write(executed, shared_lab.notebooks / "saved.ipynb")
    own_page.goto(f"{shared_lab.url}/{tree}/saved.ipynb?token={TOKEN}")
    own_page.locator(".jp-Dialog").get_by_text("No Kernel", exact=True).last.click(timeout=START_S * 1000)
    check_the_picture(own_page)
    assert shared_lab.api("api/kernels") == []


@contextlib.contextmanager
def voila(folder: Path) -> Iterator[str]:
    """The address of Voila for the notebooks in a folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [VOILA, os.environ.get("PYTHONPATH", "")]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JUPYTER_PATH": str(Path(VOILA, "share", "jupyter")),
    }
    command = [sys.executable, "-m", "voila", "--no-browser", "--Voila.ip=127.0.0.1", f"--port={port}", str(folder)]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, cwd=folder)
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
                break
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(START_S)


@pytest.mark.skipif(not VOILA, reason="needs NBDDP_TEST_VOILA, a folder with Voila")
def test_voila_shows_the_picture(notebook: nbformat.NotebookNode, own_page: Page, tmp_path: Path) -> None:
    """It executes the notebook for each page and shows the outputs, without the code."""
    nbformat.write(notebook, tmp_path / "train.ipynb")
    with voila(tmp_path) as address:
        own_page.goto(f"{address}/voila/render/train.ipynb", timeout=120_000)
        check_the_picture(own_page)
        assert "nbddp.log" not in own_page.content()
