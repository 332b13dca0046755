"""Two copies of nbddp, a checkout and an installed one: the ranks use the notebook's, or the run names both."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import nbddp
from nbddp import versions
from tests.support import script

PACKAGE = Path(nbddp.__file__).parent

RUN = """
    import sys
    notebooks, other, method = sys.argv[1:]
    sys.path.insert(0, notebooks)
    import nbddp
    assert nbddp.__file__.startswith(notebooks), nbddp.__file__
    if other:
        sys.path[0] = other  # what a rank would find now
    def train():
        import nbddp.worker.entry
        print("the function began", flush=True)
        return nbddp.__file__, nbddp.worker.entry.__file__
    try:
        found = nbddp.run(train, nprocs=2, device="cpu", show=False, start_method=method).values
        print(sorted({file for files in found for file in files}))
    except nbddp.LaunchError as error:
        print(error)
        print(repr(nbddp.last_run().logs()))
"""


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of two copies, beside the one that is installed here."""
    folders = (tmp_path / "mine", tmp_path / "other")
    for folder in folders:
        shutil.copytree(PACKAGE, folder / "nbddp", ignore=shutil.ignore_patterns("__pycache__", "js"))
    return folders


def _run(two: tuple[Path, Path], method: str, *, moved: bool) -> CompletedProcess[str]:
    mine, other = map(str, two)
    done = script(RUN, mine, other if moved else "", method)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize(("method", "moved"), [("forkserver", False), ("forkserver", True), ("spawn", False)])
def test_ranks_import_the_notebooks_copy(two: tuple[Path, Path], method: str, moved: bool) -> None:
    """``moved``: sys.path now finds another; until Python 3.13 the fork server's own finds the installed one anyway."""
    mine = two[0] / "nbddp"
    expected = [str(mine / "__init__.py"), str(mine / "worker" / "entry.py")]
    assert _run(two, method, moved=moved).stdout == f"{expected}\n"


@pytest.mark.slow
@pytest.mark.parametrize("version_0_1", [False, True])
def test_a_rank_with_another_copy_is_refused_with_both_paths(two: tuple[Path, Path], version_0_1: bool) -> None:
    mine, other = two
    if version_0_1:  # which neither looks nor says
        changes = {
            "entry.py": ("wire.Ready(versions.package_folder())", "wire.Ready()"),
            "setup.py": ("if job.copy and", "if 0 and"),
        }
        for name, (present, before) in changes.items():
            file = other / "nbddp" / "worker" / name
            source = file.read_text()
            assert source.count(present) == 1
            file.write_text(source.replace(present, before))
    text, logs = _run(two, "spawn", moved=True).stdout.splitlines()
    assert f"the notebook has imported nbddp from {mine}, and this rank from " in text
    assert (str(other) in text) is not version_0_1
    assert ("an older copy" in text) is version_0_1
    assert f"put {mine} first on PYTHONPATH" in text
    if not version_0_1:
        assert logs == "''"  # the function never began


def test_the_copy_is_imported_whatever_is_on_the_path(two: tuple[Path, Path]) -> None:
    """By any Python: a new interpreter imports from that folder, and finds everything else as before."""
    source = versions.import_source().replace(repr(versions.package_folder()), repr(str(two[0])))
    program = f"import sys; path = sys.path[:]; exec({source!r}); import nbddp; print(nbddp.__file__, path == sys.path)"
    assert script(program).stdout == f"{two[0] / 'nbddp' / '__init__.py'} True\n"
    gone = versions.import_source().replace(repr(versions.package_folder()), repr("/no/such/folder"))
    assert script(f"exec({gone!r}); import nbddp; print(nbddp.__file__)").stdout == f"{PACKAGE / '__init__.py'}\n"
    assert sys.modules["nbddp"] is nbddp
