"""However a run ends, it ends in time and leaves nothing behind."""

import glob
import os
import signal
import socket
import subprocess
import tempfile
import textwrap
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
from nbddp.worker import tracked
from tests import support
from tests.support import FIRST_MOMENTS_S, GONE_S, Cells, Notebook, gone, run, start, wait_until, wait_until_alone

SOON_S = 10.0  # on a machine with other work
# What the ranks do while the end comes. Each says so in a file of its own first.
BODIES = {
    "sleep": "time.sleep(1000)",
    "swallow everything": "while True:\n    try: time.sleep(1000)\n    except BaseException: pass",
    "hold the GIL in C": "collections.deque(itertools.count(), maxlen=0)",
    "DataLoader workers": "list(torch.utils.data.DataLoader(Slow(), num_workers=2))",
    "subprocess": "subprocess.run(['sleep', '1000'])",
    "collective": "(time.sleep(1000) if nbddp.rank() else torch.distributed.all_reduce(torch.ones(1)))",
    "stopped": "subprocess.Popen(['sleep', '1000']), os.kill(os.getpid(), signal.SIGSTOP)",
}


def source_of(body: str) -> str:
    """A cell: ``train`` does that, after it has announced itself in the current folder."""
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
{textwrap.indent(BODIES[body], "    ")}
"""


def wait_for_ranks(folder: Path, body: str, nprocs: int = 2) -> None:
    wait_until(lambda: len(list(folder.glob("rank-*"))) == nprocs)
    if body == "DataLoader workers":
        wait_until(lambda: len(list(folder.glob("worker-*"))) == 2 * nprocs)
    time.sleep(FIRST_MOMENTS_S)


@pytest.mark.parametrize("body", BODIES)
def test_stop_ends_ranks_in_time_whatever_they_do(cell: Cells, in_folder: Path, body: str) -> None:
    going = start(cell(source_of(body)).train)
    wait_for_ranks(in_folder, body)
    began = time.monotonic()
    going.stop(0.5)
    assert time.monotonic() - began < 0.5 + GONE_S
    assert (going.state, going.error) == ("stopped", None)


def test_stop_runs_finally_blocks_and_keeps_what_was_logged(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import nbddp, time
        def train():
            nbddp.log(loss=1.5)
            for _ in range(2 - nbddp.rank()): nbddp.log(mean=3.0, reduce="mean")
            try:
                open(f"rank-{nbddp.rank()}", "w").close()
                time.sleep(1000)
            finally:
                nbddp.log(loss=2.5)
                print("cleaned up")
                open(f"closed-{nbddp.rank()}", "w").close()
    """)
    going = start(names.train)
    wait_for_ranks(in_folder, "sleep")
    going.stop()
    assert (len(list(in_folder.glob("closed-*"))), going.history["loss"].values.tolist()) == (2, [1.5, 2.5])
    assert going.history["mean"].steps.tolist() == [0]  # only rank 0 has come to step 1
    assert going.logs() == "[rank 0] cleaned up\n[rank 1] cleaned up\n"


def test_a_finished_functions_thread_is_awaited_and_its_child_ends_with_the_rank(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import subprocess, threading, time
        def train():
            def write(): time.sleep(2.5); open("written", "w").close()
            threading.Thread(target=write).start()
            return subprocess.Popen(["sleep", "1000"]).pid
    """)
    child = run(names.train, nprocs=1).value
    assert os.path.exists("written")
    wait_until(lambda: not psutil.pid_exists(child))


@pytest.fixture
def patient(notebook: Notebook) -> Iterator[Notebook]:
    """A notebook that waits twelve times as long after an interrupt: what ends within seconds hasn't waited."""
    notebook.ok("from nbddp.kernel import attempt, start\nbefore = start.OF_A_RUN")
    notebook.ok("start.OF_A_RUN = attempt.Patience(0.3, tuple(12 * each for each in before.after_interrupts_s))")
    yield notebook
    notebook.ok("start.OF_A_RUN = before")


@pytest.mark.parametrize(
    ("how", "body", "times"),
    [
        *((how, "sleep", 1) for how in ("kill", "killpg", "tree")),
        ("tree", "collective", 1),
        ("kill", "swallow everything", 2),
        ("killpg", "hold the GIL in C", 5),
    ],
)
def test_one_interrupt_ends_ranks_more_end_those_that_ignore_it_and_the_next_run_works(
    patient: Notebook, in_folder: Path, how: str, body: str, times: int
) -> None:
    """A plain client signals only the kernel, Jupyter its whole process group, VS Code all that is below it, too.

    Five are the impatient user's: every further one may only shorten the grace.
    """
    notebook = patient
    notebook.ok(f"import os; os.chdir({str(in_folder)!r})" + source_of(body))
    message = notebook.begin("nbddp.run(train, nprocs=2, device='cpu')")
    wait_for_ranks(in_folder, body)
    began = time.monotonic()
    notebook.interrupt(how)
    for _ in range(times - 1):
        time.sleep(0.1)  # as fast as a finger
        notebook.interrupt(how)
    reply = notebook.end_of(message)
    assert time.monotonic() - began < SOON_S
    assert (reply.status, reply.ename) == ("error", "KeyboardInterrupt")
    wait_until_alone(notebook.pid)
    after = notebook.ok("nbddp.last_run().state, nbddp.run(lambda: 5, nprocs=2, device='cpu', show=False).values")
    assert after.shown.strip() == "('stopped', [5, 5])"


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
        assert notebook.end_of(message).ename == "KeyboardInterrupt"
        wait_until_alone(notebook.pid)
    assert notebook.ok("nbddp.run(lambda: 5, nprocs=2, device='cpu', show=False).value").shown.strip() == "5"


def test_an_interrupt_of_an_idle_kernel_does_not_touch_background_ranks(notebook: Notebook, in_folder: Path) -> None:
    """Jupyter's stop button signals the whole group even when no cell runs."""
    notebook.ok(f"import os; os.chdir({str(in_folder)!r})" + source_of("sleep"))
    notebook.ok("going = nbddp.run(train, nprocs=2, device='cpu', wait=False, show=False)")
    wait_for_ranks(in_folder, "sleep")
    notebook.interrupt("killpg")
    assert notebook.ok("time.sleep(0.2); print(going.state)").shown == "running\n"
    message = notebook.begin("going.wait()")
    time.sleep(0.3)  # until the cell waits; an early interrupt would end the cell as well
    notebook.interrupt("killpg")
    assert notebook.end_of(message).ename == "KeyboardInterrupt"
    assert notebook.ok("print(going.state); going.stop(0); print(going.state)").shown == "running\nstopped\n"


def test_the_kernels_handlers_environment_and_threads_are_as_before_runs(notebook: Notebook, in_folder: Path) -> None:
    notebook.ok(source_of("sleep"))
    notebook.ok(f"""
        import json, signal, sys, threading
        os.chdir({str(in_folder)!r})
        def fd_kind(fd):
            try: return os.readlink(f"/proc/self/fd/{{fd}}").split(":[")[0]
            except OSError: return "gone"
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
    wait_for_ranks(in_folder, "sleep")
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


def begin_runs(notebook: Notebook, folder: Path, bodies: Iterable[str]) -> None:
    """Begin a background run for each body, each in a folder of its own, and wait for the ranks."""
    for number, body in enumerate(bodies):
        own = folder / str(number)
        own.mkdir()
        notebook.ok(f"import os; os.chdir({str(own)!r})" + source_of(body))
        notebook.ok(f"going_{number} = nbddp.run(train, nprocs=2, device='cpu', wait=False, show=False)")
        wait_for_ranks(own, body)


def test_a_killed_kernels_ranks_end_in_time_whatever_they_do(in_folder: Path) -> None:
    """SIGKILL leaves no code to run: ranks, their children, sockets and folders must go by themselves."""
    before = support.marked_pids()
    *others, last = BODIES
    with Notebook() as notebook:
        # killed here and not by a fixture: what is left must be looked at with the kernel gone
        notebook.ok("import nbddp")
        assert any(map(support.is_fork_server, psutil.Process(notebook.pid).children()))  # it imports torch meanwhile
        notebook.ok("open_session = nbddp.Session(nprocs=2, device='cpu')")
        notebook.ok("def detach(): import subprocess as s; return s.Popen(['sleep', '99'], start_new_session=True).pid")
        detached = notebook.ok("nbddp.run(detach, nprocs=1, device='cpu', show=False).value").json()
        begin_runs(notebook, in_folder, others)
        notebook.ok(f"os.chdir({str(in_folder)!r})" + source_of(last))
        forked = int(notebook.ok("if not (forked := os.fork()): time.sleep(99), os._exit(0)\nforked").result)
        notebook.begin("nbddp.run(train, nprocs=2, device='cpu')")
        wait_for_ranks(in_folder, last)
        ranks = support.ranks_of(notebook.pid)
        assert len(ranks) >= 2 * len(BODIES) + 2
        assert not gone(detached)
        began = time.monotonic()
        notebook.kill()
        wait_until(lambda: all(map(gone, ranks)), 10)
        os.kill(forked, signal.SIGKILL)  # multiprocessing's tracker lives as long as it does
        wait_until(lambda: all(map(gone, support.marked_pids() - before - {notebook.pid})), 10)
        assert time.monotonic() - began < GONE_S


def test_a_failure_leaves_the_users_own_children_and_handlers_alone_and_the_next_run_works(cell: Cells) -> None:
    """Clean-up by name (pkill) kills strangers."""
    mine = subprocess.Popen(["sleep", "1000"])
    handler = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        names = cell("""
            import os, signal, subprocess
            def raises(): raise ValueError
            def dies(): subprocess.Popen(["sleep", "1000"]), os.kill(os.getpid(), signal.SIGKILL)
            def good(): return 1
        """)
        for bad in (names.raises, names.dies):
            with pytest.raises(nbddp.NbddpError):
                run(bad)
            assert run(names.good).values == [1, 1]
        assert mine.poll() is None
    finally:
        signal.signal(signal.SIGCHLD, handler)
        mine.kill()
        mine.wait()


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
    paths = "/dev/shm/*", f"{place}/*", f"{tempfile.gettempdir()}/*", "/tmp/*nbddp*"  # the last: whatever TMPDIR is
    before = [{*glob.glob(path, include_hidden=True)} for path in paths]
    going = start(names.train, torch.ones(1 << 20))
    wait_for_ranks(in_folder, "sleep")
    shared, (folder,), *others = ({*glob.glob(path, include_hidden=True)} - old for path, old in zip(paths, before))
    going.stop(0)
    assert (os.path.exists(folder), others) == (False, [set(), set()])
    assert not {path for path in shared if str(os.getpid()) in path}


def test_shared_memory_and_semaphores_of_a_stopped_run_are_removed_and_no_others(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import multiprocessing, os, time, torch, nbddp
        from multiprocessing.shared_memory import SharedMemory
        def left_by_torch(): open(f"/dev/shm/torch_{os.getpid()}_1_0", "w").close()
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
    """)
    name = f"nbddp-test-{os.getpid()}-{time.monotonic_ns()}"
    before = set(os.listdir("/dev/shm"))
    going = run(names.train, name, wait=False)
    wait_for_ranks(in_folder, "sleep")
    made = set(os.listdir("/dev/shm")) - before
    kinds = {"psm_": 2, "sem.mp-": 2, "torch_": 6, name: 2}
    assert {kind: sum(entry.startswith(kind) for entry in made) for kind in kinds} == kinds
    going.stop(0)
    assert set(os.listdir("/dev/shm")) - before == set()
    others = [Path("/dev/shm", name), Path(f"/dev/shm/torch_{os.getpid()}_1_0")]  # the first is somebody else's
    lines = [f"{command}:/{name}:shared_memory\n" for command in ("REGISTER", "UNREGISTER")]
    Path("tracked").write_text("".join([*lines, f"PID:{os.getpid()}:torch\n"]))
    for each in others:
        each.touch()
    tracked.remove_rest(str(in_folder))
    for each in others:
        each.unlink()  # raises if it was removed


def test_a_run_for_which_the_notebook_cannot_open_another_file_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "recv_fds", lambda end, *_: (end.recv(1), [], 0, None))  # as Linux does then
    with pytest.raises(nbddp.NbddpError, match=r"too many open files; raise the limit \(ulimit -n\)"):
        run(lambda: [1], nprocs=1, timeout=20)


def test_values_of_earlier_runs_are_freed_unless_somebody_holds_them(cell: Cells) -> None:
    train = cell("import torch\ndef train(): return torch.ones(1 << 20)").train

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    held = run(train)
    for _ in range(2):
        run(train)
    before, last = mappings(), weakref.ref(nbddp.last_run())
    for _ in range(12):
        run(train)
    assert mappings() <= before + 6
    assert (last(), held.value.sum().item()) == (None, 1 << 20)
