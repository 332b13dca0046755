"""Stop and the debugger in Notebook 7 and a real browser."""

from __future__ import annotations

import pytest
from lab import IN_A_BROWSER
from notebook_page import NotebookPage, debugger_works, stop_works

pytestmark = IN_A_BROWSER


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
