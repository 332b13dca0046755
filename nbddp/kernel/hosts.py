"""Kernel side. Hosts that ranks can run on: log in, compare, keep the pipe, notice when it ends.

    with nbddp.cluster(["gpu1", "gpu2"]) as c:      # log in once; several runs
        c.run(train, nprocs=8)

Nothing listens for this: each host's agent talks over stdin and stdout of what the user's cluster has anyway,
``ssh``, ``srun`` or a command of the user's.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from nbddp import frames
from nbddp.errors import HostLost, LaunchError
from nbddp.frames import Head
from nbddp.kernel.waiting import Latch, start_thread
from nbddp.payload import Packed
from nbddp.versions import difference, versions

if TYPE_CHECKING:
    from nbddp.kernel.plan import Plan
    from nbddp.kernel.runner import Run

HEARTBEAT_S = 15.0
HERE = "localhost"
SLURM = "slurm"
_HELLO_S = 120.0  # a first import of torch over a network file system takes a minute
_BYE_S = 2.0
_SETTLE_S = 0.2
_LAST_WORDS_S = 0.5
_LAST_BYTES = 16 << 10
_LEAST_HEARTBEAT_S = 1.0
_FROM_TORCH = re.compile(r"\[[IWEF]\d+ ")  # its warnings, of the agents that look for each other
_READ_BYTES = 1 << 20
_FACTS = {"versions", "devices", "networks", "asked_at", "identity", "now"}
_CLOSED = "the cluster is closed; make a new one: nbddp.cluster(hosts)"
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "{host}")
_SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist={host}")
# Of ssh's and the shell's last words: what to do about them.
_ADVICE = (
    ("Could not resolve hostname", "no machine of that name is known here; is it spelt as in ~/.ssh/config?"),
    ("Permission denied", "it refused your key: `ssh {host}` must log in without a password (try ssh-copy-id {host})"),
    (
        "Host key verification failed",
        "its host key is not known, or has changed: log in by hand once, `ssh {host}`",
    ),
    ("Connection refused", "no ssh server answers there"),
    ("timed out", "it does not answer; is it up, and reachable from here?"),
    ("No route to host", "it does not answer; is it up, and reachable from here?"),
    ("No module named 'nbddp", "nbddp is not installed for that Python: pip install nbddp=={version} there"),
    ("No module named nbddp", "nbddp is not installed for that Python: pip install nbddp=={version} there"),
    (
        "No module named",
        "that Python lacks a package; the same ones as here are needed: pip install nbddp=={version} there",
    ),
    ("no Python", "say which one by nbddp.cluster(hosts, python='/path/to/python')"),
)


class Host:
    """One host, from the login to the end of its pipe.

    Attributes:
        facts: what it has told of itself.
        lost: why nothing more can be heard of it; "" while it is there.
        offset_s: from its monotonic clock to ours.
        listener: gets what it tells of its ranks, on this host's thread; ``lost`` among them.
    """

    def __init__(self, name: str, command: Sequence[str], heartbeat_s: float) -> None:
        self.name = name
        self.facts: Head = {}
        self.lost = ""
        self.offset_s = float("inf")
        self.listener: Callable[[Host, Head, bytes], None] | None = None
        self._heartbeat_s = heartbeat_s
        self._heard_at = time.monotonic()
        self._suspected_at = float("inf")
        self._greeting_bytes = 0  # of its stderr: what its login shell said
        self._greeted = Latch()
        self._prepared: object = None
        self._payload: frames.BlockFrames | None = None
        self._stderr: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the login
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,  # an interrupt of the notebook is not for it
                bufsize=0,
            )
        except OSError as error:
            self._stderr.close()
            raise LaunchError(f"{name}: {command[0]} cannot be started: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._out, self._in = self._process.stdin, self._process.stdout
        for pipe in (self._out, self._in):
            frames.widen(pipe.fileno())
        beat_s = heartbeat_s * frames.BEATS
        self._sender = frames.Sender(self._out.fileno(), beat_s, lambda: {"kind": "beat"}, f"nbddp-to-{name}")
        self._heard_all = Latch()
        start_thread(self._read, f"nbddp-from-{name}", self._cannot_listen)

    def greet(self, deadline: float) -> None:
        """Wait for its first words, compare versions, and say welcome.

        Raises:
            LaunchError: names the host, the cause and the remedy.
        """
        while not self._greeted.wait(0.05) and not self.lost and time.monotonic() < deadline:
            pass
        if not self.facts:
            raise LaunchError(f"{self.name}: {self.lost or f'no answer within {_HELLO_S:.0f} s'}")
        there, here = difference(self.facts["versions"])
        if there:
            raise LaunchError(
                f"{self.name} has {there}, this notebook {here}. What is pickled on one side must be read on the "
                "other: install the same versions on both"
            )
        self.send({"kind": "welcome", "heartbeat": self._heartbeat_s})

    def has(self, packed: Packed) -> bool:
        """Has it had this payload?"""
        return packed is self._prepared

    def send(self, head: Head) -> None:
        """Queue an order; a host that is lost gets none."""
        if not self.lost:
            self._sender.send(head)

    def send_payload(self, block: int, packed: Packed, then: Sequence[Head]) -> None:
        """Queue it, and the orders that need it; it is read from the block when it is its turn."""
        self._prepared = packed
        if not self.lost:
            self._payload = frames.BlockFrames(block, packed.nbytes, then=then, kind="payload")
            self._sender.send_all(self._payload)

    def drop_payload(self) -> bool:
        """What has not been sent yet is not wanted any more. Returns whether the orders after it were not."""
        payload, self._payload = self._payload, None
        if payload is None or not payload.drop():
            return False
        self._prepared = None
        return True

    def look_for_silence(self) -> bool:
        """Give it up if nothing has come for the heartbeat's time. Returns whether it is under suspicion.

        Two looks: if it was this process that stood still, what the host has said meanwhile is yet to be read.
        """
        now = time.monotonic()
        silent_s = now - self._heard_at
        if self.lost or silent_s < self._heartbeat_s - _SETTLE_S:
            self._suspected_at = float("inf")
        elif self._suspected_at > now:
            self._suspected_at = now
        elif now - self._suspected_at > _SETTLE_S:
            self.give_up(f"nothing was heard of it for {silent_s:.0f} s")
        return not self.lost and self._suspected_at <= now

    def give_up(self, why: str) -> None:
        """It counts as lost from now on; its agent ends with its pipe."""
        self._lose(why)
        self._process.kill()

    def close(self, deadline: float) -> None:
        """End the login, of which it has been told goodbye; until the deadline it may do so itself."""
        if not self.lost:
            self._sender.close(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
        self._lose("its login was ended")
        self._process.kill()
        self._process.wait()
        self._sender.close(_BYE_S)  # its write fails now: only then may the number of its file be another's
        self.disown()
        self._heard_all.wait(_BYE_S)
        self._in.close()
        self._stderr.close()

    def disown(self) -> None:
        """Close our end of its stdin."""
        with contextlib.suppress(OSError):
            self._out.close()

    # ------------------------------------------------------------------ on its own thread

    def _read(self) -> None:
        parser = frames.Parser(after_mark=True)
        try:
            self._read_all(parser)
            self._lose(self._last_words(parser.noise) if not self.facts else "its connection ended" + self._how())
        except Exception as error:  # a deaf host is a lost one
            self._lose(f"it said what this nbddp does not understand ({type(error).__name__}: {error})")
        finally:
            self._heard_all.open()

    def _read_all(self, parser: frames.Parser) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._in.fileno(), _READ_BYTES):
                self._heard_at = time.monotonic()
                for head, body in parser.feed(data):
                    self._take(head, body)

    def _cannot_listen(self, error: RuntimeError) -> None:
        self._lose(str(error))
        self._heard_all.open()

    def _take(self, head: Head, body: bytes) -> None:
        if "now" in head:  # the quickest of its frames tells its clock best
            self.offset_s = min(self.offset_s, time.monotonic() - head["now"])
        if head["kind"] == "hello":
            if not head.keys() >= _FACTS:
                raise frames.Garbled("a hello without facts")
            self.facts = head
            self._greeting_bytes = os.fstat(self._stderr.fileno()).st_size
            self._greeted.open()
        elif head["kind"] != "beat" and self.listener is not None:
            self.listener(self, head, body)

    def _lose(self, why: str) -> None:
        if not self.lost:
            self.lost = why
            self._greeted.open()
            if self.listener is not None:
                self.listener(self, {"kind": "lost"}, b"")

    def _how(self) -> str:
        self._wait_for_its_end()
        code = self._process.returncode
        if code is not None and code < 0:
            return f", killed by {signal.Signals(-code).name}"
        said = [line for line in self._said() if not _FROM_TORCH.match(line)]
        return f": {said[-1]}" if said else ""

    def _wait_for_its_end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)

    def _last_words(self, noise: bytes) -> str:
        self._wait_for_its_end()
        said = self._said() or noise.decode("utf-8", "replace").strip().splitlines()
        text = "\n".join(said)
        ended = f"its login ended with exit code {self._process.returncode}"
        last = f"{ended}: {said[-1].strip()}" if said else ended
        advice = next((advice for sign, advice in _ADVICE if sign in text), "")
        if not advice:
            return last
        return advice.format(host=self.name, version=versions()["nbddp"]) + f" ({last})"

    def _said(self) -> list[str]:
        with contextlib.suppress(ValueError, OSError):
            size = os.fstat(self._stderr.fileno()).st_size
            start = max(self._greeting_bytes, size - _LAST_BYTES)
            text = os.pread(self._stderr.fileno(), _LAST_BYTES, start).decode("utf-8", "replace")
            return [line for line in text.splitlines() if line.strip()]
        return []


_open: weakref.WeakSet[Cluster] = weakref.WeakSet()


class Cluster:
    """Hosts that stay logged in for several runs; made by :func:`cluster`.

    Attributes:
        hosts: their names, in the order of the ranks.
    """

    def __init__(self, hosts: Sequence[str], command_of: Callable[[str], Sequence[str]], heartbeat_s: float) -> None:
        self.hosts = list(hosts)
        _open.add(self)
        self._run_name = ""
        self._rounds = itertools.count(1)
        self._all: list[Host] = []
        try:
            for name in hosts:
                self._all.append(Host(name, command_of(name), heartbeat_s))
            deadline = time.monotonic() + _HELLO_S
            for host in self._all:
                host.greet(deadline)
            self._refuse_twins()
        except BaseException:
            self.close()
            raise

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None, **options: Any) -> Run:
        """:func:`nbddp.run` on these hosts."""
        from nbddp.kernel.runner import run

        return run(fn, args, kwargs, hosts=self, **options)

    def close(self) -> None:
        """Log out everywhere."""
        for host in self._all:
            host.send({"kind": "bye"})
        deadline = time.monotonic() + _BYE_S
        for host in self._all:
            host.close(deadline)
        self._all = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        there = [host.name for host in self._all if not host.lost]
        return f"<Cluster of {', '.join(there)}>" if there else "<Cluster, closed>"

    def devices(self) -> dict[str, Mapping[str, int]]:
        """How many devices of which type each host has. Raises LaunchError if the cluster was closed."""
        if not self._all:
            raise LaunchError(_CLOSED)
        return {host.name: host.facts["devices"] for host in self._all}

    # ------------------------------------------------------------------ for the crew

    def next_round(self) -> int:
        """A number that no other attempt on these hosts has."""
        return next(self._rounds)

    def present(self, plan: Plan) -> list[Host]:
        """The hosts that are there.

        Raises:
            HostLost: too few are.
            LaunchError: the cluster was closed.
        """
        while self.look_for_silence():
            time.sleep(_SETTLE_S)
        there = [host for host in self._all if not host.lost]
        if not self._all:
            raise LaunchError(_CLOSED)
        if len(there) < plan.min_hosts:
            gone = next(host for host in self._all if host.lost)
            raise HostLost(gone.name, f"{gone.lost}; {len(there)} of {len(self._all)} hosts are left")
        return there

    def look_for_silence(self) -> bool:
        """Give up hosts that nothing has been heard of. Returns whether one is under suspicion."""
        suspected = [host.look_for_silence() for host in self._all]  # at each of them
        return any(suspected)

    def run_order(self, plan: Plan, packed: Packed, host: Host) -> Head:
        """What a host must know of a run; it does not change from round to round."""
        return {
            "kind": "run",
            "name": plan.name,
            "ranks": dict(plan.shares)[host.name],
            "device": plan.device,
            "backend": plan.backend,
            "pg_timeout_s": plan.pg_timeout_s,
            "seed": plan.seed,
            "deterministic": plan.deterministic,
            "gpus": plan.gpus,
            "env": dict(plan.env),
            "sys_path": plan.sys_path,
            "cwd": plan.cwd,
            "argv": plan.argv,
            "max_restarts": plan.max_restarts,
            "payload_nbytes": packed.nbytes,
        }

    def reserve(self, name: str) -> None:
        """Take the cluster for a run of this name. Raises LaunchError if another has it."""
        if self._run_name:
            raise LaunchError(
                f"these hosts are busy with {self._run_name}: wait for it, stop it, or log in once more for this run"
            )
        self._run_name = name

    def end_run(self) -> None:
        """No further round of this run: the hosts wait for the next run."""
        self._run_name = ""
        for host in self._all:
            host.send({"kind": "over"})

    def disown(self) -> None:
        """In a process forked from the kernel: hold nothing open by which the hosts see the kernel live."""
        for host in self._all:
            host.disown()

    def _refuse_twins(self) -> None:
        seen: dict[str, str] = {}
        for host in self._all:
            twin = seen.setdefault(host.facts["identity"], host.name)
            if twin != host.name:
                raise LaunchError(f"{twin} and {host.name} are the same machine: name it once, with more ranks")


def cluster(
    hosts: Sequence[str] | str,
    *,
    launcher: Sequence[str] | None = None,
    python: str | None = None,
    heartbeat: float = HEARTBEAT_S,
) -> Cluster:
    """Log in to hosts, for one run or several.

    Args:
        hosts: as your ``ssh`` knows them; ``"localhost"`` is this machine, without a login. ``"slurm"``: the
            nodes of the allocation that this notebook runs in.
        launcher: a command that runs another on a host, instead of ssh, with ``{host}`` in it:
            ``["kubectl", "exec", "-i", "{host}", "--"]``.
        python: the interpreter on the hosts. Default: this one's path if it exists there, else ``python3``.
        heartbeat: seconds of silence after which a host counts as lost, and after which a host that hears nothing
            from the notebook ends its ranks.

    Raises:
        LaunchError: a host cannot be used; names it, and the remedy.
    """
    names = _slurm_nodes() if hosts == SLURM else hosts
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) and n for n in names):
        raise LaunchError(f"hosts is a list of names, e.g. hosts=['gpu1', 'gpu2'], or 'slurm', not {hosts!r}")
    twice = [name for name in names if list(names).count(name) > 1]
    if twice:
        raise LaunchError(f"{twice[0]} is named twice: name it once, with more ranks")
    strange = [name for name in names if name.startswith("-")]
    if strange:
        raise LaunchError(f"{strange[0]!r} is no host's name")
    if not isinstance(heartbeat, (int, float)) or not heartbeat >= _LEAST_HEARTBEAT_S:
        raise LaunchError(f"heartbeat is a number of seconds, {_LEAST_HEARTBEAT_S:.0f} or more, not {heartbeat!r}")
    template = tuple(launcher) if launcher is not None else (_SRUN if hosts == SLURM else _SSH)
    if launcher is not None and not any("{host}" in word for word in template):
        raise LaunchError(f"launcher={list(launcher)} does not say where the host's name goes: put '{{host}}' in it")
    return Cluster(names, lambda host: _command(host, template, python), float(heartbeat))


Hosts = Sequence[str] | str | Cluster | None  # as ``run(hosts=...)`` takes them


def log_in(hosts: Hosts, until: contextlib.ExitStack) -> Cluster | None:
    """The cluster that ``run(hosts=...)`` names; one that is made here ends with ``until``."""
    if hosts is None or isinstance(hosts, Cluster):
        return hosts
    opened = cluster(hosts)
    until.callback(opened.close)
    return opened


def _command(host: str, template: Sequence[str], python: str | None) -> list[str]:
    if host == HERE:
        return [os.path.expanduser(python or sys.executable), "-m", "nbddp.host"]
    words = [word.replace("{host}", host) for word in template]
    agent = ["sh", "-c", _script(python)]
    # ssh hands its words to the login shell there as one line; the others start them as they are.
    return [*words, shlex.join(agent)] if os.path.basename(words[0]) == "ssh" else [*words, *agent]


def _script(python: str | None) -> str:
    candidates = [python] if python is not None else [sys.executable, "python3", "python"]
    named = " ".join(map(_in_shell, candidates))
    return (
        f'for p in {named}; do command -v "$p" >/dev/null 2>&1 && exec "$p" -m nbddp.host; done; '
        f'echo "there is no Python: {" ".join(candidates)}" >&2; exit 127'
    )


def _in_shell(path: str) -> str:
    """Quoted, but for the home, which is the one there."""
    return '"$HOME"/' + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)


def _slurm_nodes() -> list[str]:
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise LaunchError("hosts='slurm' works inside an allocation: start the notebook with salloc, srun or sbatch")
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"scontrol does not tell the nodes of {nodes}: {error}") from error
    return listed.stdout.split()


def _disown_all() -> None:
    for opened in list(_open):
        opened.disown()
    _open.clear()


def _close_all() -> None:
    for opened in list(_open):
        opened.close()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)
