"""Stop and the debugger in Notebook 7 and a real browser."""

from __future__ import annotations

import os

import pytest

in_ci = os.environ.get("CI") == "true"
if not in_ci:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from lab import chromium
from notebook_page import NotebookPage, debugger_works, stop_works

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(chromium() is None and not in_ci, reason="there is no Chromium"),
]


@pytest.fixture(scope="module")
def app() -> str:
    pytest.importorskip("notebook", reason="Notebook 7 is not installed")
    return "notebook"


@pytest.mark.usefixtures("own_page")
def test_stop_works_in_notebook_7(notebook: NotebookPage) -> None:
    stop_works(notebook)


@pytest.mark.usefixtures("own_page")
def test_the_debuggers_prompt_is_under_the_cell_in_notebook_7(notebook: NotebookPage) -> None:
    debugger_works(notebook)
