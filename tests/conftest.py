"""The check after every test: nothing of a run may be left, and the process is as it was before."""

# ruff: noqa: E402 - what's inherited by the tests' own processes is set before anything can ask for it
import atexit
import ctypes
import importlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_HERE = str(Path(__file__).parent.parent)
_CLONE_NEWNS = 0x00020000  # linux/sched.h
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000  # linux/mount.h

# Kernels, scripts, and the fork server import this copy, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_HERE, os.environ.get("PYTHONPATH")]))
if os.environ.get("NBDDP_DEVICE") != "cuda":  # gpu.py's; all other tests are about the CPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Before multiprocessing asks where temporary files go; short, because a socket's path has 108 bytes.
_TEMP = tempfile.mkdtemp(prefix="nbt-", dir="/tmp")
os.environ["TMPDIR"] = tempfile.tempdir = _TEMP
atexit.register(shutil.rmtree, _TEMP, ignore_errors=True)  # before multiprocessing's own exit handler, to run after it


def _take_own_shared_memory() -> None:
    """Give this process and all that it starts a /dev/shm of its own, since tests look at what is left there."""
    libc = ctypes.CDLL(None)
    if libc.unshare(_CLONE_NEWNS) == 0 and libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0:
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)


_take_own_shared_memory()

from multiprocessing.util import get_temp_dir

import hypothesis
import pytest
from jupyter_core.utils import ensure_event_loop

import nbddp
from nbddp.payload import huge_pages
from nbddp.process import server
from tests import support
from tests.support import GONE_S, MARK, Cells, Notebook, Surroundings, fresh_main, marked_pids, run, strangers

# What a kernel opens once.
_WARM = "import nbddp\nnbddp.run(lambda: 1, nprocs=2, device='cpu', show=False).values"
assert nbddp.__file__.startswith(_HERE), f"another nbddp is imported: {nbddp.__file__}"
name, _, value = MARK.partition("=")
os.environ[name] = value
# What a shell starts in the background ignores it, and tests interrupt this process.
signal.signal(signal.SIGINT, signal.default_int_handler)
_HOME = tempfile.mkdtemp(prefix="home-", dir=_TEMP)
for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR"):
    os.environ[name] = _HOME
os.environ["JUPYTER_PLATFORM_DIRS"] = "1"
server.start_early()  # it imports torch while the tests are collected


# How long a case takes depends on the load; new cases come with NBDDP_CASES, not with somebody's merge.
hypothesis.settings.register_profile(
    "nbddp",
    deadline=None,
    derandomize="NBDDP_CASES" not in os.environ,
    max_examples=int(os.environ.get("NBDDP_CASES", 150)),
)
hypothesis.settings.load_profile("nbddp")


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    """What a process opens once and keeps: torch's event loop, Jupyter's, the fork server, the tmpfs, a folder."""
    ensure_event_loop()  # of the blocking client
    importlib.import_module("torch.distributed.nn")  # torch 2.6 makes a folder
    nbddp.device()  # asks the driver, in a torch with CUDA
    get_temp_dir()  # multiprocessing's own folder
    huge_pages._folder()
    with fresh_main() as cells:
        assert run(cells("def nothing(): return 1").nothing).values == [1, 1]


@pytest.fixture(autouse=True)
def _nothing_left_behind(_warm: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, port, thread, fd, file, or a changed environment."""
    for shared in {"_notebook", "_kernel"} & set(request.fixturenames):  # notebooks that stay, with their folders
        request.getfixturevalue(shared)
    server.running()  # the test before may have killed it
    allowed = support.at_start = marked_pids()
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
    for started in nbddp.runs():  # a failed test's own: the next one must not suffer from it
        started.stop(0)
    assert not left, f"processes are left: {left}"
    assert not (changed := before.changed()), f"this process is not as it was: {changed}"


@pytest.fixture
def cell() -> Iterator[Cells]:
    """Cells of an empty notebook, executed in this process."""
    with fresh_main() as cells:
        yield cells


@pytest.fixture(scope="session")
def _notebook(_warm: None) -> Iterator[Notebook]:
    with Notebook() as notebook:
        notebook.ok(_WARM)
        yield notebook


@pytest.fixture
def notebook(_notebook: Notebook) -> Iterator[Notebook]:
    """A running notebook, shared by the tests: variables stay, the kernel must survive."""
    yield _notebook
    assert _notebook.ok("40 + 2").shown.strip() == "42"
    support.wait_until_alone(_notebook.pid)


@pytest.fixture
def own_notebook() -> Iterator[Notebook]:
    """A running notebook that only this test uses, and may kill."""
    with Notebook() as notebook:
        notebook.ok(_WARM)
        yield notebook


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
