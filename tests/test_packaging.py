"""The wheel and the sdist are complete, and their metadata agree with the README and with the package."""

import ast
import email.message
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import script

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
LICENSES = {"LICENSE", "nbddp/panel/page/LICENSE-uplot.txt"}
# What the package imports only if the user has it, or where it runs.
OPTIONAL = {"datasets", "marimo", "pandas", "ray"}
NEW_THERE = {"comm", "pure-eval", "stack-data"}  # Colab and Kaggle don't have them


def _build(folder: Path, out: Path, *targets: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out), *targets]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both; built from a copy, which has no repository around it."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(".*", "__pycache__", "dist"))
    _build(folder / "source", folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(built.glob("*.whl")))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    return email.message_from_bytes(wheel.read(f"{wheel.namelist()[-1].partition('/')[0]}/METADATA"))


@pytest.fixture
def needed(metadata: email.message.Message) -> list[Requirement]:
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


def test_the_wheel_holds_the_package_and_nothing_else_in_one_megabyte(built: Path, wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "nbddp").rglob("*") if path.is_file()}
    assert files == {name for name in package if "__pycache__" not in name}
    assert {"nbddp/py.typed", "nbddp/panel/page/panel.js", "nbddp/panel/page/uPlot.iife.min.js"} <= files
    assert next(built.glob("*.whl")).stat().st_size <= 1_000_000


def test_both_licences_are_in_the_metadata(wheel: zipfile.ZipFile, metadata: email.message.Message) -> None:
    assert metadata["License-Expression"] == "BSD-3-Clause AND MIT"
    assert {*metadata.get_all("License-File", [])} == LICENSES
    assert {name.partition("/licenses/")[2] for name in wheel.namelist()} == {"", *LICENSES}
    assert "MIT License" in (ROOT / "nbddp/panel/page/LICENSE-uplot.txt").read_text()


def test_the_sdist_holds_what_its_tests_and_contributors_need(built: Path, wheel: zipfile.ZipFile) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        sdist.extractall(built / "unpacked", filter="data")
    assert {*PAGES, "LICENSE", "constraints.txt", "pyproject.toml", "pytest.ini", "tests/conftest.py"} <= names
    (unpacked,) = (built / "unpacked").iterdir()
    _build(unpacked, built / "again", "-t", "wheel")
    assert zipfile.ZipFile(next((built / "again").glob("*.whl"))).namelist() == wheel.namelist()


def test_every_dependency_is_imported_and_every_import_is_a_dependency(needed: list[Requirement]) -> None:
    imported = set()
    for path in (ROOT / "nbddp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
    others = {canonicalize_name(name) for name in imported - sys.stdlib_module_names - OPTIONAL - {"nbddp"}}
    ours = {canonicalize_name(each.name) for each in needed if each.marker is None}
    assert others - {"pynvml"} == ours - {"nvidia-ml-py"}


def test_metadata_and_readme_agree_on_versions_and_on_what_is_installed(
    metadata: email.message.Message, needed: list[Requirement]
) -> None:
    text = (ROOT / "README.md").read_text()
    told = re.search(r"Python 3\.(\d+) to 3\.(\d+),?(?: and)? torch ([\d.]+) or newer", " ".join(text.split()))
    assert metadata["Requires-Python"] == f">=3.{told[1]}"
    assert f"torch>={told[3]}" in map(str, needed)
    classifiers = metadata.get_all("Classifier", [])
    versions = [c.rpartition(" :: ")[2] for c in classifiers if re.fullmatch(r".*Python :: 3\.\d+", c)]
    assert versions == [f"3.{minor}" for minor in range(int(told[1]), int(told[2]) + 1)]
    assert [c for c in classifiers if "Operating System" in c] == ["Operating System :: POSIX :: Linux"]
    assert re.findall(r"'\.\[(.*)\]' && .*jupyter lab ", text) == ["lab,examples"]
    assert "\nscripts/install && scripts/test\n" in text
    assert '-c constraints.txt -e ".[${1:-dev}]"' in (ROOT / "scripts/install").read_text()
    of_lab = {str(each.marker) for each in needed if each.name == "jupyterlab"}
    assert of_lab == {f'extra == "{extra}"' for extra in ("lab", "dev", "long")}


@pytest.mark.parametrize("place", ["colab", "kaggle"])
def test_installing_changes_nothing_that_is_pinned(place: str, needed: list[Requirement]) -> None:
    """pip replaces a package that they pin only if a requirement of nbddp asks for another version."""
    lines = (ROOT / "tests" / "places" / f"{place}.txt").read_text().splitlines()
    pins = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines if line[0] != "#"}
    ours = {canonicalize_name(each.name): each for each in needed if each.marker is None}
    assert ours.keys() - pins.keys() == NEW_THERE
    assert [str(each) for name, each in ours.items() if name in pins and pins[name] not in each.specifier] == []


def test_the_package_index_page_has_no_dead_links(built: Path, metadata: email.message.Message) -> None:
    """Relative links and pictures lead nowhere there."""
    page, readme = str(metadata.get_payload()), (built / "source" / "README.md").read_text()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert re.findall(r"\]\((?!https?://)[^)]*\)", readme)  # in the repository they lead somewhere
    assert re.findall(r"\]\((?!https?://)[^)]*\)", page) == []
    assert "![" not in page
    assert page.startswith("# nbddp\n")


def test_importing_on_windows_raises_one_sentence_that_names_wsl2() -> None:
    lacks = ["fcntl", "resource", "termios", "pwd", "grp"]
    done = script(f"import sys; sys.platform = 'win32'; sys.modules |= dict.fromkeys({lacks}); import nbddp")
    told = "ImportError: nbddp runs only on Linux. On Windows, use it in WSL2 (Windows Subsystem for Linux)"
    assert done.stderr.strip().splitlines()[-1] == told
