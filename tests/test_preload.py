"""Modules named to ``nbddp.preload`` are imported in every later rank, and runs work whatever goes wrong with it."""

from __future__ import annotations

import multiprocessing.context
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

import psutil
import pytest
import torch

import nbddp
from nbddp.forkserver import server as forkserver
from nbddp.worker import inherited, setup
from tests.support import Cells, Notebook, run, script, start, wait_until

IS_THERE = """
    def is_there(name):
        import sys
        return name in sys.modules
"""


@pytest.fixture(autouse=True)
def nothing_preloaded() -> Iterator[None]:
    yield
    forkserver._current.modules = ()
    forkserver.warm()
    wait_until(lambda: not forkserver.reap(), what="servers that were replaced are gone")


@pytest.mark.slow
def test_preloaded_modules_are_imported_in_every_later_rank(cell: Cells) -> None:
    names = cell(IS_THERE)
    assert run(names.is_there, "mailbox").values == [False, False]
    nbddp.preload("mailbox", "wsgiref.headers")
    first = forkserver.pid()
    assert run(names.is_there, "mailbox").values == [True, True]
    assert run(names.is_there, "wsgiref.headers").values == [True, True]
    nbddp.preload("mailbox")
    assert forkserver.pid() == first, "nothing new, and the server was replaced"
    assert "mailbox" not in sys.modules, "the kernel has no need of it"

    nbddp.preload("shelve")  # in addition
    assert run(names.is_there, "mailbox").values == [True, True]
    server = forkserver.pid()
    assert server is not None
    os.kill(server, signal.SIGKILL)
    assert run(names.is_there, "mailbox", timeout=60).values == [True, True]
    assert run(names.is_there, "shelve").values == [True, True]


@pytest.mark.slow
def test_preload_works_where_the_servers_program_is_not_its_last_argument(
    cell: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.13.12 and 3.14.3 give the server the notebook's own arguments, behind the program."""
    original = util.spawnv_passfds
    monkeypatch.setattr(util, "spawnv_passfds", lambda exe, args, fds: original(exe, [*args, "kernel.json", "-f"], fds))
    nbddp.preload("mailbox")
    assert run(cell(IS_THERE).is_there, "mailbox").values == [True, True]


@pytest.mark.slow
def test_preload_leaves_running_runs_to_the_server_before(cell: Cells, in_folder: Path) -> None:
    """It reports the exit codes of the ranks that it has forked, and so has to stay until they have ended."""
    names = cell("""
        import nbddp, os, time
        def train():
            while not os.path.exists("go_on"): time.sleep(0.01)
            return nbddp.reduce(1.0, op="sum")
        def sleep(): time.sleep(1000)
    """)
    going, dying = start(names.train), start(names.sleep)
    before = forkserver.pid()
    nbddp.preload("mailbox")
    assert run(cell(IS_THERE).is_there, "mailbox").values == [True, True]
    (in_folder / "go_on").touch()
    assert going.wait(30).values == [2.0, 2.0]
    assert before is not None
    assert psutil.pid_exists(before)
    os.kill(dying.pids[1], signal.SIGKILL)
    with pytest.raises(nbddp.RankDied, match="killed by SIGKILL"):
        dying.wait(20)
    wait_until(lambda: (forkserver.reap(), not psutil.pid_exists(before))[1], what="the server before ends")


@pytest.mark.slow
def test_runs_that_are_starting_finish_despite_a_preload(cell: Cells) -> None:
    one = cell("def one(): return 1").one
    modules = ["mailbox", "shelve", "wsgiref.headers", "mailcap" if sys.version_info < (3, 13) else "zipapp", "cmd"]
    for module in modules:
        going = [run(one, wait=False) for _ in range(2)]
        nbddp.preload(module)
        assert [each.wait(60).values for each in going] == [[1, 1], [1, 1]]
    assert run(cell(IS_THERE).is_there, "shelve").values == [True, True]


@pytest.mark.slow
def test_preload_works_after_an_interrupted_preload(cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    names = cell(IS_THERE)
    server = forkserver._current

    def interrupted() -> object:
        signal.raise_signal(signal.SIGINT)
        return type(server).running(server)

    monkeypatch.setattr(server, "running", interrupted)
    with pytest.raises(KeyboardInterrupt):
        nbddp.preload("mailbox")
    monkeypatch.undo()
    assert run(names.is_there, "mailbox").values == [True, True]


@pytest.mark.slow
def test_a_start_method_that_the_user_sets_is_kept(cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is set while ranks start; only what a new server does to it is undone."""
    one = cell("def one(): return 1").one
    run(one)
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    original = forkserver.ForkServer.start_process
    monkeypatch.setattr(
        forkserver.ForkServer,
        "start_process",
        lambda *args, **more: (original(*args, **more), multiprocessing.set_start_method("spawn", force=True))[0],
    )
    assert run(one).values == [1, 1]
    assert multiprocessing.get_start_method(allow_none=True) == "spawn"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (7, "takes names of modules.*not 7"),
        ("", "takes names of modules"),
        ("two words", "takes names of modules"),
        ("no_such_package", "no module no_such_package is installed"),
        ("no_such_package.inside", "no module no_such_package is installed"),
        ("tests.support", "not an installed package"),
        ("conftest_of_mine", "not an installed package"),
    ],
)
def test_a_module_that_cannot_be_preloaded_is_refused_at_once(
    name: object, why: str, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_folder / "conftest_of_mine.py").touch()
    monkeypatch.syspath_prepend(str(in_folder))
    server = forkserver.pid()
    with pytest.raises(nbddp.LaunchError, match=why):
        nbddp.preload("mailbox", name)  # type: ignore[arg-type]
    assert forkserver.pid() == server


THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=[1000], daemon={}).start()"
UNFIT = {
    "starts_a_thread": (THREAD.format(True), "starts_a_thread starts a thread when it is imported"),
    "keeps_its_thread": (THREAD.format(False), "keeps_its_thread starts a thread when it is imported"),
    "initialises_cuda": (
        "import torch\ntorch.cuda.is_initialized = lambda: True",
        "initialises_cuda initialises CUDA when it is imported",
    ),
    "ends_the_process": (
        "import os; os._exit(3)",
        "it ended twice, while or after it imported ends_the_process",
    ),
}


IMPORTED = "beside: {0}\nthere: {0}\nagain: {0}\nstill a fork server: True\nservers: 1\n"


@pytest.mark.slow
def test_a_module_that_is_unsafe_to_fork_is_left_out_with_a_message(in_folder: Path) -> None:
    shown = _with_installed(
        in_folder, {name: source for name, (source, _) in UNFIT.items()}, *([name] for name in UNFIT)
    )
    left_out = IMPORTED.format([[False]] * 2)
    assert shown == "".join(f"[started again by forkserver: {why}]\n{left_out}" for _, why in UNFIT.values())


FAILING = {"divides": "1 / 0", "needs_another": "import not_there", "exits": "raise SystemExit(1)"}
# torch 2.15's bindings list what they find leaked while the interpreter is taken apart. As those do, in C, when no
# Python is left; what this one says is of no interest.
SPEAKS_LAST = "import ctypes\nctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).malloc_stats)"


@pytest.mark.slow
def test_a_module_that_fails_to_import_leaves_the_server_running(in_folder: Path) -> None:
    """And the server prints nothing when it ends."""
    sources = {**FAILING, "prints": "print('hello')", "speaks_last": SPEAKS_LAST}
    shown = _with_installed(in_folder, sources, list(sources))
    found = [name not in FAILING for name in sources]
    assert shown.replace("hello\n", "", 1) == IMPORTED.format([found] * 2)


def _with_installed(folder: Path, sources: dict[str, str], *groups: list[str]) -> str:
    """What a program shows that preloads the modules of each group in turn, and looks for them in ranks of two runs."""
    packages = folder / "site-packages"
    packages.mkdir()
    for name, source in sources.items():
        (packages / f"{name}.py").write_text(source)
    program = script(
        f"""
        import nbddp, psutil, sys, time
        from nbddp.forkserver import server as forkserver
        sys.path.append({str(packages)!r})  # as in a cell
        def servers():
            forkserver.reap()
            return sum("fork server of nbddp" in " ".join(child.cmdline()) for child in psutil.Process().children())
        def look_for(names):
            def are_there(): return [name in sys.modules for name in names]
            nbddp.preload(*names)
            beside = nbddp.run(are_there, nprocs=2, device="cpu", show=False, wait=False)
            first = nbddp.run(are_there, nprocs=2, device="cpu", show=False)
            print(first.logs(0), end="")
            print("beside:", beside.wait().values)
            print("there:", first.values)
            print("again:", nbddp.run(are_there, nprocs=2, device="cpu", show=False).values)
            print("still a fork server:", forkserver.available())
            deadline = time.monotonic() + 10
            while servers() > 1 and time.monotonic() < deadline: time.sleep(0.05)
            print("servers:", servers())
        for names in {groups!r}:
            look_for(names)
        """,
    )
    assert (program.returncode, program.stderr) == (0, "")
    return program.stdout


@pytest.fixture(scope="module")
def preloading(_warm: None) -> Iterator[Notebook]:
    """A notebook of these tests, in which modules are preloaded."""
    with Notebook() as notebook:
        yield notebook


@pytest.mark.slow
def test_preloaded_modules_are_in_a_notebooks_ranks(preloading: Notebook) -> None:
    shown = "print(nbddp.run(lambda: 'pandas' in sys.modules, nprocs=2, device='cpu', show=False).values)"
    assert preloading.ok(f"import nbddp, sys\n{shown}").shown == "[False, False]\n"
    assert preloading.ok(f"nbddp.preload('pandas')\n{shown}").shown == "[True, True]\n"


@pytest.mark.slow
def test_a_submodule_of_a_lazily_loading_package_can_be_preloaded(preloading: Notebook) -> None:
    pytest.importorskip("transformers")
    preloading.ok("""
        import nbddp
        def modules_of_a_trainer():
            import sys
            before = set(sys.modules)
            from transformers import Trainer
            return Trainer.__module__, sorted(set(sys.modules) - before)
    """)
    preloading.ok("nbddp.preload('transformers.trainer')")
    shown = preloading.ok("print(nbddp.run(modules_of_a_trainer, nprocs=2, device='cpu', show=False).values)").shown
    assert shown == f"{[('transformers.trainer', [])] * 2}\n"


def test_a_rank_of_a_server_that_has_initialised_the_driver_starts_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def after_a_fork(index: int) -> None:
        raise RuntimeError("CUDA driver initialization failed, you might not have a CUDA gpu.")

    monkeypatch.setattr(torch.cuda, "set_device", after_a_fork)
    with pytest.raises(RuntimeError, match="driver initialization failed"):
        setup._use_device("cuda", 0)
    monkeypatch.setattr(inherited, "forked", True)
    with pytest.raises(setup.UnfitServer):
        setup._use_device("cuda", 0)
