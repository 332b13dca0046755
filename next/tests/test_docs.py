"""Every code block of README and docs runs as it is written, and tables of options have all of them."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import nbddp
from nbddp.kernel.settings import Options
from nbddp.loggers import autolog, log_to
from nbddp.magic import magic
from tests.support import Notebook
from tests.test_house import ROOMS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
IN_THE_GATE = {"README.md", "getting_started.md"}
BLOCK = re.compile(r"(?:<!-- not run: (.+?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CELL_TIMEOUT_S = 120.0


class Block(NamedTuple):
    reason: str  # why it cannot run here; "" if it can
    language: str
    source: str


def blocks(page: Path) -> list[Block]:
    return [Block(reason or "", language, source) for reason, language, source in BLOCK.findall(page.read_text())]


def table(page: str, heading: str) -> list[str]:
    """The first column of the first table below this heading."""
    below = (DOCS / page).read_text().partition(f"# {heading}\n")[2]
    rows = re.search(r"^\|.*?\n\| ---.*?\n((?:\|.*\n)+)", below, re.MULTILINE)
    assert rows is not None, heading
    return [row.split("|")[1].strip() for row in rows[1].splitlines()]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.name in IN_THE_GATE else pytest.mark.long, id=page.name)
        for page in PAGES
        if any(block.language in ("python", "bash") and not block.reason for block in blocks(page))
    ],
)
def test_every_block_of_the_page_runs(page: Path, in_folder: Path) -> None:
    """Python blocks as a new notebook's cells, and bash blocks in a shell."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "TMPDIR": str(in_folder)}  # torchrun leaves a folder there
    with Notebook(cwd=in_folder) as notebook:
        for block in blocks(page):
            if block.language == "python" and not block.reason:
                notebook.ok(block.source, CELL_TIMEOUT_S)
            elif block.language == "bash" and not block.reason:
                subprocess.run(["bash", "-ec", block.source], check=True, env=environ, timeout=CELL_TIMEOUT_S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_python_bash_or_text(page: Path) -> None:
    text = page.read_text()
    assert len(blocks(page)) * 2 == len(re.findall(r"^```", text, re.MULTILINE))
    assert {block.language for block in blocks(page)} <= {"python", "bash", "text"}


def test_the_reference_has_every_public_name() -> None:
    names = re.findall(r"^::: nbddp\.(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(names) == sorted({*nbddp.__all__, "print", "breakpoint"})


def test_the_readme_can_be_skimmed() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100
    prose = re.sub(r"^```.*?^```$|^\|.*?$|^!\[.*?$|\]\([^)]*\)", "", "\n".join(lines), flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|^- ", prose, flags=re.MULTILINE):
        assert len(paragraph.split()) <= 60, paragraph
        for sentence in re.split(r"[.:?!]\s", paragraph):
            assert len(sentence.split()) <= 30, sentence


def test_the_readme_and_getting_started_have_one_first_cell() -> None:
    first = next(block for block in blocks(ROOT / "README.md") if block.language == "python")
    assert first == blocks(DOCS / "getting_started.md")[0]


def test_the_readmes_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists() or (ROOT.parent / target).exists(), target


def test_the_tables_have_all_options() -> None:
    names = {field.name for field in dataclasses.fields(Options)} | {"nnodes"}  # which comes with Ray
    assert {row.strip("`") for row in table("guides/run.md", "Options")} == names
    spellings = {max(action.option_strings, key=len) for action in magic._CELL._actions} | {"--nnodes"}
    assert {*re.findall(r"--[\w-]+", "\n".join(table("guides/cells.md", "Options")))} == spellings
    assert {*re.findall(r"`%ddp (\w+)", "\n".join(table("guides/cells.md", "`%ddp`")))} == {*magic._COMMANDS}


def test_the_tables_have_all_that_takes_or_makes_metrics() -> None:
    takers = ", ".join(table("guides/data_and_metrics.md", "Metrics in your experiment tracker"))
    assert takers.replace("`", "") == log_to._KINDS.replace(", or ", ", ")
    makers = " ".join(table("guides/data_and_metrics.md", "Curves of code that logs elsewhere")).lower()
    packages = {name.partition(".")[0].partition("_")[0].removeprefix("pytorch_") for name in autolog._METHODS}
    packages = packages - {"torch", "pytorch"} | {"tensorboard"}
    assert {name for name in packages if name.lower() not in makers.replace("w&b", "wandb")} == set()


def test_how_it_works_draws_the_rooms_in_the_order_of_their_imports() -> None:
    drawing = next(block.source for block in blocks(DOCS / "how_it_works.md") if "payload" in block.source)
    assert re.findall(r"^ *(\w+) {2,}", drawing, re.MULTILINE) == [room for room in ROOMS if room]
