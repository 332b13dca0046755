"""The wheel and the sdist are complete, and their metadata agree with the README."""

from __future__ import annotations

import email
import email.message
import json
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support import script

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def _build(folder: Path, out: Path, *targets: str) -> None:
    for package in ("hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out), *targets]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both; built from a copy, which has no repository around it."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(".*", "node_modules", "__pycache__"))
    _build(folder / "source", folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(built.glob("*.whl")))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def _tracked(*suffixes: str) -> set[str]:
    """The package's source files."""
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "nbddp").rglob("*") if path.suffix in suffixes}
    return {name for name in found if "/js/" not in name and "__pycache__" not in name}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == _tracked(".py", ".typed", ".css", ".js", ".txt")
    assert "nbddp/py.typed" in files
    assert "nbddp/panel/static/panel.js" in files


def test_both_licences_are_in_the_metadata(wheel: zipfile.ZipFile, metadata: email.message.Message) -> None:
    assert metadata["License-Expression"] == "BSD-3-Clause AND MIT"
    assert set(metadata.get_all("License-File", [])) == {"LICENSE", "nbddp/panel/static/LICENSE-uplot.txt"}
    licences = {
        name.partition(".dist-info/licenses/")[2] for name in wheel.namelist() if ".dist-info/licenses/" in name
    }
    assert licences == {"LICENSE", "nbddp/panel/static/LICENSE-uplot.txt"}
    assert "MIT License" in (ROOT / "nbddp" / "panel" / "static" / "LICENSE-uplot.txt").read_text()


def test_the_sdist_holds_what_its_tests_and_contributors_need(built: Path, wheel: zipfile.ZipFile) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        top, *_ = {name.partition("/")[0] for name in sdist.getnames()}
        names = {name.partition("/")[2] for name in sdist.getnames()}
        for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY"):
            assert f"{name}.md" in names
        assert {
            "LICENSE",
            "constraints.txt",
            "pyproject.toml",
            "tests/conftest.py",
            "notebooks/nbddp-panel.png",
        } <= names
        assert not [name for name in names if "node_modules" in name or ".venv" in name]
        sdist.extractall(built / "unpacked")
    again = built / "again"
    _build(built / "unpacked" / top, again, "-t", "wheel")
    assert zipfile.ZipFile(next(again.glob("*.whl"))).namelist() == wheel.namelist()


def test_metadata_and_readme_agree_on_versions(metadata: email.message.Message) -> None:
    told = re.search(r"Python (3\.\d+) to 3\.(\d+), torch ([\d.]+) or newer", " ".join(README.split()))
    assert told is not None
    lowest, highest, torch_floor = told[1], int(told[2]), told[3]
    assert metadata["Requires-Python"] == f">={lowest}"
    assert f"torch>={torch_floor}" in metadata.get_all("Requires-Dist", [])
    python = "Programming Language :: Python :: "
    versions = [c.removeprefix(python) for c in metadata.get_all("Classifier", []) if c.startswith(python + "3.")]
    assert versions == [f"3.{minor}" for minor in range(int(lowest[2:]), highest + 1)]
    systems = {c for c in metadata.get_all("Classifier", []) if c.startswith("Operating System")}
    assert systems == {"Operating System :: MacOS", "Operating System :: POSIX :: Linux"}


def test_the_readmes_first_command_installs_the_lab_that_it_opens(metadata: email.message.Message) -> None:
    required = {line for line in metadata.get_all("Requires-Dist", []) if line.startswith("jupyterlab")}
    assert required == {f"jupyterlab>=4.2; extra == '{extra}'" for extra in ("lab", "test", "dev", "bench")}
    first = next(line for line in README.splitlines() if "-m venv" in line)
    assert "jupyter lab" in first
    assert re.findall(r"'\.\[(.*)\]'", first) == ["lab,examples"]


def test_the_wheel_is_smaller_than_one_megabyte(built: Path) -> None:
    assert next(built.glob("*.whl")).stat().st_size <= 1_000_000


@pytest.mark.parametrize("place", ["colab", "kaggle"])
def test_installing_changes_nothing_that_is_pinned(place: str, built: Path, tmp_path: Path) -> None:
    """pip replaces a package that they pin only if a requirement of nbddp asks for another version."""
    python = _python_with(_pins(place), tmp_path / "venv")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--dry-run", "--no-index"]
    wheel, report = next(built.glob("*.whl")), tmp_path / "report.json"
    done = subprocess.run([*command, "--report", str(report), str(wheel)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [each["metadata"]["name"] for each in json.loads(report.read_text())["install"]] == ["nbddp"]


def _pins(place: str) -> list[tuple[str, str]]:
    lines = (ROOT / "tests" / "places" / f"{place}.txt").read_text().splitlines()
    return [(name, version) for name, _, version in (line.partition("==") for line in lines if line[0] != "#")]


def _python_with(pins: list[tuple[str, str]], folder: Path) -> Path:
    """An interpreter where pip finds these packages installed; it looks at no more than their names and versions."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name, version in pins:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    assert len(pins) > 600
    return folder / "bin" / "python"


def test_the_package_index_page_has_no_dead_links(metadata: email.message.Message) -> None:
    """Relative links and pictures lead nowhere there."""
    payload = metadata.get_payload(decode=True)
    assert isinstance(payload, bytes)
    page = payload.decode()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert re.findall(r"\]\((?!https?://)[^)]*\)", README)  # in the repository they lead somewhere
    assert re.findall(r"\]\((?!https?://)[^)]*\)", page) == []
    assert "![" not in page
    for words in ("# nbddp", "A first cell", "Contributing · Changelog · BSD-3-Clause"):
        assert words in page


def test_importing_on_windows_raises_one_sentence_that_names_wsl2() -> None:
    done = script(
        """
        import sys
        sys.platform = "win32"
        for missing in ("fcntl", "resource", "termios", "pwd", "grp"):
            sys.modules[missing] = None  # importing it raises ImportError
        import nbddp
        """
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "ImportError: nbddp runs on Linux and macOS. On Windows, use it in WSL2 (Windows Subsystem for Linux)"
    )
