"""However a run ends, it ends in time and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import nbddp
from nbddp import versions, wire
from nbddp.kernel.attempt import Attempt
from nbddp.kernel.site import NotebookCrew
from tests.support import (
    GONE_S,
    Cells,
    Notebook,
    listening_ports,
    marked_pids,
    open_fds,
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


# ---------------------------------------------------------------------------- stop()


@pytest.mark.parametrize("body", BODIES)
def test_stop_ends_ranks_in_time_whatever_they_do(cell: Cells, in_folder: Path, body: str) -> None:
    going = start(cell(_source(body)).train)
    _wait_for_ranks(in_folder, body)
    began = time.monotonic()
    going.stop(0.5)
    assert time.monotonic() - began < 0.5 + GONE_S
    assert going.state == "stopped"
    assert going.error is None


@pytest.mark.parametrize("body", ["sleep", "subprocess"])
def test_stop_returns_before_the_grace_if_the_ranks_end_sooner(cell: Cells, in_folder: Path, body: str) -> None:
    going = start(cell(_source(body)).train)
    _wait_for_ranks(in_folder, body)
    began = time.monotonic()
    going.stop(60)
    assert time.monotonic() - began < SOON_S


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


def test_stop_can_be_called_twice_and_after_the_end(cell: Cells) -> None:
    names = cell("import time\ndef train(): time.sleep(1000)\ndef quick(): return 1")
    going = run(names.train, wait=False)  # stopped while it starts
    going.stop(0)
    going.stop(0)
    assert going.state == "stopped"
    done = run(names.quick)
    done.stop()
    assert (done.state, done.values) == ("finished", [1, 1])


def test_stop_can_be_called_from_five_threads_at_once(cell: Cells) -> None:
    names = cell("import time\ndef train(): time.sleep(1000)")
    going = start(names.train)
    threads = [threading.Thread(target=going.stop, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert going.state == "stopped"
    assert not any(thread.is_alive() for thread in threads)


# ---------------------------------------------------------------------------- interrupt


@pytest.fixture
def patient(notebook: Notebook) -> Iterator[Notebook]:
    """A notebook that gives its ranks a minute: what ends within seconds has not waited for that."""
    notebook.ok("from nbddp.kernel import state\ngrace_s, state.STOP_GRACE_S = state.STOP_GRACE_S, 60.0")
    yield notebook
    notebook.ok("state.STOP_GRACE_S = grace_s")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "killpg"])
def test_one_interrupt_stops_the_run_and_the_next_run_works(patient: Notebook, in_folder: Path, how: str) -> None:
    """VS Code signals the kernel alone, Jupyter its whole process group."""
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


_READY = wire.encode(wire.Ready(versions.package_folder()))
_LATE = """
import os, socket, time, nbddp
class Sleeps(Exception):
    def __reduce__(self): return time.sleep, (1000,)
def returned(): return Sleeps()
def raised(): raise Sleeps()
def writes(data, goes_on):
    nbddp.barrier()
    for fd in range(3, 100) if nbddp.rank() else ():
        try:
            if socket.socket(fileno=os.dup(fd)).family == socket.AF_UNIX:
                os.write(fd, data)
        except OSError: pass
    if goes_on: time.sleep(1000)
    return nbddp.rank()
"""


@pytest.mark.parametrize("body", ["returned", "raised"])
def test_two_interrupts_end_a_run_whose_result_never_unpickles(notebook: Notebook, body: str) -> None:
    notebook.ok(_LATE)
    message = notebook.begin(f"nbddp.run({body}, nprocs=2, device='cpu', name='late')")
    time.sleep(1.0)  # until the ranks have reported
    began = time.monotonic()
    notebook.interrupt()
    time.sleep(0.2)
    notebook.interrupt()
    reply = notebook.end_of(message)
    assert (reply.status, reply.ename) == ("error", "KeyboardInterrupt")
    assert time.monotonic() - began < SOON_S / 2
    wait_until_alone(notebook.pid)
    assert notebook.ok("nbddp.last_run().state").shown == "'stopped'\n"
    assert notebook.ok("nbddp.run(lambda: 5, nprocs=2, device='cpu', show=False).values").shown.strip() == "[5, 5]"


@pytest.mark.slow
@pytest.mark.parametrize("body", ["returned", "raised"])
def test_the_timeout_ends_a_run_whose_result_never_unpickles(cell: Cells, body: str) -> None:
    with pytest.raises(nbddp.RunTimeout, match="unpickling"):
        run(getattr(cell(_LATE.replace("1000", "4")), body), timeout=1)


_GARBAGE = {
    "half a length": b"\0\0",
    "half a message": b"\0\0\1\0half",
    "a huge length": b"hello",
    "a negative length": b"\xff\xff\xff\xff",
    "no pickle": b"\0\0\0\3abc",
    "no message": b"\0\0\0\4" + b"K\1.\0",
    "a whole message": struct.pack("!i", len(_READY)) + _READY,
}


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("data", _GARBAGE)
def test_a_stray_write_to_a_ranks_channel_is_an_error_of_that_rank(cell: Cells, data: str, goes_on: bool) -> None:
    written = _GARBAGE[data]
    began = time.monotonic()
    if data == "a whole message":
        going = run(cell(_LATE).writes, written, goes_on, wait=False)
        if goes_on:
            time.sleep(1.0)
            going.stop(0)
        assert going.wait(20).state == ("stopped" if goes_on else "finished")
        return
    with pytest.raises(nbddp.RankError, match="wrote to a file descriptor") as caught:
        run(cell(_LATE).writes, written, goes_on)
    assert caught.value.rank == 1
    assert time.monotonic() - began < SOON_S


def test_interrupts_end_a_run_with_half_a_message_on_a_channel(notebook: Notebook) -> None:
    notebook.ok(_LATE)
    message = notebook.begin("nbddp.run(writes, (b'\\0\\0\\1\\0half', True), nprocs=2, device='cpu')")
    time.sleep(1.0)
    began = time.monotonic()
    notebook.interrupt()
    time.sleep(0.2)
    notebook.interrupt()
    assert notebook.end_of(message).ename == "KeyboardInterrupt"
    assert time.monotonic() - began < SOON_S / 2
    wait_until_alone(notebook.pid)


def test_an_interrupt_stops_run_all(notebook: Notebook, in_folder: Path) -> None:
    notebook.ok(f"import os; os.chdir({str(in_folder)!r})" + _source("sleep"))
    first = notebook.begin("nbddp.run(train, nprocs=2, device='cpu')", stop_on_error=True)
    second = notebook.begin("after_interrupt = True")
    _wait_for_ranks(in_folder, "sleep")
    notebook.interrupt()
    assert notebook.end_of(first).ename == "KeyboardInterrupt"
    assert notebook.end_of(second).status == "aborted"
    assert notebook.ok("'after_interrupt' in globals()").shown.strip() == "False"


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_kernels_handlers_environment_and_threads_are_as_before_the_runs(
    own_notebook: Notebook, in_folder: Path
) -> None:
    own_notebook.ok(_source("sleep"))
    own_notebook.ok(f"""
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
    own_notebook.ok("look()")
    before = own_notebook.ok("print(json.dumps(look()))").json()
    message = own_notebook.begin("nbddp.run(train, nprocs=2, device='cpu', env={'X': '1'}, seed=1)")
    _wait_for_ranks(in_folder, "sleep")
    own_notebook.interrupt()
    assert own_notebook.end_of(message).ename == "KeyboardInterrupt"
    own_notebook.cell("nbddp.run(lambda: 1 / 0, nprocs=2, device='cpu')")
    own_notebook.ok("nbddp.run(lambda: 1, nprocs=2, device='cpu').values")
    fds = Counter(before.pop("fds"))

    def settled() -> bool:
        """ipykernel keeps an eventfd for each thread that touched stdout, and looks for dead ones every 10 s."""
        after = own_notebook.ok("print(json.dumps(look()))").json()
        extra = Counter(after.pop("fds")) - fds
        assert after == before
        return not [kind for kind in extra if "history.sqlite" not in kind]

    wait_until(settled, 20)


# ---------------------------------------------------------------------------- the kernel goes


def _begin_runs(notebook: Notebook, folder: Path, bodies: Iterable[str]) -> None:
    """Begin a background run for each body, each in a folder of its own, and wait for the ranks."""
    for number, body in enumerate(bodies):
        own = folder / str(number)
        own.mkdir()
        notebook.ok(f"import os; os.chdir({str(own)!r})" + _source(body))
        notebook.ok(f"going_{number} = nbddp.run(train, nprocs=2, device='cpu', wait=False, show=False)")
        _wait_for_ranks(own, body)


@pytest.mark.slow
def test_a_killed_kernels_ranks_end_in_time_whatever_they_do(in_folder: Path) -> None:
    """SIGKILL leaves no code to run: ranks, their children, sockets and folders must go by themselves."""
    before = marked_pids()
    *others, last = BODIES
    with Notebook() as notebook:
        # killed here and not by a fixture: what is left must be looked at with the kernel gone
        _begin_runs(notebook, in_folder, others)
        notebook.ok(f"os.chdir({str(in_folder)!r})" + _source(last))
        notebook.begin("nbddp.run(train, nprocs=2, device='cpu')")
        _wait_for_ranks(in_folder, last)
        assert len(ranks_of(notebook.pid)) >= 2 * len(BODIES)
        began = time.monotonic()
        notebook.kill()
        wait_until(lambda: not {p for p in marked_pids() - before if _runs(p) and p != notebook.pid}, 10)
        assert time.monotonic() - began < GONE_S


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_killed_scripts_ranks_end_in_time(in_folder: Path, start_method: str) -> None:
    import subprocess
    import sys

    Path("train_script.py").write_text(
        _source("hold the GIL in C")
        + f"\nif __name__ == '__main__':\n    nbddp.run(train, nprocs=2, device='cpu', start_method={start_method!r})\n"
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_script_with_a_background_run_ends_without_waiting_for_it(in_folder: Path) -> None:
    """multiprocessing would join the ranks at exit, for ever."""
    Path("train_script.py").write_text(
        _source("swallow everything")
        + "\nif __name__ == '__main__':\n"
        + "    going = nbddp.run(train, nprocs=2, device='cpu', wait=False, show=False)\n"
        + "    while len([n for n in os.listdir('.') if n.startswith('rank-')]) < 2: time.sleep(0.01)\n"
    )
    ended = script("import runpy; runpy.run_path('train_script.py', run_name='__main__')", timeout_s=60)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.slow
def test_sigterm_to_a_script_ends_its_ranks(in_folder: Path) -> None:
    import subprocess
    import sys

    Path("train_script.py").write_text(
        _source("sleep") + "\nif __name__ == '__main__':\n    nbddp.run(train, nprocs=2, device='cpu')\n"
    )
    process = subprocess.Popen([sys.executable, "train_script.py"], stdout=subprocess.DEVNULL)
    _wait_for_ranks(in_folder, "sleep")
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM


# ---------------------------------------------------------------------------- while it runs, and after


def test_only_loopback_addresses_listen(cell: Cells, in_folder: Path) -> None:
    """A plain TCPStore listens on all interfaces: anyone on the network could feed it pickles."""
    going = start(cell(_source("collective")).train)
    _wait_for_ranks(in_folder, "collective")
    addresses = {address for pid in [os.getpid(), *ranks_of(os.getpid())] for address, _ in listening_ports(pid)}
    going.stop(0)
    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_run_names_one_folder_in_tmp_and_nothing_in_shared_memory(cell: Cells, in_folder: Path) -> None:
    """What has no name cannot be left behind. The fork server removes the folder when the notebook kernel is killed."""
    import tempfile

    import torch

    names = cell("""
        import nbddp, time
        def train(data):
            print("x" * 100_000)
            open(f"rank-{nbddp.rank()}", "w").close()
            time.sleep(1000)
    """)
    before = set(os.listdir("/dev/shm")), set(os.listdir(tempfile.gettempdir()))
    going = start(names.train, torch.ones(1 << 20))
    _wait_for_ranks(in_folder, "sleep")
    during = set(os.listdir("/dev/shm")), set(os.listdir(tempfile.gettempdir()))
    (folder,) = (Path(tempfile.gettempdir(), name) for name in during[1] - before[1])
    going.stop(0)
    assert not folder.exists()
    assert not {name for name in during[0] - before[0] if str(os.getpid()) in name}


@pytest.mark.slow
def test_a_run_that_is_over_keeps_neither_its_crews_nor_the_notebooks_objects(cell: Cells) -> None:
    names = cell("""
        import time
        class Data: pass
        def finish(data): return 1
        def fail(data): raise ValueError("boom")
        def sleep(data): time.sleep(1000)
    """)
    ended = [run(names.finish, names.Data())]
    going = [
        run(names.fail, names.Data(), wait=False, max_restarts=1),
        run(names.sleep, names.Data(), wait=False, timeout=2),
        start(names.sleep, names.Data()),
    ]
    going[-1].stop()
    for each in going:
        with contextlib.suppress(nbddp.NbddpError):
            each.wait()
    assert [each.state for each in [*ended, *going]] == ["finished", "failed", "failed", "stopped"]
    gc.collect()
    left = [type(each).__name__ for each in gc.get_objects() if type(each) in (Attempt, NotebookCrew, names.Data)]
    assert left == []


@pytest.mark.slow
def test_fifty_runs_leave_no_fd_no_thread_and_no_memory(cell: Cells) -> None:
    names = cell("import torch\ndef train(data): return data.sum()")
    import torch

    data = torch.ones(1 << 20)
    for _ in range(5):
        run(names.train, data)
    fds, threads, memory = len(open_fds()), threading.active_count(), psutil.Process().memory_info().rss
    for _ in range(50):
        assert run(names.train, data).values == [1 << 20, 1 << 20]
    assert len(open_fds()) == fds
    assert threading.active_count() == threads
    assert psutil.Process().memory_info().rss - memory < 20 << 20


def test_the_users_own_children_and_handlers_are_left_alone(cell: Cells) -> None:
    """Clean-up by name (pkill) kills strangers."""
    import subprocess

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


def test_the_ranks_exit_handlers_run(cell: Cells, in_folder: Path) -> None:
    """wandb and friends finish there."""
    names = cell("""
        import atexit, nbddp
        def train():
            rank = nbddp.rank()
            atexit.register(lambda: open(f"finished-{rank}", "w").close())
    """)
    run(names.train)
    assert sorted(os.listdir(in_folder)) == ["finished-0", "finished-1"]


@pytest.mark.gpu
def test_no_gpu_memory_is_left_after_stop_and_kill(cell: Cells, in_folder: Path) -> None:
    import torch

    names = cell("""
        import nbddp, time, torch
        def train():
            hog = torch.ones(1 << 28, device=nbddp.device())
            open(f"rank-{nbddp.rank()}", "w").close()
            time.sleep(1000)
    """)
    torch.zeros(1).cuda()
    before = torch.cuda.mem_get_info()[0]
    going = nbddp.run(names.train, nprocs=1, wait=False, show=False)
    _wait_for_ranks(in_folder, "sleep", 1)
    assert torch.cuda.mem_get_info()[0] < before - (1 << 29)
    going.stop(0)
    wait_until(lambda: torch.cuda.mem_get_info()[0] > before - (64 << 20))


@pytest.mark.slow
def test_killed_dataloader_workers_leave_no_sockets(cell: Cells, own_notebook: Notebook, in_folder: Path) -> None:
    """Each batch travels by a socket in a folder, which nobody removes after a SIGKILL."""
    source = """
        import torch, time
        class Endless(torch.utils.data.Dataset):
            def __len__(self): return 10**9
            def __getitem__(self, i): return torch.ones(10)
        def train():
            torch.multiprocessing.set_sharing_strategy("file_descriptor")
            for i, batch in enumerate(torch.utils.data.DataLoader(Endless(), 4, num_workers=2)):
                if i == 5: print(torch.multiprocessing.current_process()._config["tempdir"], flush=True)
                time.sleep(0.01)
    """
    going = start(cell(source).train)
    wait_until(lambda: all(going.logs(rank) for rank in (0, 1)))
    folder = going.logs(0).strip()
    assert os.listdir(folder), "this test sees no socket"
    going.stop(0)
    assert not os.path.exists(folder)

    own_notebook.ok(source)
    own_notebook.ok("import nbddp, multiprocessing.util\nrun = nbddp.run(train, nprocs=2, device='cpu', wait=False)")
    own_notebook.ok("import time\nwhile not all(run.logs(r) for r in (0, 1)): time.sleep(0.01)")
    theirs = own_notebook.ok("print(run.logs(0))").shown.strip()
    assert os.listdir(theirs)
    own_notebook.kill()
    wait_until(lambda: not os.path.exists(theirs))


@pytest.mark.parametrize("threads", [True, False])
def test_blocks_of_much_data_are_closed_after_the_runs(
    threads: bool, cell: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread closes it; where the system has none to give, the run's own does."""
    begin = threading.Thread.start

    def start_thread(thread: threading.Thread) -> None:
        if thread.name == "nbddp-give-back" and not threads:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start_thread)
    before, data = _open_blocks(), torch.ones(16 << 20)
    going = [run(cell("def total(x): return float(x.sum())").total, data, wait=False) for _ in range(3)]
    assert [each.wait(60).values for each in going] == [[16.0 * 2**20] * 2] * 3
    if threads:
        wait_until(lambda: _open_blocks() <= before, what="the blocks are closed")
    assert _open_blocks() <= before


def _open_blocks() -> Counter[str]:
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return Counter({link: count for link, count in found.items() if "nbddp-total" in link})
