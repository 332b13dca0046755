"""Kernel side. Hosts that ranks can run on, together: log in to all, one run at a time, log out.

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
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbddp import folders
from nbddp.errors import HostLost, LaunchError
from nbddp.frames import Head
from nbddp.kernel.host import HELLO_S, SETTLE_S, Host
from nbddp.kernel.login import SRUN, SSH, command_for, is_name, slurm_nodes
from nbddp.payload import Packed
from nbddp.waiting import start_thread, uninterrupted

if TYPE_CHECKING:
    from nbddp.kernel.plan import Plan
    from nbddp.kernel.runner import Run

HEARTBEAT_S = 15.0
SLURM = "slurm"
_BYE_S = 2.0
_LEAST_HEARTBEAT_S = 1.0
_CLOSED = "the cluster is closed; make a new one: nbddp.cluster(hosts)"

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
        self._starting = threading.Lock()  # held while logins are started, which whoever closes must then know of
        self._closing = False
        weakref.finalize(self, _log_out_unasked, self._all, os.getpid()).atexit = False  # _close_all is first
        try:
            commands = {name: command_of(name) for name in hosts}
            uninterrupted(lambda: self._log_in(commands, heartbeat_s), "nbddp-login")
            deadline = time.monotonic() + HELLO_S
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
        """Log out everywhere; a run that still goes on there fails."""
        self._closing = True
        with self._starting:
            pass
        if self._run_name:
            for host in self._all:
                host.give_up(f"the cluster was closed while {self._run_name} went on: wait() for it before that")
        _log_out(self._all)

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
            time.sleep(SETTLE_S)
        there = [host for host in self._all if not host.lost]
        if not self._all:
            raise LaunchError(_CLOSED)
        if len(there) < plan.min_hosts:
            gone = next(host for host in self._all if host.lost)
            left = f"{len(there)} of {len(self._all)} hosts are left"
            raise HostLost(gone.name, f"{gone.lost}; {left}: log in again, or say how many may do by min_hosts=")
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
            "folders": folders.users(plan.sys_path),
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
            host.end_run()

    def disown(self) -> None:
        """In a process forked from the kernel: hold nothing open by which the hosts see the kernel live."""
        for host in self._all:
            host.disown()

    def _log_in(self, commands: Mapping[str, Sequence[str]], heartbeat_s: float) -> None:
        with self._starting:
            for name, command in commands.items():
                if self._closing:
                    return
                self._all.append(Host(name, command, heartbeat_s))

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
            ``["kubectl", "exec", "-i", "{host}", "--"]``. It is given the words of that command as they are; if
            ``ssh`` is one of its own, as one line for a shell.
        python: the interpreter on the hosts. Default: this one's path if it exists there, else ``python3``.
        heartbeat: seconds of silence after which a host counts as lost, and after which a host that hears nothing
            from the notebook ends its ranks.

    Raises:
        LaunchError: a host cannot be used; names it, and the remedy.
    """
    names = slurm_nodes() if hosts == SLURM else hosts
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) and n for n in names):
        raise LaunchError(f"hosts is a list of names, e.g. hosts=['gpu1', 'gpu2'], or 'slurm', not {_kind(hosts)}")
    if strange := [place for place, name in enumerate(names) if not is_name(name)]:
        raise LaunchError(
            f"hosts[{strange[0]}] is not the name of a host: that is 'gpu1', 'user@gpu1.example.org' or an IP address, "
            "without spaces, quotes and the like; a password or an option of ssh belongs in ~/.ssh/config"
        )
    twice = [name for name in names if list(names).count(name) > 1]
    if twice:
        raise LaunchError(f"{twice[0]} is named twice: name it once, with more ranks")
    if not isinstance(heartbeat, (int, float)) or not heartbeat >= _LEAST_HEARTBEAT_S:
        raise LaunchError(f"heartbeat is a number of seconds, {_LEAST_HEARTBEAT_S:.0f} or more, not {heartbeat!r}")
    template = tuple(launcher) if launcher is not None else (SRUN if hosts == SLURM else SSH)
    if isinstance(launcher, str):
        raise LaunchError("launcher is a list of words, e.g. ['kubectl', 'exec', '-i', '{host}', '--'], not one string")
    if launcher is not None and not any("{host}" in word for word in template):
        raise LaunchError("launcher does not say where the host's name goes: put '{host}' in one of its words")
    return Cluster(names, lambda host: command_for(host, template, python), float(heartbeat))


def _kind(hosts: object) -> str:
    """What was given instead of names, without the values: a mapping from host to password, say."""
    if isinstance(hosts, (list, tuple)):
        return f"a {type(hosts).__name__} of {', '.join(sorted({type(n).__name__ for n in hosts})) or 'none'}"
    return "a string" if isinstance(hosts, str) else f"a {type(hosts).__name__}"


def _log_out(hosts: list[Host]) -> None:
    for host in hosts:
        host.send({"kind": "bye"})
    deadline = time.monotonic() + _BYE_S
    for host in hosts:
        host.close(deadline)
    hosts.clear()


def _log_out_unasked(hosts: list[Host], owner: int) -> None:
    """Of a cluster that nobody has any more: a cell that makes one was run again. It shall not wait for that."""
    if hosts and os.getpid() == owner:
        start_thread(lambda: _log_out(hosts), "nbddp-logout", lambda _: _log_out(hosts))


Hosts = Sequence[str] | str | Cluster | None  # as ``run(hosts=...)`` takes them


def log_in(hosts: Hosts, until: contextlib.ExitStack) -> Cluster | None:
    """The cluster that ``run(hosts=...)`` names; one that is made here ends with ``until``."""
    if hosts is None or isinstance(hosts, Cluster):
        return hosts
    opened = cluster(hosts)
    until.callback(opened.close)
    return opened


def _disown_all() -> None:
    for opened in list(_open):
        opened.disown()
    _open.clear()


def _close_all() -> None:
    for opened in list(_open):
        opened.close()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)
