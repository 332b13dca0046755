"""Logs in to several hosts, keeps the logins for one run after another, and logs out.

    with nbddp.cluster(["gpu1", "gpu2"]) as c:      # log in once; several runs
        c.run(train, nprocs=8)

No port is opened for this: each host's agent communicates over stdin and stdout of ``ssh``, ``srun`` or the user's own
launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from nbddp import folders
from nbddp.errors import HostLost, LaunchError
from nbddp.hosts.addresses import Addresses
from nbddp.hosts.frames import Header
from nbddp.hosts.host import HELLO_S, Host
from nbddp.hosts.login import SRUN, SSH, command_for, is_name, slurm_nodes
from nbddp.hosts.network import Link, Links, Look, slow_links
from nbddp.hosts.returns import Returns, refuse_twins
from nbddp.hosts.suppliers import Allocated, Named, OnRay, Supplier
from nbddp.hosts.transfers import in_words
from nbddp.kernel.plan import Plan, check_numbers
from nbddp.kernel.run import R, Run
from nbddp.kernel.runner import run
from nbddp.latch import start_thread, uninterrupted

HEARTBEAT_S = 15.0
SLURM = "slurm"
RAY = "ray"
_LOGOUT_TIMEOUT_S = 2.0
_LEAST_HEARTBEAT_S = 1.0
_ANSWER_POLL_S = 0.02
_POLL_S = 0.2  # between two looks at a host under suspicion
_MOST_NAMED = 5  # hosts in one error
_CLOSED = "the cluster is closed; make a new one: nbddp.cluster(hosts)"

_open: weakref.WeakSet[Cluster] = weakref.WeakSet()


class Cluster:
    """Hosts that stay logged in for several runs; made by :func:`cluster`.

    A host that is lost is logged in to again in the background; the next run, or restart, uses it.

    Attributes:
        hosts: the names of all, in the order of the ranks; :meth:`present` returns those that are there.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        command_of: Callable[[str], Sequence[str]],
        heartbeat_s: float,
        login_timeout_s: float = HELLO_S,
        supplier: Supplier | None = None,
    ) -> None:
        """
        Args:
            supplier: gets the hosts back when the cluster is closed.
        """
        self.hosts = list(hosts)
        _open.add(self)
        self._run_name = ""
        self._rounds = itertools.count(1)
        commands = {name: command_of(name) for name in hosts}
        self._returns = Returns(commands, heartbeat_s, login_timeout_s)
        self._links: Links = {}
        self._seen: list[Host] = []  # these have reached each other
        self._starting = threading.Lock()  # held while logins start, so that close() finds all of them
        self._closing = False
        self._supplier = supplier or Named(hosts, SSH)
        forgotten = weakref.finalize(self, _log_out_forgotten, self._returns, self._supplier, os.getpid())
        forgotten.atexit = False  # _close_all does it then
        try:
            uninterrupted(lambda: self._log_in(commands, heartbeat_s), "nbddp-login")
            self._greet_all(login_timeout_s)
            refuse_twins(self._all)
            self._returns.begin()
        except BaseException:
            self.close()
            raise

    def run(self, fn: Callable[..., R], args: Sequence[Any] = (), kwargs: Any = None, **options: Any) -> Run[R]:
        """:func:`nbddp.run` on these hosts."""
        return run(fn, args, kwargs, hosts=self, **options)

    def close(self) -> None:
        """Log out of all hosts; a run that is still going on there fails."""
        self._closing = True
        with self._starting:
            pass
        self._returns.close()
        if self._run_name:
            for host in self._all:
                host.give_up(f"the cluster was closed while {self._run_name} went on: wait() for it before that")
        _log_out(self._all)
        self._supplier.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if not self._all:
            return "<Cluster, closed>"
        lost = [host.name for host in self._all if host.lost]
        return f"<Cluster of {', '.join(self.present()) or 'no host'}{'; lost: ' * bool(lost)}{', '.join(lost)}>"

    def present(self) -> list[str]:
        """Return the names of the hosts that are there, in the order of the ranks."""
        return [host.name for host in self._all if not host.lost]

    def devices(self) -> dict[str, Mapping[str, int]]:
        """Return the number of devices by type for each host that is there.

        Raises:
            LaunchError: the cluster was closed.
        """
        return {name: devices for name, devices in self.known_devices().items() if name in self.present()}

    def network(self) -> dict[tuple[str, str], Link]:
        """Return the connections between the hosts: latency and rate, by ``(from, to)``.

        They are measured before the ranks of the first run start, and again when a host is back. Beyond 8 hosts each
        host tries the next one, and the first.
        """
        return dict(self._links)

    # ------------------------------------------------------------------ for the run

    @property
    def _all(self) -> list[Host]:
        return self._returns.hosts

    def known_devices(self) -> dict[str, Mapping[str, int]]:
        """Return the number of devices by type for each host; of a lost one, what it had. Raises LaunchError."""
        if not self._all:
            raise LaunchError(_CLOSED)
        return {host.name: host.facts["devices"] for host in self._all}

    @property
    def chain_from(self) -> int:
        """The number of hosts from which on a large payload goes from host to host."""
        return self._supplier.chain_from

    def next_round(self) -> int:
        """Return a number for an attempt, unique on these hosts."""
        return next(self._rounds)

    def remaining_hosts(self, plan: Plan) -> list[Host]:
        """Return the hosts that are not lost, those that are back included.

        Raises:
            HostLost: too few hosts are left.
            LaunchError: the cluster was closed.
        """
        while self.check_heartbeats():
            time.sleep(_POLL_S)
        left = [host for host in self._all if not host.lost and _has_devices(host, plan)]
        if not self._all:
            raise LaunchError(_CLOSED)
        if len(left) < plan.min_hosts:
            missing = next(host for host in self._all if host not in left)
            why = f"{missing.lost}; {self._returns.words(missing.name)}" if missing.lost else "it has fewer devices now"
            there = "1 host is" if len(left) == 1 else f"{len(left)} hosts are"
            raise HostLost(missing.name, f"{why}; {there} there, and the run needs {plan.min_hosts} (min_hosts=)")
        return left

    def back(self, plan: Plan, at_work: Collection[Host]) -> list[str]:
        """Return the names of the hosts that are there and could take part in a run, but are not at work in it."""
        return [each.name for each in self._all if not each.lost and each not in at_work and _has_devices(each, plan)]

    def look_for(self, hosts: Sequence[Host], addresses: Addresses) -> Look | None:
        """Return a look at the network, unless these hosts have reached each other before, or it is one host."""
        is_new = len(hosts) > 1 and any(host not in self._seen for host in hosts)
        return Look(hosts, addresses.address) if is_new else None

    def note_links(self, hosts: Sequence[Host], links: Links) -> None:
        """Note that these hosts have reached each other."""
        self._seen = list(hosts)
        self._links.update(links)

    def slow_links(self) -> str:
        """Return which connections are far slower than the others, in words; "" for none."""
        return slow_links(self._links)

    def missing(self, at_work: Collection[str]) -> str:
        """Return which hosts a run does without, in words; "" for none."""
        absent = [host for host in self._all if host.name not in at_work]
        back = [host.name for host in absent if not host.lost]
        lost = [host.name for host in absent if host.lost]
        return "; ".join([f"{', '.join(lost)} lost"] * bool(lost) + [f"{', '.join(back)} back"] * bool(back))

    def check_heartbeats(self) -> bool:
        """Give up hosts that have sent nothing for the heartbeat timeout. Returns whether one is under suspicion."""
        suspected = [host.check_heartbeat() for host in self._all]  # a list, so that all are checked
        return any(suspected)

    def run_order(self, plan: Plan, host: Host) -> Header:
        """Return the order that begins a run on a host; it is the same for all rounds."""
        return {
            "kind": "run",
            "name": plan.name,
            "ranks": dict(plan.shares)[host.name],
            "device": plan.device,
            "backend": plan.backend,
            "pg_timeout_s": plan.pg_timeout_s,
            "attended": plan.attended,
            "post_mortem": plan.post_mortem,
            "listen": plan.listen,
            "seed": plan.seed,
            "deterministic": plan.deterministic,
            "gpus": plan.gpus,
            "env": dict(plan.env),
            "folders": [(folder, folders.identity(folder)) for folder in folders.users(plan.sys_path)],
            "cwd": (plan.cwd, folders.identity(plan.cwd)),
            "argv": plan.argv,
            "max_restarts": plan.max_restarts,
            "stays": plan.stays,
        }

    def reserve(self, name: str) -> None:
        """Reserve the cluster for a run of this name. Raises LaunchError if another run uses it."""
        if self._run_name:
            raise LaunchError(
                f"these hosts are busy with {self._run_name}: wait for it, stop it, or make another cluster"
            )
        self._run_name = name

    def end_run(self) -> None:
        """End the run; the hosts wait for the next one."""
        self._run_name = ""
        for host in self._all:
            host.end_run()

    def transfers(self) -> str:
        """Return what takes long on its way to or from a host, in words; "" for nothing."""
        return in_words(each for host in self._all for each in (host.sending, host.receiving) if not host.lost)

    def disown(self) -> None:
        """In a process forked from the notebook kernel: close the pipes, so that the hosts notice the kernel's end."""
        for host in self._all:
            host.close_stdin()
        self._returns.disown()
        self._supplier.disown()

    def _greet_all(self, timeout_s: float) -> None:
        """Greet each host as soon as it has answered. Raises LaunchError, which names all hosts that cannot be used."""
        deadline = time.monotonic() + timeout_s
        waiting, problems = list(self._all), dict[str, str]()
        while waiting:
            waiting[0].has_answered(_ANSWER_POLL_S)
            for host in [host for host in waiting if host.has_answered(0.0) or time.monotonic() > deadline]:
                waiting.remove(host)
                try:
                    host.greet(timeout_s)
                except LaunchError as error:
                    problems[host.name] = str(error)
        if problems:
            named = [problems[host.name] for host in self._all if host.name in problems]
            others = [f"and {len(named) - _MOST_NAMED} more hosts"] if len(named) > _MOST_NAMED else []
            raise LaunchError("; ".join(named[:_MOST_NAMED] + others))

    def _log_in(self, commands: Mapping[str, Sequence[str]], heartbeat_s: float) -> None:
        with self._starting:
            for name, command in commands.items():
                if self._closing:
                    return
                self._all.append(Host(name, command, heartbeat_s))


def cluster(
    hosts: Sequence[str] | str,
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    time: str | None = None,
    salloc: Sequence[str] = (),
    address: str | None = None,
    launcher: Sequence[str] | None = None,
    python: str | Mapping[str, str] | None = None,
    setup: str = "",
    heartbeat: float = HEARTBEAT_S,
    login_timeout: float = HELLO_S,
) -> Cluster:
    """Log in to hosts, for one run or several.

    Args:
        hosts: names that ``ssh`` accepts; ``"localhost"`` is this machine, without a login. ``"slurm"``: the
            nodes of the allocation that this notebook runs in, or with ``nodes=`` of a new one.
            ``"ray"``: nodes of the Ray cluster that runs here or at ``address``.
        nodes: ask Slurm, by ``salloc``, or Ray, by a placement group, for so many nodes. They are given back when the
            cluster is closed, and however the notebook ends. A long wait is shown; an interrupt cancels the request.
        gpus_per_node: of these nodes.
        time: the limit of the allocation, as for ``salloc``: ``"2:00:00"``.
        salloc: more words for ``salloc``: ``["--partition=gpu", "--account=vision"]``.
        address: of Ray: ``HOST:PORT``, as ``ray start --head`` prints it. Default: Ray's own.
        launcher: a command that runs another on a host, instead of ssh, with ``{host}`` in it:
            ``["kubectl", "exec", "-i", "{host}", "--"]``. The words of the other command are appended, joined into
            one line for a shell if one of the launcher's words is ``ssh``.
        python: the interpreter on the hosts, or a mapping from host to interpreter. Default: the path of this
            interpreter if it exists there, else ``python3``.
        setup: shell commands that come before the interpreter, e.g. ``"module load cuda && conda activate train"``,
            in a bash login shell.
        heartbeat: seconds without data after which the notebook gives up a host, and a host that gets none from the
            notebook ends its ranks.
        login_timeout: seconds until a host must have answered; it imports torch before that.

    Raises:
        LaunchError: a host cannot be used, or Slurm grants no nodes; names the host and the remedy.
    """
    _check_numbers(heartbeat, login_timeout)
    supplier = _supplier(hosts, launcher, (nodes, gpus_per_node, time, salloc, address))
    try:
        names = supplier.open()
        _check_names(names, python)
        template = supplier.template()

        def command_of(host: str) -> list[str]:
            return command_for(host, template, python.get(host) if isinstance(python, Mapping) else python, setup)

        return Cluster(names, command_of, float(heartbeat), float(login_timeout), supplier)
    except BaseException:
        supplier.close()
        raise


def _supplier(hosts: Any, launcher: Sequence[str] | None, request: tuple[Any, ...]) -> Supplier:
    """Return what gives the hosts. Raises LaunchError for arguments that cannot work."""
    nodes, gpus_per_node, time_limit, salloc, address = request
    if isinstance(launcher, str):
        raise LaunchError("launcher is a list of words, e.g. ['kubectl', 'exec', '-i', '{host}', '--'], not one string")
    if launcher is not None and not any("{host}" in word for word in launcher):
        raise LaunchError("launcher does not say where the host's name goes: put '{host}' in one of its words")
    if hosts == RAY:
        if time_limit is not None or salloc or launcher is not None:
            raise LaunchError("time, salloc and launcher are not for Ray: nbddp.cluster('ray', nodes=2)")
        check_numbers(nprocs=nodes)
        if nodes is None:
            raise LaunchError("give the number of nodes: nbddp.cluster('ray', nodes=2, gpus_per_node=8)")
        return OnRay(nodes, gpus_per_node, address)
    if address is not None:
        raise LaunchError("address= is Ray's: nbddp.cluster('ray', nodes=2, address=...)")
    if nodes is None:
        if any(each is not None for each in (gpus_per_node, time_limit)) or salloc:
            raise LaunchError("gpus_per_node, time and salloc need nodes=, the number of nodes to ask Slurm for")
        template = launcher if launcher is not None else (SRUN if hosts == SLURM else SSH)
        return Named(slurm_nodes() if hosts == SLURM else hosts, template)
    if hosts != SLURM or launcher is not None:
        raise LaunchError("nodes= asks Slurm for nodes: nbddp.cluster('slurm', nodes=2), without a launcher")
    check_numbers(nprocs=nodes)
    if isinstance(salloc, str):
        raise LaunchError("salloc is a list of words, e.g. ['--partition=gpu'], not one string")
    return Allocated(nodes, gpus_per_node, time_limit, salloc)


def _check_names(names: Any, python: Any) -> None:
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) and n for n in names):
        raise LaunchError(f"hosts is a list of names, e.g. hosts=['gpu1', 'gpu2'], or 'slurm', not {_type_text(names)}")
    if invalid := [index for index, name in enumerate(names) if not is_name(name)]:
        raise LaunchError(
            f"hosts[{invalid[0]}] is not the name of a host such as 'gpu1', 'user@gpu1.example.org' or an IP address, "
            "without spaces or quotes; options of ssh belong in ~/.ssh/config, and logins use keys, not passwords"
        )
    twice = [name for name in names if list(names).count(name) > 1]
    if twice:
        raise LaunchError(f"{twice[0]} is named twice: name it once, with more ranks")
    if isinstance(python, Mapping) and (strange := [name for name in python if name not in names]):
        raise LaunchError(f"python names {strange[0]!r}, which is not in hosts")


def _check_numbers(heartbeat: Any, login_timeout: Any) -> None:
    if not isinstance(heartbeat, (int, float)) or not heartbeat >= _LEAST_HEARTBEAT_S:
        raise LaunchError(f"heartbeat is a number of seconds, {_LEAST_HEARTBEAT_S:.0f} or more, not {heartbeat!r}")
    if not isinstance(login_timeout, (int, float)) or not login_timeout > 0:
        raise LaunchError(f"login_timeout is a number of seconds, not {login_timeout!r}")


def _type_text(hosts: object) -> str:
    """Return the type of what was given instead of names; its values may be secret, such as passwords by host."""
    if isinstance(hosts, (list, tuple)):
        return f"a {type(hosts).__name__} of {', '.join(sorted({type(n).__name__ for n in hosts})) or 'none'}"
    return "a string" if isinstance(hosts, str) else f"a {type(hosts).__name__}"


def _has_devices(host: Host, plan: Plan) -> bool:
    """Return whether a host that is back still has the devices of its ranks."""
    share = dict(plan.shares)[host.name]
    return plan.device == "cpu" or int(host.facts["devices"].get(plan.device, 0)) >= share


def _log_out(hosts: list[Host]) -> None:
    for host in hosts:
        host.send({"kind": "bye"})
    deadline = time.monotonic() + _LOGOUT_TIMEOUT_S
    for host in hosts:
        host.close(deadline)
    hosts.clear()


def _log_out_forgotten(logins: Returns, supplier: Supplier, owner: int) -> None:
    """Log out, on a thread, when a cluster is garbage-collected: a cell that makes one was run again."""

    def log_out() -> None:
        logins.close()
        _log_out(logins.hosts)
        supplier.close()

    if logins.hosts and os.getpid() == owner:
        start_thread(log_out, "nbddp-logout", lambda _: log_out())


def log_in(hosts: Sequence[str] | str | Cluster, until: contextlib.ExitStack) -> Cluster:
    """Return the cluster that ``run(hosts=...)`` names; a cluster that is made here ends with ``until``."""
    return hosts if isinstance(hosts, Cluster) else until.enter_context(cluster(hosts))


def _disown_all() -> None:
    for opened in list(_open):
        opened.disown()
    _open.clear()


def _close_all() -> None:
    for opened in list(_open):
        opened.close()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)
