"""Faults in real Jupyter kernels, for what only they can suffer or suffer differently."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import shutil
import signal
import subprocess
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable
from typing import Any

import psutil

from tests.faults import programs
from tests.faults.cases import BUSY_S, Case
from tests.faults.pace import Patience
from tests.faults.suite import Verdict
from tests.support import Notebook, Reply, ranks_of

_GRACE_S = 0.5
_LASTING_S = 0.6  # a run that ends by itself

_SETUP = f"""
%load_ext nbddp
import json
from collections import Counter
from nbddp.forkserver import server as forkserver
from nbddp.kernel import state
from tests.support import Surroundings, _kind, open_fds, wait_until
state.STOP_GRACE_S = {_GRACE_S}

def _changed():
    found = _before.changed()
    found.pop("shared_memory", None)  # the whole machine's; the drivers have a /dev/shm of their own
    # ipykernel keeps an eventfd for each thread that touched stdout, and looks for dead ones every 10 s.
    more = Counter(map(_kind, open_fds().values())) - Counter(map(_kind, _before.fds.values()))
    found.pop("fds", None)
    return {{**found, **({{"fds": str(more)}} if set(more) - {{"anon_inode:[eventfd]"}} else {{}})}}

def _goes_on():
    if session is None: return "was not opened"
    if session._ranks.crew is None or session._ranks.lost: session.restart()
    values = session.run(plain, (42, 0.02), show=False).values
    session.close()
    return "goes on" if values == [(42, rank, 2.0) for rank in range(2)] else str(values)

def _settled(seconds=3.0):
    import time
    from tests.faults.pace import Patience
    patience = Patience(seconds)
    while (found := _changed()) and not patience.is_over(): time.sleep(0.05)
    return found
"""


class NotebookKernel:
    """A real kernel that stays until a case ends it, and a client that reads all of its messages."""

    def __init__(self) -> None:
        self.mark = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._temp = tempfile.mkdtemp(prefix="nbk-", dir="/tmp")
        self.notebook = Notebook({"NBDDP_FAULTS": self.mark, "TMPDIR": self._temp}, stderr=subprocess.DEVNULL)
        self.subshell: str | None = None
        self._set_up()

    def _set_up(self) -> None:
        self.notebook.ok(_SETUP)
        self.notebook.ok(programs.CELL)
        for _ in range(2):
            self.notebook.ok("nbddp.run(plain, (1, 0.1), nprocs=2, device='cpu', show=True).values")
        self.notebook.ok("with nbddp.session(nprocs=2, device='cpu') as session: session.run(plain, (1, 0.1))")
        # A message of over 64 kB, as a picture can be, starts a thread of pyzmq's that stays.
        self.notebook.ok("display({'text/plain': 'x' * 100_000}, raw=True)")
        self.subshell = self._make_subshell()
        self.notebook.ok("wait_until(lambda: forkserver.importing() is None)")  # torch makes a folder
        self.notebook.ok("import gc; gc.collect(); _before = Surroundings(); _before.changed()")

    def _make_subshell(self) -> str | None:
        """As JupyterLab does for widgets' messages, where ipykernel knows subshells (7 and later)."""
        client: Any = self.notebook._client
        message = client.session.msg("create_subshell_request", {})
        client.control_channel.send(message)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                reply = client.get_control_msg(timeout=1)
                if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                    return reply["content"].get("subshell_id")  # type: ignore[no-any-return]
        return None

    @property
    def pid(self) -> int:
        return self.notebook.pid

    def begin(self, code: str) -> str:
        """Start a cell as JupyterLab does, which names it: so the run has a page to show itself in."""
        client: Any = self.notebook._client
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        message = client.session.msg("execute_request", content, metadata={"cellId": uuid.uuid4().hex})
        client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def send_comm(self, kind: str, comm_id: str, data: dict[str, Any]) -> None:
        """A page's message to a widget."""
        client: Any = self.notebook._client
        message = client.session.msg(kind, {"comm_id": comm_id, "data": data})
        message["header"]["subshell_id"] = self.subshell
        client.shell_channel.send(message)

    def processes(self) -> dict[int, str]:
        """Everything with this kernel's mark but itself, its fork server and its resource tracker."""
        found = {}
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
                with open(f"/proc/{int(entry)}/environ", "rb") as file:
                    if self.mark.encode() not in file.read():
                        continue
                process = psutil.Process(int(entry))
                command = " ".join(process.cmdline())
                kept = "the fork server of nbddp" in command or "multiprocessing.resource_tracker" in command
                if process.pid != self.pid and not (kept and process.ppid() == self.pid):
                    found[process.pid] = f"{process.status()} {command[:150]}"
        return found

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.notebook.close()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._temp, ignore_errors=True)


# ---------------------------------------------------------------------------- a case


def _code(case: Case, seconds: float) -> str:
    token = case.runs[0]["token"]
    options = "nprocs=2, device='cpu'"
    if case.label == "cell":
        lines = f"""
            %%ddp -n 2 --device cpu --as going
            import time, nbddp
            for step in range({max(1, int(seconds / 0.01))}):
                time.sleep(0.01)
                nbddp.log(loss=1 / (step + 1))
        """
        return textwrap.dedent(lines).lstrip()
    if case.label == "background":
        return f"going = nbddp.run(plain, ({token}, {seconds}), {options}, wait=False)"
    if case.label == "session":
        opened = f"session = None; session = nbddp.session({options})"
        return f"{opened}; going = session.run(plain, ({token}, {seconds}))"
    program = "gil" if case.label == "stubborn" else "plain"
    return f"going = nbddp.run({program}, ({token}, {seconds}), {options})"


class _Watch:
    """Reads a cell's messages on the way to its end, and keeps the panel's comm."""

    def __init__(self, kernel: NotebookKernel, message_id: str) -> None:
        self._client: Any = kernel.notebook._client
        self._id = message_id
        self.panel = ""
        self.shown = ""
        self.over = False

    def until(self, deadline: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Read until then, or until there is enough, or until the cell is over."""
        while not self.over and not enough() and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._take(self._client.get_iopub_msg(timeout=min(left, 0.05)))

    def _take(self, message: dict[str, Any]) -> None:
        if message["parent_header"].get("msg_id") != self._id:
            return
        content = message["content"]
        if message["msg_type"] == "comm_open" and "snapshot" in content["data"].get("state", {}):
            self.panel = content["comm_id"]
        if message["msg_type"] == "error":
            self.shown += f"{content['ename']}: {content['evalue']}"
            self.ename = content["ename"]
        if message["msg_type"] == "status" and content["execution_state"] == "idle":
            self.over = True

    ename = ""

    def read_reply(self) -> dict[str, Any]:
        """The cell's reply, which names its error even if an interrupt cut short what IPython shows of it."""
        with contextlib.suppress(queue.Empty):
            while True:
                reply: dict[str, Any] = self._client.get_shell_msg(timeout=2.0)
                if reply["parent_header"].get("msg_id") == self._id:
                    self.ename = str(reply["content"].get("ename", ""))
                    return dict(reply["content"])
        return {}


def run_case(kernel: NotebookKernel, case: Case) -> Verdict:
    """Begin a cell, do the harm, look at what came of it."""
    rng = random.Random(case.seed)
    harm = case.fault.removeprefix("notebook: ")
    verdict = Verdict(case, [])
    lasting = harm in ("page closed", "client gone")
    code = _code(case, _LASTING_S if lasting else programs.ENDLESS_S)
    message_id = kernel.begin(code)
    watch = _Watch(kernel, message_id)
    watch.until(time.monotonic() + (rng.uniform(0, 0.15) if rng.random() < 0.3 else rng.uniform(0, 0.8)))
    case.applied["at"] = time.monotonic()
    try:
        _HARMS[harm](kernel, case, watch, verdict)
        if harm not in ("restart", "shutdown_request", "SIGKILL"):
            if case.label == "session":
                _look_at_session(kernel, verdict)
            _look_around(kernel, verdict)
    except (AssertionError, queue.Empty, OSError, RuntimeError, TimeoutError) as error:
        verdict.wrong.append(f"hangs or fails: {type(error).__name__}: {error}")
    verdict.evidence |= {"shown": watch.shown, "code": code}
    return verdict


def _end(watch: _Watch, verdict: Verdict, enames: set[str]) -> None:
    """The cell must end so, within that time from the fault."""
    at, limit_s = verdict.case.applied["at"], verdict.case.limit_s
    patience = Patience(limit_s + BUSY_S)
    watch.until(at + 600, enough=patience.is_over)
    took = time.monotonic() - at
    verdict.took_s = took
    if not watch.over:
        verdict.wrong.append(f"the cell has not ended after {took:.2f} s; the limit is {limit_s} + {BUSY_S} s")
        return
    if not watch.ename:
        verdict.evidence["reply"] = watch.read_reply()
    if watch.ename not in enames:
        verdict.wrong.append(f"the cell ended with {watch.ename or 'ok'!r}; legal is {enames}: {watch.shown}")


def _state(kernel: NotebookKernel) -> str:
    return kernel.notebook.ok("print(nbddp.last_run().state)").shown.strip()


def _interrupt(times: int, how: str) -> Callable[..., None]:
    def harm(kernel: NotebookKernel, case: Case, watch: _Watch, verdict: Verdict) -> None:
        if case.label == "background":  # the button, pressed while no cell runs, is not for the run
            watch.until(time.monotonic() + 20)
            kernel.notebook.interrupt(how)
            if (state := _state(kernel)) not in ("running", "starting"):
                verdict.wrong.append(f"an idle interrupt ended the run: {state}")
            kernel.notebook.ok("nbddp.last_run().stop(0)")
            return
        # Before the cell has begun ipykernel hears no interrupt.
        _wait_for_panel(watch)
        rng = random.Random(case.seed)
        for number in range(times):
            kernel.notebook.interrupt(how)
            if number == min(1, times - 1):
                case.applied["at"] = time.monotonic()
            time.sleep(rng.uniform(0.05, 0.2) if number < times - 1 else 0)  # a finger, and IPython between
        _end(watch, verdict, {"KeyboardInterrupt"})

    return harm


def _wait_for_ranks(kernel: NotebookKernel, watch: _Watch) -> list[int]:
    patience = Patience(20)
    while not patience.is_over():
        if ranks := ranks_of(kernel.pid):
            return ranks
        watch.until(time.monotonic() + 0.005)
    raise AssertionError("no rank within 20 s")


def _wait_for_panel(watch: _Watch) -> None:
    patience = Patience(20)
    watch.until(time.monotonic() + 600, enough=lambda: bool(watch.panel) or patience.is_over())
    if not watch.panel:
        raise AssertionError(f"no panel within 20 s{': the cell is over' if watch.over else ''}")


def _kill_rank(kernel: NotebookKernel, case: Case, watch: _Watch, verdict: Verdict) -> None:
    ranks = _wait_for_ranks(kernel, watch)
    case.applied |= {"at": time.monotonic(), "pid": ranks[case.rank % len(ranks)]}
    os.kill(case.applied["pid"], signal.SIGKILL)
    if case.label == "background":
        watch.until(time.monotonic() + 20)
        reply = kernel.notebook.cell("going.wait()")
        _check_reply(reply, {"RankDied", "LaunchError"}, verdict)
        return
    _end(watch, verdict, {"RankDied", "LaunchError"})


def _check_reply(reply: Reply, enames: set[str], verdict: Verdict) -> None:
    if reply.ename not in enames:
        verdict.wrong.append(f"wait() ended with {reply.ename or 'ok'!r}, not {enames}: {reply.evalue}")


def _press_stop(kernel: NotebookKernel, case: Case, watch: _Watch, verdict: Verdict) -> None:
    """The panel's button, by the message that its script sends."""
    _wait_for_panel(watch)
    case.applied["at"] = time.monotonic()
    kernel.send_comm("comm_msg", watch.panel, {"method": "custom", "content": {"kind": "stop"}})
    if case.label == "background":
        kernel.notebook.ok("wait_until(lambda: going.state == 'stopped', 50)")
        return
    _end(watch, verdict, {"KeyboardInterrupt"})


def _close_page(kernel: NotebookKernel, case: Case, watch: _Watch, verdict: Verdict) -> None:
    """The widget's other end goes away; the run does not care."""
    _wait_for_panel(watch)
    kernel.send_comm("comm_close", watch.panel, {})
    _ends_well(kernel, watch, verdict)


def _ends_well(kernel: NotebookKernel, watch: _Watch, verdict: Verdict) -> None:
    watch.until(time.monotonic() + 30)
    if watch.ename or not watch.over:
        verdict.wrong.append(f"the cell was to end well: {watch.shown or 'it goes on'}")
    said = kernel.notebook.ok("print(nbddp.last_run().wait(20).state)").shown.strip()
    if said != "finished":
        verdict.wrong.append(f"the run is {said}")


def _leave_and_come_back(kernel: NotebookKernel, case: Case, watch: _Watch, verdict: Verdict) -> None:
    """A closed laptop: nobody reads any more; later somebody asks what came of it."""
    notebook: Any = kernel.notebook
    notebook._client.stop_channels()
    time.sleep(0.3)
    notebook._client = notebook._manager.blocking_client()
    notebook._client.start_channels()
    notebook._client.wait_for_ready(timeout=30)
    said = notebook.ok("print(nbddp.last_run().wait(20).state)").shown.strip()
    if case.label != "stubborn" and said != "finished":
        verdict.wrong.append(f"the run is {said}")


def _restart(kernel: NotebookKernel, case: Case, watch: _Watch, verdict: Verdict) -> None:
    kernel.notebook.restart()
    _gone(kernel, verdict)
    kernel._set_up()
    _look_around(kernel, verdict)


def _shut_down(kernel: NotebookKernel, case: Case, watch: _Watch, verdict: Verdict) -> None:
    manager: Any = kernel.notebook._manager
    manager.shutdown_kernel(now=False)
    _gone(kernel, verdict)
    verdict.evidence["kernel"] = "gone"


def _kill(kernel: NotebookKernel, case: Case, watch: _Watch, verdict: Verdict) -> None:
    kernel.notebook.kill()
    _gone(kernel, verdict)
    verdict.evidence["kernel"] = "gone"


def _gone(kernel: NotebookKernel, verdict: Verdict) -> None:
    at, limit_s = verdict.case.applied["at"], verdict.case.limit_s
    patience = Patience(limit_s)
    while (left := _without(kernel)) and not patience.is_over():
        time.sleep(0.01)
    verdict.took_s = time.monotonic() - at
    if left:
        verdict.wrong.append(f"left {limit_s} s after the kernel's end was asked for: {left}")


def _without(kernel: NotebookKernel) -> dict[int, str]:
    """Its processes, and itself unless it lives on purpose."""
    try:
        return kernel.processes()
    except (AttributeError, TypeError):  # the manager has no kernel any more
        return {}


def _look_at_session(kernel: NotebookKernel, verdict: Verdict) -> None:
    """A failure ends the call and not the session."""
    said = kernel.notebook.cell("print(_goes_on())")
    if said.shown.strip() not in ("goes on", "was not opened"):
        verdict.wrong.append(f"the session: {said.shown}{said.traceback[-1000:]}")


def _look_around(kernel: NotebookKernel, verdict: Verdict) -> None:
    following = kernel.notebook.cell("nbddp.run(nothing, (42,), nprocs=2, device='cpu', show=False).values")
    if following.shown.strip() != "[42, 42]":
        verdict.wrong.append(f"the next run: {following.shown}{following.traceback[-1000:]}")
    changed = kernel.notebook.ok("print(json.dumps(_settled()))").json()
    if changed:
        verdict.wrong.append(f"the kernel is not as it was: {changed}")
    patience = Patience(3)
    while (left := kernel.processes()) and not patience.is_over():
        time.sleep(0.02)
    if left:
        verdict.wrong.append(f"processes are left: {left}")


_HARMS: dict[str, Callable[[NotebookKernel, Case, _Watch, Verdict], None]] = {
    "interrupt, kill": _interrupt(1, "kill"),
    "interrupt, killpg": _interrupt(1, "killpg"),
    "5 interrupts, killpg": _interrupt(5, "killpg"),
    "rank SIGKILL": _kill_rank,
    "panel's Stop": _press_stop,
    "page closed": _close_page,
    "client gone": _leave_and_come_back,
    "restart": _restart,
    "shutdown_request": _shut_down,
    "SIGKILL": _kill,
}
