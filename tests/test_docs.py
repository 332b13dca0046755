"""Every code block of README and docs runs as it is written, and tables of options have all of them."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import nbddp
from nbddp.kernel.settings import Options
from nbddp.loggers import autolog, log_to
from nbddp.magic import magic
from tests.support import Notebook
from tests.test_house import ROOMS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
IN_THE_GATE = [ROOT / "README.md", DOCS / "getting_started.md"]
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


def test_every_block_of_the_first_pages_runs(in_folder: Path) -> None:
    run_blocks(in_folder, *IN_THE_GATE)


def run_blocks(folder: Path, *pages: Path) -> None:
    """Python blocks as a new notebook's cells, and bash blocks in a shell; what pages share runs once."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "TMPDIR": str(folder)}  # torchrun leaves a folder there
    with Notebook(cwd=folder) as notebook:
        for block in dict.fromkeys(block for page in pages for block in blocks(page)):
            if block.language == "python" and not block.reason:
                notebook.ok(block.source, CELL_TIMEOUT_S)
            elif block.language == "bash" and not block.reason:
                subprocess.run(["bash", "-ec", block.source], check=True, env=environ, timeout=CELL_TIMEOUT_S)


def test_every_block_is_python_bash_or_text() -> None:
    for page in PAGES:
        assert len(blocks(page)) * 2 == len(re.findall(r"^```", page.read_text(), re.MULTILINE)), page
        assert {block.language for block in blocks(page)} <= {"python", "bash", "text"}, page


def test_the_readme_can_be_skimmed() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100
    prose = re.sub(r"^```.*?^```$|^\|.*?$|^!\[.*?$|\]\([^)]*\)", "", "\n".join(lines), flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|^- ", prose, flags=re.MULTILINE):
        assert len(paragraph.split()) <= 60, paragraph
        for sentence in re.split(r"[.:?!]\s", paragraph):
            assert len(sentence.split()) <= 30, sentence


def test_the_readmes_links_lead_somewhere_and_its_first_cell_is_getting_starteds() -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
    first = next(block for block in blocks(ROOT / "README.md") if block.language == "python")
    assert first == blocks(DOCS / "getting_started.md")[0]


def test_the_reference_and_the_tables_have_all_names_and_options_and_all_that_takes_or_makes_metrics() -> None:
    text = (DOCS / "reference.md").read_text()
    assert sorted([*re.findall(r"^::: nbddp\.(\w+)$", text, re.MULTILINE), "__version__"]) == dir(nbddp)
    members = {*re.findall(r"\w+", re.findall(r" members: \[(.*)\]", text)[0])}
    assert members == {name for name in {*dir(nbddp.History)} - {*dir(Mapping)} if not name.startswith("_")}
    names = {field.name for field in dataclasses.fields(Options)} | {"nnodes"}  # which comes with Ray
    assert {row.strip("`") for row in table("guides/run.md", "Options")} == names
    spellings = {max(action.option_strings, key=len) for action in magic._CELL._actions} | {"--nnodes"}
    assert {*re.findall(r"--[\w-]+", "\n".join(table("guides/cells.md", "Options")))} == spellings
    assert {*re.findall(r"`%ddp (\w+)", "\n".join(table("guides/cells.md", "`%ddp`")))} == {*magic._COMMANDS}
    takers = ", ".join(table("guides/data_and_metrics.md", "Metrics in your experiment tracker"))
    assert takers.replace("`", "") == log_to._KINDS.replace(", or ", ", ")
    makers = " ".join(table("guides/data_and_metrics.md", "Curves of code that logs elsewhere")).lower()
    packages = {name.partition(".")[0].partition("_")[0].removeprefix("pytorch_") for name in autolog._METHODS}
    packages = packages - {"torch", "pytorch"} | {"tensorboard"}
    assert {name for name in packages if name.lower() not in makers.replace("w&b", "wandb")} == set()


def test_how_it_works_draws_the_rooms_in_the_order_of_their_imports() -> None:
    drawing = next(block.source for block in blocks(DOCS / "how_it_works.md") if "payload" in block.source)
    assert re.findall(r"^ *(\w+) {2,}", drawing, re.MULTILINE) == [room for room in ROOMS if room]
