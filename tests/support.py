"""What the tests share: cells without a notebook, real notebooks, and checks of what is left behind."""

import contextlib
import inspect
import itertools
import json
import linecache
import multiprocessing
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import strategies as st
from jupyter_client.manager import KernelManager

import nbddp

MARK = f"NBDDP_TESTS={os.getpid()}-{uuid.uuid4().hex}"  # in the environment of all that these tests start
_FOLDERS = "|".join(each.parent.name for each in Path(nbddp.__file__).parent.glob("*/__init__.py"))
OUR_FILES = re.compile(rf"nbddp/(?:(?:{_FOLDERS})/)?\w+\.py")  # in a traceback, wherever the clone is
GONE_S = 4.5  # what goes by itself; a DataLoader's workers would notice after 5 s
START_TIMEOUT_S = 60.0
FIRST_MOMENTS_S = 0.25  # of a function or a cell, which may be about to take an optimizer's step: a stop waits for it
# Any but surrogates. st.characters() would read all of Unicode first, which takes 5 s.
CHARACTERS = st.integers(0, 0x10F7FF).map(lambda number: chr(number + 0x800 * (number >= 0xD800)))
_numbers = itertools.count(1)


def wait_until(condition: Callable[[], Any], timeout_s: float = 20.0, what: str | Callable[[], str] = "") -> Any:
    """Poll until the condition holds, and return its value. ``what`` says what is missing, or how it is instead."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            said = what() if callable(what) else what or inspect.getsource(condition).strip()
            raise AssertionError(f"not within {timeout_s} s: {said}")
        time.sleep(0.005)
    return value


def run(fn: Callable[..., Any], *args: Any, nprocs: int = 2, **options: Any) -> nbddp.Run:
    """``nbddp.run`` on the CPU, silent."""
    return nbddp.run(fn, args, nprocs=nprocs, device="cpu", show=False, **options)


def start(fn: Callable[..., Any], *args: Any, **options: Any) -> nbddp.Run:
    """The same in the background, once every rank is ready."""
    started = run(fn, *args, wait=False, **options)
    wait_until(lambda: started.state != "starting", what="the run is beyond starting")
    return started


def error_of(fn: Callable[..., Any], *args: Any, kind: type[Exception] = nbddp.RankError, **options: Any) -> Any:
    """The error, of this kind, that ``run`` raises."""
    with pytest.raises(kind) as raised:
        run(fn, *args, **options)
    return raised.value


class Cells:
    """Executes source as a notebook's cell: in ``__main__``, with its lines in ``linecache`` and no file."""

    def __init__(self, main: ModuleType) -> None:
        self.main = main

    def __call__(self, source: str) -> SimpleNamespace:
        """Run a cell; returns the names in ``__main__`` after it."""
        source = textwrap.dedent(source)
        filename = f"/tmp/ipykernel_{os.getpid()}/{next(_numbers)}.py"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        exec(compile(source, filename, "exec"), self.main.__dict__)
        return SimpleNamespace(**self.main.__dict__)


@contextlib.contextmanager
def fresh_main() -> Iterator[Cells]:
    """An empty ``__main__`` for one test, without a file, as in a kernel."""
    before = sys.modules["__main__"]
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    try:
        yield Cells(main)
    finally:
        sys.modules["__main__"] = before


class Planted:
    """Makes a folder of this path when it's unpickled."""

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def damaged(whole: bytes, seed: int) -> bytes:
    """What becomes of a file: truncated; parts lost, duplicated, or overwritten; one bit flipped."""
    rng = random.Random(seed)
    at = rng.randrange(len(whole))
    end = min(len(whole), at + rng.choice([1, 8, 512, len(whole)]))
    noise = rng.choice([b"", rng.randbytes(end - at), bytes(end - at), bytes([whole[at] ^ 1 << rng.randrange(8)])])
    return whole[: rng.choice([at, end])] + noise + whole[rng.choice([at, end]) :]


def script(source: str, *args: str, timeout_s: float = 120.0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run source as a plain script, in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(source), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **env})


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def marked_pids() -> set[int]:
    """Every process that these tests have started, directly or not, and wherever it hangs now."""
    found = {child.pid for child in psutil.Process().children(recursive=True)}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                if MARK.encode() in file.read():
                    found.add(int(entry))
    return found - {os.getpid()}


def strangers(allowed: set[int] = frozenset()) -> dict[int, str]:  # type: ignore[assignment]
    """Processes of ours that should not be: all but the warm fork servers and resource trackers."""
    found = {}
    for pid in marked_pids() - allowed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if not _is_allowed(process, allowed):
                found[pid] = f"{process.status()} {' '.join(process.cmdline())[:300]}"
    return found


at_start: set[int] = set()  # the processes that the running test found when it began


def gone(pid: int) -> bool:
    """Has it ended? A zombie has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def wait_until_alone(kernel: int, timeout_s: float = GONE_S) -> None:
    """Wait until nothing of this test is left but that kernel and what it keeps warm."""
    deadline = time.monotonic() + timeout_s
    while left := strangers(at_start | {kernel}):
        assert time.monotonic() < deadline, f"still there after {timeout_s} s: {left}"
        time.sleep(0.02)


def _is_allowed(process: psutil.Process, allowed: set[int]) -> bool:
    if process.ppid() not in allowed | {os.getpid()} or process.status() == psutil.STATUS_ZOMBIE:
        return False
    # A rank has its fork server's command line, but that server as its parent.
    if is_fork_server(process):
        return not is_fork_server(psutil.Process(process.ppid()))
    return "multiprocessing.resource_tracker" in " ".join(process.cmdline())


def is_fork_server(process: psutil.Process) -> bool:
    return "multiprocessing.forkserver import main" in " ".join(process.cmdline())


def ranks_of(pid: int) -> list[int]:
    """The pids of a kernel's ranks: each leads a session; they are its fork server's children, or its own."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            for process in child.children() if is_fork_server(child) else [child]:
                # A notebook that a test started leads a session, too.
                if os.getsid(process.pid) == process.pid and "ipykernel_launcher" not in process.cmdline():
                    found.append(process.pid)
    return found


def listening_ports(pid: int | None = None) -> set[tuple[str, int]]:
    """Address and port of every TCP socket that this process or that one listens on."""
    process = psutil.Process(pid)
    connections = getattr(process, "net_connections", None) or process.connections  # psutil 5
    return {(c.laddr.ip, c.laddr.port) for c in connections(kind="tcp") if c.status == psutil.CONN_LISTEN}


def open_fds(pid: int | str = "self") -> dict[int, str]:
    """Every open file descriptor and what it is."""
    fds = {}
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            fds[int(entry)] = os.readlink(f"/proc/{pid}/fd/{entry}")
    # What listed the folder had it open.
    return {fd: target for fd, target in fds.items() if not target.endswith("/fd")}


def store_threads() -> int:
    """How many native threads of a TCPStore this process has."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read())
    return sum("tcpstore" in name for name in names)


def handlers() -> dict[int, Any]:
    # SIGALRM is pytest-timeout's.
    return {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGALRM}}


@dataclass
class Surroundings:
    """Everything of this process that a run must leave as it was."""

    environ: dict[str, str] = field(default_factory=lambda: {**os.environ, "PYTEST_CURRENT_TEST": ""})
    cwd: str = field(default_factory=os.getcwd)
    sys_path: list[str] = field(default_factory=lambda: list(sys.path))
    handlers: dict[int, Any] = field(default_factory=handlers)
    threads: set[str] = field(default_factory=lambda: {t.name for t in threading.enumerate()})
    store_threads: int = field(default_factory=store_threads)
    fds: dict[int, str] = field(default_factory=open_fds)
    ports: set[tuple[str, int]] = field(default_factory=listening_ports)
    files: set[str] = field(default_factory=lambda: _temporary_files())
    shared_memory: set[str] = field(default_factory=lambda: set(os.listdir("/dev/shm")))
    start_method: str | None = field(default_factory=lambda: multiprocessing.get_start_method(allow_none=True))
    torch_threads: int = field(default_factory=torch.get_num_threads)
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)

    def changed(self) -> dict[str, str]:
        """What differs now, by name; things that are gone are no harm, except where order counts."""
        now = Surroundings()
        found = {}
        for name, before in vars(self).items():
            after = getattr(now, name)
            if isinstance(before, set):
                wrong = after - before
            elif name == "fds":
                # By kind: a fork server that was replaced has other pipes, a session's next call other files, as many.
                wrong = Counter(map(_kind, after.values())) - Counter(map(_kind, before.values()))
            else:
                wrong = {} if after == before else {"before": before, "after": after}
            if wrong:
                found[name] = str(wrong)
        return found


def _kind(target: str) -> str:
    return re.sub(r"^(pipe|socket|.*/#).*", r"\1", target)  # the last: files without a name


def _temporary_files() -> set[str]:
    """Also the folders of runs, which lie in multiprocessing's."""
    found = set(os.listdir(tempfile.gettempdir())) | {path.name for path in Path(get_temp_dir()).glob("r-*")}
    # "tmp": made by torch, in processes that were killed, or by torch 2.6; ours have other prefixes.
    return {name for name in found if not name.startswith(("pytest-", "torchinductor", "pytorch-errorfile-", "tmp"))}


@dataclass
class Reply:
    """What a cell did.

    Attributes:
        status: ``"ok"`` or ``"error"``.
        shown: stdout, stderr and displayed text, in order; of a talk, output and answered prompts, where an output
            may stand after the prompt that came with it.
        traceback: as the cell shows it, without colours.
        data: of each display and result, by MIME type.
        result: its ``Out``.
        prompts: what it asked.
        payload: what IPython's pager shows.
        seconds: from request to reply.
    """

    status: str = ""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    shown: str = ""
    payload: list[Any] = field(default_factory=list)
    data: list[dict[str, str]] = field(default_factory=list)
    result: str = ""
    prompts: list[str] = field(default_factory=list)
    seconds: float = 0.0
    over: bool = False

    def take(self, kind: str, content: dict[str, Any], show_data: bool = True) -> None:
        """Take a message that has arrived on iopub."""
        if kind == "stream":
            self.shown += content["text"]
        elif kind == "clear_output":
            self.shown = ""
        elif kind in ("execute_result", "display_data", "update_display_data"):
            text = content["data"].get("text/plain", "")
            self.data.append(content["data"])
            if show_data:
                self.shown += f"{text}\n"
            if kind == "execute_result":
                self.result = text
        elif kind == "error":
            self.ename, self.evalue = content["ename"], content["evalue"]
            self.traceback = without_colours("\n".join(content["traceback"]))
        elif kind == "status":
            self.over = content["execution_state"] == "idle"

    def json(self) -> Any:
        """The last line shown, decoded."""
        assert self.status == "ok", self.traceback
        return json.loads(self.shown.strip().splitlines()[-1])


class Notebook:
    """A real ipykernel, spoken to as a front end does.

    Args:
        environ: for the kernel, over this process's.
        process: for ``subprocess.Popen``.
    """

    def __init__(self, environ: dict[str, str] | None = None, **process: Any) -> None:
        self._manager = KernelManager(kernel_name="python3")
        environ = {**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1", **(environ or {})}
        self._manager.start_kernel(env=environ, **process)
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=START_TIMEOUT_S)

    @property
    def pid(self) -> int:
        return int(self._manager.provisioner.pid)  # type: ignore[union-attr]

    def cell(self, source: str, timeout_s: float = 60.0) -> Reply:
        """Run a cell to its end."""
        return self.end_of(self.begin(source), timeout_s)

    def ok(self, source: str, timeout_s: float = 60.0) -> Reply:
        """Run a cell that must not fail."""
        reply = self.cell(source, timeout_s)
        assert reply.status == "ok", f"{reply.shown}\n{reply.traceback}"
        return reply

    def begin(self, source: str, stop_on_error: bool = False) -> str:
        """Start a cell; returns its message id. ``stop_on_error``: an error ends the cells that wait, as in Run All."""
        return self._client.execute(textwrap.dedent(source), stop_on_error=stop_on_error)

    def shown_so_far(self, message_id: str, until: str, timeout_s: float = 60.0) -> str:
        """Read a running cell's output until it contains a text."""
        reply, deadline = Reply(), time.monotonic() + timeout_s
        while until not in reply.shown:
            self._read(reply, message_id, deadline - time.monotonic(), show_data=False)
        return reply.shown

    def talk(self, source: str, answers: Sequence[str | Callable[[], Any]], timeout_s: float = 60.0) -> Reply:
        """Run a cell, and answer its ``input()`` requests one after the other: by a line, or by calling a function."""
        talk, left = Reply(), list(answers)
        message_id, began = self.begin(source), time.monotonic()
        while not talk.over:
            assert time.monotonic() < began + timeout_s, f"{talk.shown}\n{talk.prompts}"
            with contextlib.suppress(queue.Empty):
                while not talk.over:
                    self._read(talk, message_id, 0.001, show_data=False)
            with contextlib.suppress(queue.Empty):
                asked = self._client.get_stdin_msg(timeout=0.001)["content"]
                prompt = asked["prompt"] + "(hidden) " * asked["password"]
                talk.prompts.append(prompt)
                assert left, f"no answer left for {prompt}\n{talk.shown}"
                answer = left.pop(0)
                if isinstance(answer, str):
                    talk.shown += f"{prompt}{answer}\n"
                    self._client.input(answer)
                else:
                    answer()
        assert not left, f"not asked for: {left}\n{talk.shown}"
        answer_to(self._client, message_id, timeout_s)
        return talk

    def interrupted(self, source: str, until: str = "begun") -> Reply:
        """Run a cell until it has printed this, and interrupt it."""
        running = self.begin(source)
        self.shown_so_far(running, until)
        time.sleep(FIRST_MOMENTS_S)
        self.interrupt()
        return self.end_of(running)

    def end_of(self, message_id: str, timeout_s: float = 60.0) -> Reply:
        """Read until that cell is over."""
        began, reply = time.monotonic(), Reply()
        while not reply.over:
            self._read(reply, message_id, began + timeout_s - time.monotonic())
        content = answer_to(self._client, message_id, timeout_s)
        reply.status = content["status"]
        reply.payload = content.get("payload", [])
        # A further interrupt may have hit IPython while it showed the error.
        reply.ename = reply.ename or content.get("ename", "")
        reply.seconds = time.monotonic() - began
        return reply

    def _read(self, reply: Reply, message_id: str, timeout_s: float, show_data: bool = True) -> None:
        message = self._client.get_iopub_msg(timeout=max(0.001, timeout_s))
        if message["parent_header"].get("msg_id") == message_id:
            reply.take(message["msg_type"], message["content"], show_data)

    def interrupt(self, how: str = "killpg") -> None:
        """As Jupyter (``killpg``: the kernel's process group), a client (``kill``), or VS Code (``tree``) does."""
        if how == "killpg":
            return os.killpg(os.getpgid(self.pid), signal.SIGINT)
        if how == "tree":  # what is below the kernel comes first
            for child in psutil.Process(self.pid).children(recursive=True):
                child.send_signal(signal.SIGINT)
            time.sleep(0.15)
        os.kill(self.pid, signal.SIGINT)

    def restart(self) -> None:
        """As the front end's button: SIGTERM or shutdown message, and a new kernel."""
        self._manager.restart_kernel(now=False)
        self._client.wait_for_ready(timeout=START_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL only to the kernel, as the OOM killer does."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()

    def __enter__(self) -> "Notebook":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def answer_to(client: Any, message_id: str, timeout_s: float = 20.0) -> dict[str, Any]:
    """The kernel's reply to that request."""
    while (reply := client.get_shell_msg(timeout=timeout_s))["parent_header"].get("msg_id") != message_id:
        pass
    return dict(reply["content"])


def tab(notebook: Notebook, text: str) -> list[str]:
    """Press Tab at the end of this text of a cell. Returns what is offered."""
    client = notebook._client
    return list(answer_to(client, client.complete(text, len(text)))["matches"])


def out(reply: Reply) -> str:
    """The cell's ``Out``, which comes after all lines of text."""
    assert reply.status == "ok", reply.traceback
    return reply.shown.strip().splitlines()[-1]


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
