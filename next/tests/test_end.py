"""However a run ends, it ends in time and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import nbddp
from nbddp.process import server
from tests import support
from tests.support import (
    GONE_S,
    Cells,
    Notebook,
    gone,
    listening_ports,
    marked_pids,
    out,
    ranks_of,
    run,
    script,
    start,
    wait_until,
    wait_until_alone,
)

SOON_S = 10.0  # on a machine with other work
# What the ranks do while the end comes. Each says so in a file of its own first.
BODIES = {
    "sleep": "time.sleep(1000)",
    "swallow everything": """
while True:
    try:
        time.sleep(1000)
    except BaseException:
        pass""",
    "hold the GIL in C": "collections.deque(itertools.count(), maxlen=0)",
    "DataLoader workers": "list(torch.utils.data.DataLoader(Slow(), num_workers=2))",
    "subprocess": "subprocess.run(['sleep', '1000'])",
    "collective": "(time.sleep(1000) if nbddp.rank() else torch.distributed.all_reduce(torch.ones(1)))",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}


def _source(body: str) -> str:
    """A cell: ``train`` does that, after it has announced itself in the current folder."""
    lines = "\n".join("    " + line for line in BODIES[body].strip("\n").splitlines())
    return f"""
import collections, itertools, os, signal, subprocess, time, nbddp, torch
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        open(f"worker-{{os.getpid()}}", "w").close()
        time.sleep(1000)
def train():
    nbddp.barrier()
    open(f"rank-{{nbddp.rank()}}", "w").close()
{lines}
"""


def _wait_for_ranks(folder: Path, body: str, nprocs: int = 2) -> None:
    wait_until(lambda: len(list(folder.glob("rank-*"))) == nprocs)
    if body == "DataLoader workers":
        wait_until(lambda: len(list(folder.glob("worker-*"))) == 2 * nprocs)


@pytest.mark.parametrize("body", BODIES)
def test_stop_ends_ranks_in_time_whatever_they_do(cell: Cells, in_folder: Path, body: str) -> None:
    going = start(cell(_source(body)).train)
    _wait_for_ranks(in_folder, body)
    began = time.monotonic()
    going.stop(0.5)
    assert time.monotonic() - began < 0.5 + GONE_S
    assert going.state == "stopped"
    assert going.error is None


def test_stop_runs_finally_blocks_and_keeps_what_was_logged(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import nbddp, time
        def train():
            nbddp.log(loss=1.5)
            try:
                open(f"rank-{nbddp.rank()}", "w").close()
                time.sleep(1000)
            finally:
                nbddp.log(loss=2.5)
                print("cleaned up")
                open(f"closed-{nbddp.rank()}", "w").close()
    """)
    going = start(names.train)
    _wait_for_ranks(in_folder, "sleep")
    going.stop()
    assert len(list(in_folder.glob("closed-*"))) == 2
    assert going.history["loss"].values.tolist() == [1.5, 2.5]
    assert going.logs() == "[rank 0] cleaned up\n[rank 1] cleaned up\n"


@pytest.fixture
def patient(notebook: Notebook) -> Iterator[Notebook]:
    """A notebook that gives its ranks a minute: what ends within seconds has not waited for that."""
    notebook.ok("from nbddp.kernel import attempt, start\nbefore = start.OF_A_RUN")
    notebook.ok("start.OF_A_RUN = attempt.Patience(0.3, (60.0, 0.0))")
    yield notebook
    notebook.ok("start.OF_A_RUN = before")


@pytest.mark.parametrize("how", ["kill", "killpg", "tree"])
def test_one_interrupt_stops_the_run_and_the_next_run_works(patient: Notebook, in_folder: Path, how: str) -> None:
    """A plain client signals only the kernel, Jupyter its whole process group, VS Code all that is below it, too."""
    notebook = patient
    notebook.ok(f"import os; os.chdir({str(in_folder)!r})" + _source("sleep"))
    message = notebook.begin("nbddp.run(train, nprocs=2, device='cpu')")
    _wait_for_ranks(in_folder, "sleep")
    began = time.monotonic()
    notebook.interrupt(how)
    reply = notebook.end_of(message)
    assert time.monotonic() - began < SOON_S
    assert (reply.status, reply.ename) == ("error", "KeyboardInterrupt")
    wait_until_alone(notebook.pid)
    after = notebook.ok("nbddp.last_run().state, nbddp.run(lambda: 5, nprocs=2, device='cpu', show=False).values")
    assert after.shown.strip() == "('stopped', [5, 5])"


@pytest.mark.parametrize("how", ["kill", "killpg"])
@pytest.mark.parametrize("body", ["swallow everything", "hold the GIL in C"])
def test_five_interrupts_end_ranks_that_ignore_them(patient: Notebook, in_folder: Path, how: str, body: str) -> None:
    """The impatient user: every further one may only shorten the grace."""
    notebook = patient
    notebook.ok(f"import os; os.chdir({str(in_folder)!r})" + _source(body))
    message = notebook.begin("nbddp.run(train, nprocs=2, device='cpu')")
    _wait_for_ranks(in_folder, body)
    began = time.monotonic()
    for _ in range(5):
        notebook.interrupt(how)
        time.sleep(0.1)  # as fast as a finger
    reply = notebook.end_of(message)
    assert time.monotonic() - began < SOON_S
    assert (reply.status, reply.ename) == ("error", "KeyboardInterrupt")
    wait_until_alone(notebook.pid)
    assert notebook.ok("nbddp.run(lambda: 5, nprocs=2, device='cpu', show=False).values").shown.strip() == "[5, 5]"


def test_an_interrupt_of_the_wait_for_a_functions_threads_keeps_its_value(notebook: Notebook, in_folder: Path) -> None:
    notebook.ok(f"""
        import nbddp, threading, time
        from pathlib import Path
        def goes_on():
            time.sleep(0.5)
            Path({str(in_folder)!r}, str(nbddp.rank())).touch()
            time.sleep(60)
        def leaves():
            threading.Thread(target=goes_on).start()
            return 7
    """)
    running = notebook.begin("run = nbddp.run(leaves, nprocs=2, device='cpu', show=False)")
    wait_until(lambda: len(os.listdir(in_folder)) == 2)
    notebook.interrupt()
    assert notebook.end_of(running).ename == "KeyboardInterrupt"
    assert notebook.ok("nbddp.last_run().values").shown == "[7, 7]\n"


def test_an_interrupt_while_the_ranks_start_leaves_none(notebook: Notebook) -> None:
    """The most delicate moment: a process half made must not stay."""
    notebook.ok("import nbddp, time\ndef train(): time.sleep(1000)")
    for delay_s in (0.0, 0.01, 0.03, 0.06, 0.1):
        message = notebook.begin("print('go', flush=True)\nnbddp.run(train, nprocs=4, device='cpu', show=False)")
        notebook.shown_so_far(message, until="go")
        time.sleep(delay_s)  # the moment is the point
        notebook.interrupt()
        reply = notebook.end_of(message)
        assert reply.ename == "KeyboardInterrupt"
        wait_until_alone(notebook.pid)
    assert notebook.ok("nbddp.run(lambda: 5, nprocs=2, device='cpu', show=False).value").shown.strip() == "5"


def test_an_interrupt_of_an_idle_kernel_does_not_touch_background_ranks(notebook: Notebook, in_folder: Path) -> None:
    """Jupyter's stop button signals the whole group even when no cell runs."""
    notebook.ok(f"import os; os.chdir({str(in_folder)!r})" + _source("sleep"))
    notebook.ok("going = nbddp.run(train, nprocs=2, device='cpu', wait=False, show=False)")
    _wait_for_ranks(in_folder, "sleep")
    notebook.interrupt("killpg")
    assert notebook.ok("time.sleep(0.2); print(going.state)").shown == "running\n"
    message = notebook.begin("going.wait()")
    time.sleep(0.3)  # until the cell waits; an early interrupt would end the cell as well
    notebook.interrupt("killpg")
    assert notebook.end_of(message).ename == "KeyboardInterrupt"
    assert notebook.ok("print(going.state); going.stop(0); print(going.state)").shown == "running\nstopped\n"


def test_the_kernels_handlers_environment_and_threads_are_as_before_the_runs(
    notebook: Notebook, in_folder: Path
) -> None:
    notebook.ok(_source("sleep"))
    notebook.ok(f"""
        import json, signal, sys, threading
        os.chdir({str(in_folder)!r})
        def fd_kind(fd):
            try:
                return os.readlink(f"/proc/self/fd/{{fd}}").split(":[")[0]
            except OSError:
                return "gone"
        def look():
            return dict(
                environ=dict(os.environ), cwd=os.getcwd(), path=list(sys.path),
                main=sorted(n for n in globals() if n[0] != "_"),
                handlers=[str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
                threads=sorted(t.name for t in threading.enumerate()),
                fds=sorted(map(fd_kind, os.listdir("/proc/self/fd"))),
                torch_threads=torch.get_num_threads(), stdout=str(type(sys.stdout)), hook=str(sys.excepthook),
            )
    """)
    notebook.ok("look()")
    before = notebook.ok("print(json.dumps(look()))").json()
    message = notebook.begin("nbddp.run(train, nprocs=2, device='cpu', env={'X': '1'}, seed=1)")
    _wait_for_ranks(in_folder, "sleep")
    notebook.interrupt()
    assert notebook.end_of(message).ename == "KeyboardInterrupt"
    notebook.cell("nbddp.run(lambda: 1 / 0, nprocs=2, device='cpu')")
    notebook.ok("nbddp.run(lambda: 1, nprocs=2, device='cpu').values")
    fds = Counter(before.pop("fds"))

    def settled() -> bool:
        """ipykernel keeps an eventfd for each thread that touched stdout, and looks for dead ones every 10 s."""
        after = notebook.ok("print(json.dumps(look()))").json()
        extra = Counter(after.pop("fds")) - fds
        assert after == before
        return not [kind for kind in extra if "history.sqlite" not in kind]

    wait_until(settled, 20)


def _begin_runs(notebook: Notebook, folder: Path, bodies: Iterable[str]) -> None:
    """Begin a background run for each body, each in a folder of its own, and wait for the ranks."""
    for number, body in enumerate(bodies):
        own = folder / str(number)
        own.mkdir()
        notebook.ok(f"import os; os.chdir({str(own)!r})" + _source(body))
        notebook.ok(f"going_{number} = nbddp.run(train, nprocs=2, device='cpu', wait=False, show=False)")
        _wait_for_ranks(own, body)


def test_a_killed_kernels_ranks_end_in_time_whatever_they_do(in_folder: Path) -> None:
    """SIGKILL leaves no code to run: ranks, their children, sockets and folders must go by themselves."""
    before = marked_pids()
    *others, last = BODIES
    with Notebook() as notebook:
        # killed here and not by a fixture: what is left must be looked at with the kernel gone
        _begin_runs(notebook, in_folder, others)
        notebook.ok("import nbddp\nopen_session = nbddp.Session(nprocs=2, device='cpu')")
        notebook.ok(f"os.chdir({str(in_folder)!r})" + _source(last))
        notebook.begin("nbddp.run(train, nprocs=2, device='cpu')")
        _wait_for_ranks(in_folder, last)
        assert len(ranks_of(notebook.pid)) >= 2 * len(BODIES) + 2
        began = time.monotonic()
        notebook.kill()
        wait_until(lambda: not {p for p in marked_pids() - before if _runs(p) and p != notebook.pid}, 10)
        assert time.monotonic() - began < GONE_S


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.long
def test_a_restarted_kernel_leaves_no_ranks_and_can_run_again(own_notebook: Notebook, in_folder: Path) -> None:
    """Background runs and a cell that goes on; "swallow everything" ignores what ends other ranks."""
    _begin_runs(own_notebook, in_folder, ["sleep", "swallow everything"])
    own_notebook.ok(f"os.chdir({str(in_folder)!r})" + _source("sleep"))
    own_notebook.begin("nbddp.run(train, nprocs=2, device='cpu')")
    _wait_for_ranks(in_folder, "sleep")
    old = own_notebook.pid
    own_notebook.restart()
    assert own_notebook.pid != old
    wait_until_alone(own_notebook.pid)
    reply = own_notebook.ok("import nbddp\nprint(nbddp.run(lambda: 5, nprocs=2, device='cpu', show=False).values)")
    assert reply.shown == "[5, 5]\n"


@pytest.mark.long
def test_a_script_with_a_background_run_ends_without_waiting_for_it(in_folder: Path) -> None:
    """multiprocessing would join the ranks at exit, forever."""
    began = _source("swallow everything") + (
        "going = nbddp.run(train, nprocs=2, device='cpu', wait=False, show=False)\n"
        "while len([n for n in os.listdir('.') if n.startswith('rank-')]) < 2: time.sleep(0.01)\n"
        "print(time.monotonic())"
    )
    ended = script(began)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert time.monotonic() - float(ended.stdout) < SOON_S


@pytest.mark.long
def test_a_notebook_that_ends_leaves_no_background_run(own_notebook: Notebook, in_folder: Path) -> None:
    _begin_runs(own_notebook, in_folder, ["swallow everything"])
    began = time.monotonic()
    own_notebook.cell("exit")
    wait_until(lambda: gone(own_notebook.pid), SOON_S)
    assert time.monotonic() - began < SOON_S
    wait_until(lambda: not {pid for pid in marked_pids() - support.at_start if _runs(pid)}, GONE_S)


def test_only_loopback_addresses_listen(cell: Cells, in_folder: Path) -> None:
    """A plain TCPStore listens on all interfaces: anyone on the network could feed it pickles."""
    going = start(cell(_source("collective")).train)
    _wait_for_ranks(in_folder, "collective")
    addresses = {address for pid in [os.getpid(), *ranks_of(os.getpid())] for address, _ in listening_ports(pid)}
    going.stop(0)
    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_the_users_own_children_and_handlers_are_left_alone(cell: Cells) -> None:
    """Clean-up by name (pkill) kills strangers."""
    mine = subprocess.Popen(["sleep", "1000"])
    caught = []
    handler = signal.signal(signal.SIGCHLD, lambda *_: caught.append(1))
    try:
        names = cell("import os, signal\ndef dies(): os.kill(os.getpid(), signal.SIGKILL)\ndef good(): return 1")
        run(names.good)
        with pytest.raises(nbddp.RankDied):
            run(names.dies)
        assert mine.poll() is None
    finally:
        signal.signal(signal.SIGCHLD, handler)
        mine.kill()
        mine.wait()


@pytest.mark.long
def test_a_killed_scripts_ranks_end_in_time(in_folder: Path) -> None:
    Path("train_script.py").write_text(
        _source("hold the GIL in C") + "\nif __name__ == '__main__':\n    nbddp.run(train, nprocs=2, device='cpu')\n"
    )
    before = marked_pids()
    process = subprocess.Popen([sys.executable, "train_script.py"], stdout=subprocess.DEVNULL)
    _wait_for_ranks(in_folder, "hold the GIL in C")
    ranks = set(ranks_of(process.pid)) - before
    assert len(ranks) == 2
    process.kill()
    began = time.monotonic()
    process.wait()
    wait_until(lambda: not any(_runs(pid) for pid in ranks), 10)
    assert time.monotonic() - began < GONE_S


def test_a_run_names_one_folder_in_tmp_and_nothing_in_shared_memory(cell: Cells, in_folder: Path) -> None:
    """What has no name cannot be left behind. The fork server removes the folder when the notebook kernel is killed."""
    names = cell("""
        import nbddp, time
        def train(data):
            print("x" * 100_000)
            open(f"rank-{nbddp.rank()}", "w").close()
            time.sleep(1000)
    """)
    place = server.temporary_folder()
    before = set(os.listdir("/dev/shm")), set(os.listdir(place)), set(os.listdir(tempfile.gettempdir()))
    going = start(names.train, torch.ones(1 << 20))
    _wait_for_ranks(in_folder, "sleep")
    during = set(os.listdir("/dev/shm")), set(os.listdir(place))
    assert set(os.listdir(tempfile.gettempdir())) == before[2]
    (folder,) = (Path(place, name) for name in during[1] - before[1])
    going.stop(0)
    assert not folder.exists()
    assert not {name for name in during[0] - before[0] if str(os.getpid()) in name}


_MAKES = """
import multiprocessing, os, time, torch, nbddp
from multiprocessing.shared_memory import SharedMemory
def left_by_torch():
    open(f"/dev/shm/torch_{os.getpid()}_1_0", "w").close()
class Data(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, i):
        if i == 0: left_by_torch()
        return i
def train(name):
    kept = [SharedMemory(create=True, size=1 << 20), multiprocessing.get_context("spawn").Semaphore()]
    kept.append(SharedMemory(f"{name}-{nbddp.rank()}", create=True, size=1 << 20))
    left_by_torch()
    for _ in torch.utils.data.DataLoader(Data(), num_workers=1): break
    if not os.fork():
        left_by_torch()
        os._exit(0)
    os.wait()
    open(f"rank-{nbddp.rank()}", "w").close()
    time.sleep(1000)
"""


def test_shared_memory_and_semaphores_of_a_stopped_run_are_removed(cell: Cells, in_folder: Path) -> None:
    name = f"nbddp-test-{os.getpid()}-{time.monotonic_ns()}"
    before = set(os.listdir("/dev/shm"))
    going = run(cell(_MAKES).train, name, wait=False)
    _wait_for_ranks(in_folder, "sleep")
    made = set(os.listdir("/dev/shm")) - before
    kinds = {"psm_": 2, "sem.mp-": 2, "torch_": 6, name: 2}
    assert {kind: sum(entry.startswith(kind) for entry in made) for kind in kinds} == kinds
    going.stop(0)
    assert set(os.listdir("/dev/shm")) - before == set()


def test_values_of_earlier_runs_are_freed_unless_somebody_holds_them(cell: Cells) -> None:
    train = cell("import torch\ndef train(): return torch.ones(1 << 20)").train

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    held = run(train)
    for _ in range(2):
        run(train)
    before, gone = mappings(), weakref.ref(nbddp.last_run())
    for _ in range(20):
        run(train)
    assert mappings() <= before + 10
    assert gone() is None
    assert held.value.sum() == 1 << 20


@pytest.mark.parametrize("count", [30, pytest.param(100, marks=pytest.mark.long)])
def test_runs_do_not_grow_the_kernel(notebook: Notebook, count: int) -> None:
    notebook.ok("""
        import gc, os, threading, nbddp, torch
        def train(data): return data + 1
        def size():
            gc.collect()
            maps = sum(1 for _ in open("/proc/self/maps"))
            rss = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            return maps, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), rss
        def ran(times):
            for _ in range(times):
                assert nbddp.run(train, (torch.zeros(1 << 20),), nprocs=2, device="cpu", show=False).value[-1] == 1
            return list(size())
    """)
    early = json.loads(out(notebook.ok("ran(20)")))
    late = json.loads(out(notebook.ok(f"ran({count - 20})", timeout_s=100)))
    maps, descriptors, threads, nbytes = (after - before for before, after in zip(early, late))
    assert maps <= 10
    assert descriptors <= 2  # ipykernel's own
    assert threads <= 0
    assert nbytes < 16 << 20
