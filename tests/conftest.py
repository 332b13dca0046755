"""The check after every test: nothing of a run may be left, and the process is as it was before."""

# ruff: noqa: E402 - the folder for temporary files is chosen before anything can ask for it
from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Before multiprocessing asks where temporary files go; short, because a socket's path has 108 bytes.
_TEMP = tempfile.mkdtemp(prefix="nbt-", dir="/tmp")
os.environ["TMPDIR"] = tempfile.tempdir = _TEMP
atexit.register(shutil.rmtree, _TEMP, ignore_errors=True)  # before multiprocessing's own exit handler, to run after it

from tests import lanes

lanes.take_own_shared_memory()

from multiprocessing.util import get_temp_dir

import hypothesis
import pytest
import torch
from jupyter_core.utils import ensure_event_loop

from nbddp.forkserver import server as forkserver
from nbddp.kernel import run as runs
from nbddp.launch import gauges
from nbddp.payload import huge_pages
from tests import support
from tests.support import (
    GONE_S,
    MARK,
    Cells,
    Notebook,
    Surroundings,
    fresh_main,
    marked_pids,
    run,
    strangers,
    wait_until,
    wait_until_alone,
)

name, _, value = MARK.partition("=")
os.environ[name] = value
# What a shell starts in the background ignores it, and tests interrupt this process.
signal.signal(signal.SIGINT, signal.default_int_handler)


# How long a case takes depends on the load; new cases come with NBDDP_CASES, not with somebody's merge.
hypothesis.settings.register_profile("nbddp", deadline=None, derandomize="NBDDP_CASES" not in os.environ)
hypothesis.settings.load_profile("nbddp")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the exhaustive tests too; so does any path or -k")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """README's command runs what promises.txt lists; a folder or file that is named runs whole."""
    lanes.longest_first(items)
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if named or config.option.keyword or config.option.markexpr or config.option.all:
        return
    lines = Path(__file__).with_name("promises.txt").read_text().splitlines()
    wanted = {f"tests/{line.replace('::', '::test_')}" for line in lines if not line.startswith("#")}
    names = {item: {item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]} for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not names[item] & wanted])
    items[:] = [item for item in items if names[item] & wanted]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and this machine has none")


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    """What a process opens once and keeps: torch's event loop, Jupyter's, the fork server, the tmpfs, a folder."""
    home = tempfile.mkdtemp(prefix="home-", dir=_TEMP)
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"):
        os.environ[variable] = home
    os.environ["JUPYTER_PLATFORM_DIRS"] = "1"
    ensure_event_loop()  # of the blocking client
    get_temp_dir()  # multiprocessing's own folder
    if torch.cuda.is_available():  # the driver's file descriptors, and a variable that torch sets
        torch.zeros(1, device="cuda")
        gauges.gpu_memory("0")
    huge_pages.begin(wait_s=GONE_S)
    with fresh_main() as cells:
        assert run(cells("def nothing(): return 1").nothing).values == [1, 1]
    wait_until(lambda: forkserver.importing() is None, what="all imports of the fork server: torch makes a folder")


@pytest.fixture(autouse=True)
def _nothing_left_behind(_warm: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, port, thread, fd, file, or a changed environment."""
    if "warm" in request.fixturenames:  # hosts that stay logged in
        request.getfixturevalue("warm")
    forkserver.warm()  # the test before may have killed it
    allowed = marked_pids()
    support.at_start = allowed
    before = Surroundings()
    yield
    deadline = time.monotonic() + GONE_S
    while (left := strangers(allowed)) or (changed := before.changed()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    else:
        return
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    for started in list(runs._live):  # a failed test's own: the next one shall not suffer from it
        started.stop(0)
    assert not left, f"processes are left: {left}"
    assert not (changed := before.changed()), f"this process is not as it was: {changed}"


@pytest.fixture
def cell() -> Iterator[Cells]:
    """Cells of an empty notebook, executed in this process."""
    with fresh_main() as cells:
        yield cells


@pytest.fixture(scope="session")
def _shared_notebook(_warm: None) -> Iterator[list[Notebook]]:
    box: list[Notebook] = []
    yield box
    for notebook in box:
        notebook.close()


def _prepared() -> Notebook:
    notebook = Notebook()
    # Everything a kernel opens once: the fork server and torch's event loop.
    notebook.ok("import nbddp\nnbddp.run(lambda: 1, nprocs=2, device='cpu', show=False).values")
    return notebook


@pytest.fixture(scope="session")
def _notebook(_shared_notebook: list[Notebook]) -> Notebook:
    _shared_notebook.append(_prepared())
    return _shared_notebook[0]


@pytest.fixture
def notebook(_notebook: Notebook) -> Iterator[Notebook]:
    """A running notebook, shared by the tests: variables stay, the kernel must survive."""
    yield _notebook
    assert _notebook.ok("40 + 2").shown.strip() == "42"
    wait_until_alone(_notebook.pid)


@pytest.fixture
def own_notebook() -> Iterator[Notebook]:
    """A running notebook of this test alone, which may be killed."""
    with _prepared() as notebook:
        yield notebook


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
