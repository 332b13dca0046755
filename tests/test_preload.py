"""What ``nbddp.preload`` asks for is there in every rank from then on, and whatever goes wrong with it, runs run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbddp
from nbddp.kernel import forkserver
from tests.support import Cells, Notebook, run, script, start

IS_THERE = """
    def is_there(name):
        import sys
        return name in sys.modules
"""


@pytest.fixture(autouse=True)
def nothing_preloaded() -> Iterator[None]:
    yield
    forkserver._server.want([])
    forkserver.warm()


def test_every_rank_imports_anew(cell: Cells) -> None:
    names = cell(IS_THERE)
    assert run(names.is_there, "mailbox").values == [False, False]
    nbddp.preload("mailbox", "wsgiref.headers")
    first = forkserver.pid()
    assert run(names.is_there, "mailbox").values == [True, True]
    assert run(names.is_there, "wsgiref.headers").values == [True, True]
    nbddp.preload("mailbox")
    assert forkserver.pid() == first, "nothing new, and the server was replaced"
    assert "mailbox" not in sys.modules, "the kernel has no need of it"


def test_a_second_call_or_a_killed_server_forgets_the_first(cell: Cells) -> None:
    names = cell(IS_THERE)
    nbddp.preload("mailbox")
    nbddp.preload("shelve")
    assert run(names.is_there, "mailbox").values == [True, True]
    server = forkserver.pid()
    assert server is not None
    os.kill(server, signal.SIGKILL)
    assert run(names.is_there, "mailbox", timeout=60).values == [True, True]
    assert run(names.is_there, "shelve").values == [True, True]


def test_a_run_under_way_is_lost(cell: Cells, in_folder: Path) -> None:
    train = cell("""
        import nbddp, os, time
        def train():
            while not os.path.exists("go_on"): time.sleep(0.01)
            return nbddp.reduce(1.0, op="sum")
    """).train
    going = start(train)
    nbddp.preload("mailbox")
    assert run(cell(IS_THERE).is_there, "mailbox").values == [True, True]
    (in_folder / "go_on").touch()
    assert going.wait(30).values == [2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (7, "takes names of modules.*not 7"),
        ("", "takes names of modules"),
        ("two words", "takes names of modules"),
        ("no_such_package", "no module no_such_package"),
        ("no_such_package.inside", "no module no_such_package"),
        ("tests.support", "a file of yours"),
        ("conftest_of_mine", "a file of yours"),
    ],
)
def test_what_cannot_be_preloaded_is_heard_of_in_a_rank(
    name: object, why: str, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_folder / "conftest_of_mine.py").touch()
    monkeypatch.syspath_prepend(str(in_folder))
    server = forkserver.pid()
    with pytest.raises(nbddp.LaunchError, match=why):
        nbddp.preload("mailbox", name)  # type: ignore[arg-type]
    assert forkserver.pid() == server


UNFIT = {
    "starts_a_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=[1000], daemon=True).start()",
    "initialises_cuda": "import torch\ntorch.cuda.is_initialized = lambda: True",
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_module_that_no_fork_survives_breaks_runs(name: str, in_folder: Path) -> None:
    shown = _with_installed(in_folder, name, UNFIT[name])
    what = "starts a thread" if name == "starts_a_thread" else "initialises CUDA"
    assert f"[started again by forkserver: {name} {what} when it is imported]" in shown
    assert "there: [False, False]\nagain: [False, False]\nstill a fork server: True\n" in shown


@pytest.mark.parametrize("line", ["1 / 0", "import not_there", "raise SystemExit(1)", "import os; os.chdir('/')"])
def test_a_module_that_cannot_be_imported_ends_the_server(line: str, in_folder: Path) -> None:
    works = line.endswith("('/')")
    shown = _with_installed(in_folder, "cannot_be", line)
    assert shown == f"there: {[works] * 2}\nagain: {[works] * 2}\nstill a fork server: True\n"


def _with_installed(folder: Path, name: str, source: str) -> str:
    """What a program shows that preloads that module, and looks for it in the ranks of two runs."""
    packages = folder / "site-packages"
    packages.mkdir()
    (packages / f"{name}.py").write_text(source)
    program = script(
        f"""
        import nbddp, sys
        from nbddp.kernel import forkserver
        def is_there(): return {name!r} in sys.modules
        nbddp.preload({name!r})
        first = nbddp.run(is_there, nprocs=2, device="cpu", show=False)
        print(first.logs(0), end="")
        print("there:", first.values)
        print("again:", nbddp.run(is_there, nprocs=2, device="cpu", show=False).values)
        print("still a fork server:", forkserver.available())
        """,
        PYTHONPATH=os.pathsep.join([str(packages), *sys.path]),
    )
    assert (program.returncode, program.stderr) == (0, "")
    return program.stdout


def test_a_notebook_begins_with_it(notebook: Notebook) -> None:
    notebook.ok("import nbddp; nbddp.preload('pandas')")
    reply = notebook.ok("""
        import sys
        print(nbddp.run(lambda: "pandas" in sys.modules, nprocs=2, device="cpu", show=False).values)
    """)
    assert reply.shown == "[True, True]\n"
