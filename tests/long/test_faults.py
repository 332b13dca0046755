"""Drawn faults at drawn moments in a real kernel: each ends as it has to, leaves nothing, and the next call works.

``NBDDP_SEED`` draws other ones, ``NBDDP_CASES=200`` (with ``--timeout=0``) more, ``NBDDP_CASE=17`` only that one.
"""

import contextlib
import os
import queue
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.long import faults
from tests.long.faults import GRACE_S, Case, draw
from tests.support import Notebook, Reply, gone, is_fork_server, marked_pids, ranks_of, wait_until, wait_until_alone

SEED = int(os.environ.get("NBDDP_SEED", "1"))
ONLY = os.environ.get("NBDDP_CASE")
CASES = [draw(SEED, int(ONLY))] if ONLY else [draw(SEED, n) for n in range(int(os.environ.get("NBDDP_CASES", "8")))]
# Interrupts while ranks start, a session opens, a push ends; a fork server killed before a fork, as a cell ends.
FOUND = [(1, 24), (1, 29), (2, 44), (2, 88), (4, 22), (4, 28), (4, 71), (53, 136), (54, 140), (101, 9)]
LONGEST_S = 15.0
GONE_S = 2.0
IMPORTED_S = 30.0  # the fork server sees that the kernel is gone as soon as it has imported torch

SETUP = f"""
%load_ext nbddp
import faulthandler, gc, json, re, signal
faulthandler.register(signal.SIGUSR1, open("stacks", "w"))
from nbddp.kernel import attempt, start
from tests.support import Surroundings
patience = start.OF_A_RUN
start.OF_A_RUN = attempt.Patience(0.3, ({GRACE_S}, 0.0))
session = run = None
def in_words(value, run):
    history = run and {{name: series.values.tolist() for name, series in run.history.items()}}
    print(json.dumps(dict(value=value, history=history)))
def stop_soon(delay_s, grace_s):
    last = nbddp.last_run()
    def stop():
        at = time.monotonic() + delay_s
        while (run := nbddp.last_run()) is last: time.sleep(0.001)
        time.sleep(max(0.0, at - time.monotonic()))
        run.stop(grace_s)
    threading.Thread(target=stop, name="stops", daemon=True).start()
def again():
    '''Does the next run work, and the next session cell; was this session lost?'''
    global session
    for each in nbddp.runs(): each.stop(0)
    if session is not None and not session.lost:
        try: session.cell("pass")
        except nbddp.NbddpError: pass  # a rank was killed after its last cell
    lost = session.lost if session is not None else ""
    if session is None or lost:
        if session is not None: session.close()
        session = nbddp.Session(nprocs=2, device="cpu")
    session.cell("import nbddp; x = nbddp.all_reduce(1)")
    works = session.pull("x") == session.nprocs
    session.close()
    session = None
    return works and nbddp.run(lambda: nbddp.all_reduce(1), nprocs=2, device="cpu", show=False).values == [2, 2], lost
def changed():
    gc.collect()
    found = before.changed()
    fds = re.findall("'(.+?)': ", found.pop("fds", ""))  # ipykernel's, for each thread that prints; IPython's
    fds = [each for each in fds if "eventfd" not in each and "history.sqlite" not in each]
    return {{**found, **({{"fds": fds}} if fds else {{}})}}
"""


@pytest.fixture
def kernel(notebook: Notebook, in_folder: Path) -> Iterator[Notebook]:
    notebook.ok(f"import os; os.chdir({str(in_folder)!r})\n{SETUP}\nPROGRAMS = {faults.PROGRAMS!r}\nexec(PROGRAMS)")
    notebook.ok("path = 'first.pt'\nfor _ in range(2): again()\nbefore = Surroundings()")
    yield notebook
    notebook.ok("start.OF_A_RUN = patience")


def strike(kernel: Notebook, case: Case) -> None:
    """Do to a running cell what the case says, from outside."""
    if case.fault == "interrupt":
        for pause_s in case.pauses_s:
            kernel.interrupt(case.how)
            time.sleep(pause_s)
    elif victim := find_victim(kernel, case):
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        wait_until(lambda: gone(victim))  # a busy machine takes a while, and the next call would meet a dying server


def find_victim(kernel: Notebook, case: Case) -> int | None:
    """Return the process to kill, as soon as there is one; None if there's none to come: the cell may be over."""
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < (deadline if case.steps == faults.ENDLESS else deadline - LONGEST_S + 0.5):
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks = sorted(ranks_of(kernel.pid))
            # An endless run may begin after its end, with another server, and would go on.
            if case.fault == "fork server killed" and (case.steps != faults.ENDLESS or len(ranks) == case.nprocs):
                return next((each.pid for each in psutil.Process(kernel.pid).children() if is_fork_server(each)), None)
            if case.fault != "fork server killed" and len(ranks) == case.nprocs:
                mine = ranks[case.ranks[0]]
                if case.fault == "rank killed":
                    return mine
                if workers := psutil.Process(mine).children():
                    return workers[0].pid
    return None


def carry_out(kernel: Notebook, case: Case, references: dict[str, Any]) -> Iterator[str]:
    """Yield what's wrong with how this case ended, and with what it left."""
    kernel.ok(f"run = session = value = None\npath = 'reference-{case.index}.pt'")
    if case.may_succeed and case.reference not in references:
        references[case.reference] = kernel.ok(f"ref = {case.reference}\nin_words(ref.value, ref)\ndel ref").json()
    first = f"path = '{case.index}.pt'\nprint('go', flush=True)\n"
    if case.fault == "stop":
        first += f"stop_soon({case.delay_s}, {case.grace_s})\n"
    message = kernel.begin(first + case.source)
    kernel.shown_so_far(message, "go")
    if case.fault in faults.STRUCK:
        time.sleep(case.delay_s)
        strike(kernel, case)
    try:
        reply = kernel.end_of(message, LONGEST_S)
    except queue.Empty:
        if case.fault != "interrupt" or len(case.pauses_s) < 2:
            raise
        # A plain kernel, too, loses replies if it's interrupted again as a cell ends: a ninth of them by a third one.
        kernel.ok("'it is usable'")
        reply = Reply("error", "KeyboardInterrupt")
    if reply.status == "ok":
        got, want = kernel.ok("in_words(value, run)").json(), references.get(case.reference)
        if not case.may_succeed:
            yield "it succeeded"
        elif got["value"] != want["value"] or got["history"] not in (None, want["history"]):
            yield f"it returned {got}, and without the fault {want}"
    elif not case.may_fail or not case.is_right(reply.ename, reply.evalue, reply.traceback):
        yield f"it ended with {reply.ename}: {reply.evalue}\n{reply.traceback}"
    works, lost = kernel.ok("print(json.dumps(again()))").json()
    if not works:
        yield "the next call doesn't work"
    if lost and not case.may_lose_ranks:
        yield f"the session is lost: {lost}"
    wait_until_alone(kernel.pid)
    deadline = time.monotonic() + GONE_S
    while changed := kernel.ok("print(json.dumps(changed()))").json():
        if time.monotonic() > deadline:
            yield f"the kernel isn't as it was: {changed}"
            kernel.ok("before = Surroundings()")


def check(kernel: Notebook, cases: list[Case]) -> None:
    references: dict[str, Any] = {}
    failed = []
    for case in cases:
        began, wrong = time.monotonic(), list[str]()
        try:
            wrong.extend(carry_out(kernel, case, references))
        except (AssertionError, queue.Empty) as error:
            os.kill(kernel.pid, signal.SIGUSR1)
            time.sleep(0.5)
            wrong.append(f"it hangs, or the kernel is no longer usable: {error}\n{Path('stacks').read_text()}")
        print(f"{case.index} {case.call} {case.program} {case.fault}: {time.monotonic() - began:.1f} s", *wrong)
        if wrong:
            failed.append("\n".join([f"NBDDP_SEED={case.seed} NBDDP_CASE={case.index}", str(case), *wrong]))
        if "hangs" in "".join(wrong):
            break
    assert not failed, "\n\n".join(failed)


def test_faults_at_random_moments_end_as_they_have_to_and_leave_nothing(kernel: Notebook) -> None:
    check(kernel, CASES)


def test_cases_that_found_a_defect_stay_right(kernel: Notebook) -> None:
    check(kernel, [draw(seed, index) for seed, index in FOUND])


def left_by(processes: set[int], files: set[str], temporary: str) -> list[str]:
    """Return what a killed kernel has left, in addition to these processes and files."""
    found = {*os.listdir(temporary), *os.listdir("/dev/shm")} - files
    alive = [str(pid) for pid in marked_pids() - processes if not gone(pid)]
    torchs = {path.parent.name for path in Path(temporary).glob("tmp*/_remote_*")}  # created by torch 2.6 in the kernel
    return [*alive, *(name for name in found - torchs if "torchinductor" not in name)]


def test_a_kernel_killed_at_any_moment_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    for case in CASES:
        rng, processes, files = random.Random(f"{case}"), marked_pids(), set(os.listdir("/dev/shm"))
        with (
            tempfile.TemporaryDirectory(prefix="nbt-", dir="/tmp") as temporary,
            Notebook({"TMPDIR": temporary}, cwd=tmp_path) as notebook,
        ):
            notebook.ok(f"{SETUP}\nPROGRAMS = {faults.PROGRAMS!r}\nexec(PROGRAMS)\npath = '{case.index}.pt'")
            is_warm = rng.random() < 0.8  # else it's killed while the fork server imports torch
            notebook.ok("again()" if is_warm else "")
            notebook.shown_so_far(notebook.begin(f"print('go', flush=True)\n{case.source}"), "go")
            time.sleep(case.delay_s if is_warm else rng.uniform(0, 5))
            notebook.kill()
            deadline = time.monotonic() + (GONE_S if is_warm else IMPORTED_S)
            while left := left_by(processes, files, temporary):
                assert time.monotonic() < deadline, f"NBDDP_SEED={SEED} NBDDP_CASE={case.index}\n{case}\n{left}"
