"""However a kernel or a script ends, no rank is left; and many runs don't make a kernel grow."""

import json
import subprocess
import sys
import time
from pathlib import Path

from tests import support
from tests.support import GONE_S, Notebook, gone, marked_pids, out, ranks_of, script, wait_until, wait_until_alone
from tests.test_end import SOON_S, begin_runs, source_of, wait_for_ranks


def test_a_restarted_kernel_leaves_no_ranks_and_can_run_again(own_notebook: Notebook, in_folder: Path) -> None:
    """Background runs and a cell that goes on; "swallow everything" ignores what ends other ranks."""
    begin_runs(own_notebook, in_folder, ["sleep", "swallow everything"])
    own_notebook.ok("import nbddp\nopen_session = nbddp.Session(nprocs=2, device='cpu')")
    own_notebook.ok(f"os.chdir({str(in_folder)!r})" + source_of("sleep"))
    own_notebook.begin("nbddp.run(train, nprocs=2, device='cpu')")
    wait_for_ranks(in_folder, "sleep")
    old = own_notebook.pid
    own_notebook.restart()
    assert own_notebook.pid != old
    wait_until_alone(own_notebook.pid)
    reply = own_notebook.ok("import nbddp\nprint(nbddp.run(lambda: 5, nprocs=2, device='cpu', show=False).values)")
    assert reply.shown == "[5, 5]\n"


def test_a_script_with_a_background_run_ends_without_waiting_for_it(in_folder: Path) -> None:
    """multiprocessing would join the ranks at exit, forever."""
    began = source_of("swallow everything") + (
        "going = nbddp.run(train, nprocs=2, device='cpu', wait=False, show=False)\n"
        "while len([n for n in os.listdir('.') if n.startswith('rank-')]) < 2: time.sleep(0.01)\n"
        "print(time.monotonic())"
    )
    ended = script(began)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert time.monotonic() - float(ended.stdout) < SOON_S


def test_a_notebook_that_ends_leaves_no_background_run(own_notebook: Notebook, in_folder: Path) -> None:
    begin_runs(own_notebook, in_folder, ["swallow everything"])
    began = time.monotonic()
    own_notebook.cell("exit")
    wait_until(lambda: gone(own_notebook.pid), SOON_S)
    assert time.monotonic() - began < SOON_S
    wait_until(lambda: not {pid for pid in marked_pids() - support.at_start if not gone(pid)}, GONE_S)


def test_a_killed_scripts_ranks_end_in_time(in_folder: Path) -> None:
    main = "\nif __name__ == '__main__':\n    nbddp.run(train, nprocs=2, device='cpu')\n"
    Path("train_script.py").write_text(source_of("hold the GIL in C") + main)
    before = marked_pids()
    process = subprocess.Popen([sys.executable, "train_script.py"], stdout=subprocess.DEVNULL)
    wait_for_ranks(in_folder, "hold the GIL in C")
    ranks = set(ranks_of(process.pid)) - before
    assert len(ranks) == 2
    process.kill()
    began = time.monotonic()
    process.wait()
    wait_until(lambda: all(map(gone, ranks)), 10)
    assert time.monotonic() - began < GONE_S


def test_runs_do_not_grow_the_kernel(notebook: Notebook) -> None:
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
    late = json.loads(out(notebook.ok("ran(80)", timeout_s=100)))
    maps, descriptors, threads, nbytes = (after - before for before, after in zip(early, late))
    assert maps <= 10
    assert descriptors <= 2  # ipykernel's own
    assert threads <= 0
    assert nbytes < 16 << 20
