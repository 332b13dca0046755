"""Every code block of README and docs runs as it is written, and the reference has every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import nbddp
from tests.support import Notebook, wait_until_alone

ROOT = Path(__file__).parents[1]
HOSTS = "guides/several_hosts.md"  # runs in tests/hosts, where there are hosts
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:<!-- not run: (.+?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CELL_TIMEOUT_S = 120.0
# Takes back what the page before has done: its runs, its magics, the modules of its folder. Variables go with %reset.
AS_NEW = """
import os, sys, nbddp
for run in nbddp.runs():
    run.stop(0)
for name, module in list(sys.modules.items()):
    if (getattr(module, "__file__", None) or "").startswith(os.getcwd() + os.sep):
        del sys.modules[name]
for magics in get_ipython().magics_manager.magics.values():
    magics.pop("ddp", None)
get_ipython().extension_manager.loaded.discard("nbddp")
os.chdir({folder!r})
"""


class Block(NamedTuple):
    """A fenced block of a page; ``reason``: why it cannot run here, "" if it can."""

    reason: str
    language: str
    source: str


def blocks(page: Path) -> list[Block]:
    return [Block(reason or "", language, source) for reason, language, source in BLOCK.findall(page.read_text())]


def execute(page: Path, notebook: Notebook) -> None:
    """Run the page's Python blocks as cells, and its bash blocks in a shell, in the current folder."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "TMPDIR": os.getcwd()}  # torchrun leaves a folder there
    for block in blocks(page):
        if block.reason:
            continue
        if block.language == "python":
            notebook.ok(block.source, CELL_TIMEOUT_S)
        elif block.language == "bash":
            subprocess.run(["bash", "-ec", block.source], check=True, env=environ, timeout=CELL_TIMEOUT_S)


def _runnable(page: Path) -> bool:
    return any(block.language in ("python", "bash") and not block.reason for block in blocks(page))


@pytest.fixture(scope="module")
def _kernel(_warm: None) -> Iterator[Notebook]:
    with Notebook(cwd="/") as notebook:
        yield notebook


@pytest.fixture
def new_notebook(_kernel: Notebook, in_folder: Path) -> Iterator[Notebook]:
    """A notebook without variables, magics and modules of ours, in an empty folder; all pages share its kernel."""
    _kernel.ok(AS_NEW.format(folder=str(in_folder)))
    _kernel.ok("%reset -f")
    yield _kernel
    _kernel.ok(AS_NEW.format(folder="/"))
    wait_until_alone(_kernel.pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if _runnable(page) and not page.match(HOSTS)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_block_of_the_page_runs(page: Path, new_notebook: Notebook) -> None:
    execute(page, new_notebook)


@pytest.mark.slow
def test_a_page_that_leaves_out_a_block_fails(new_notebook: Notebook) -> None:
    """Nothing of the pages before helps it."""
    assert new_notebook.cell("nbddp.runs()").ename == "NameError"
    assert new_notebook.cell("torch").ename == "NameError"
    assert "`%%ddp` not found" in new_notebook.cell("%%ddp\nworld_size").shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_python_bash_or_text(page: Path) -> None:
    text = page.read_text()
    assert len(blocks(page)) * 2 == len(re.findall(r"^```", text, re.MULTILINE))
    assert {block.language for block in blocks(page)} <= {"python", "bash", "text"}


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    assert sorted(re.findall(r"^::: nbddp\.(\w+)$", pages, re.MULTILINE)) == nbddp.__all__


def test_the_readme_can_be_skimmed() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    prose = re.sub(r"^```.*?^```$|^\|.*?$|^!\[.*?$|\]\([^)]*\)", "", "\n".join(lines), flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|^- ", prose, flags=re.MULTILINE):
        assert len(paragraph.split()) <= 60, paragraph
        for sentence in re.split(r"[.:?!]\s", paragraph):
            assert len(sentence.split()) <= 30, sentence
