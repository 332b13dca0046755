"""Makes the plan of a run: checks every argument and decides every default before a process exists."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbddp.errors import LaunchError
from nbddp.forkserver import process
from nbddp.forkserver import server as forkserver
from nbddp.kernel.options import RunOptions
from nbddp.launch.devices import (
    check_cores,
    check_shared_gpus,
    choose_backend,
    choose_device,
    choose_nprocs,
    choose_shares,
)
from nbddp.launch.environment import CONTRACT, RankPosition, environment, threads_of
from nbddp.launch.rendezvous import Rendezvous
from nbddp.panel import frontend
from nbddp.payload import hints
from nbddp.payload.known import Known
from nbddp.process_state import ProcessState, present
from nbddp.text import first_line, short


@dataclass(frozen=True)
class Plan:
    """Everything that is decided about a run before it starts; made by :func:`make_plan` alone.

    Attributes:
        device: ``"cpu"``, ``"cuda"`` or another accelerator's type.
        backend: the backend of the process group that nbddp opens; None for ``init=False``.
        contract: the ranks get torchrun's environment variables.
        pass_rank: the function is called with the rank as its first argument.
        environ, process_state, sys_path, cwd: the notebook kernel's when the plan is made.
        notice: a default that the user should know, or "".
        env: the environment variables that the user adds.
        shares: the number of ranks on each host, in the order of the ranks; () on this machine alone.
        min_hosts: how many hosts must be left for a restart.
        grow: all ranks start again at the next snapshot when a lost host is back.
        keep_children: processes that a rank has detached may outlive it.
        optional: keyword arguments that are left out if they cannot be pickled.
        receive: turns the ranks' return values into the run's values; called off the main thread.
        stays: the ranks take more calls after this one: a session's.
        sent: of a session, the notebook's variables that its ranks have.
        summary: what the views say about the ranks; "" for the default.
        attended: somebody can answer the debugger of the ranks.
        post_mortem: an exception of the user's code opens the debugger.
        ranks: those that take part, in order; None: all.
        listen: what the user's code logs with other libraries draws curves.
    """

    name: str
    nprocs: int
    device: str
    backend: str | None
    contract: bool
    pass_rank: bool
    seed: int | None
    deterministic: bool
    threads: int
    timeout_s: float | None
    pg_timeout_s: float | None
    max_restarts: int
    stall_after_s: float | None
    stop_on_nan: bool
    start_method: str
    argv: list[str]
    environ: dict[str, str]
    process_state: ProcessState
    sys_path: list[str]
    cwd: str
    gpus: tuple[int, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    shares: tuple[tuple[str, int], ...] = ()
    min_hosts: int = 0
    grow: bool = False
    keep_children: bool = False
    notice: str = ""
    optional: frozenset[str] = frozenset()
    receive: Callable[[list[Any]], list[Any]] = list
    stays: bool = False
    sent: Known | None = None
    summary: str = ""
    attended: bool = False
    post_mortem: bool = False
    ranks: tuple[int, ...] | None = None
    listen: bool = True

    @property
    def inherits(self) -> bool:
        """Whether the ranks can get objects that a process gets only when it starts: queues, locks, shared tensors."""
        return not self.shares and not self.stays

    def rank_environ(self, rank: int, rendezvous: Rendezvous, restart_count: int) -> dict[str, str]:
        """Return the whole environment of one rank."""
        if not self.contract:
            return self.environ
        position = RankPosition(rank, rank, self.nprocs, self.nprocs)
        run_id = f"nbddp-{os.getpid()}-{rendezvous.port}"
        return {
            **self.environ,
            **rendezvous.environ(),
            **position.environ(run_id, restart_count=restart_count, max_restarts=self.max_restarts),
        }


@dataclass(frozen=True)
class Call:
    """A checked function and its arguments (:func:`checked_call`), or a cell body."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def make_plan(
    name: str,
    options: RunOptions,
    *,
    argv: Sequence[str] = (),
    contract: bool = True,
    pass_rank: bool = False,
    devices: Mapping[str, Mapping[str, int]] | None = None,
) -> Plan:
    """Check the options and choose the values of those that are None.

    Args:
        options: all options of :func:`nbddp.run`.
        devices: by host, the number of devices of each type; None: this machine alone.

    Raises:
        LaunchError: an option cannot work; says what to do instead.
    """
    cwd = working_directory()
    _check_options(options, contract, hosts=None if devices is None else len(devices))
    device, gpus, env, backend = options["device"], options["gpus"], options["env"], options["backend"]
    local = devices is None
    device_type, ranks, shares = _choose_ranks(options, devices)
    chosen = choose_backend(backend, device_type, local=local) if options["init"] else None
    notice = check_shared_gpus(gpus or (), chosen or backend, {**os.environ, **(env or {})})
    if device is None and gpus is None and device_type == "cpu" and options["nprocs"] is None:
        with_gloo = " with gloo" if options["init"] and backend in (None, "gloo") else ""
        notice = f"no GPU: {ranks} processes on CPU{with_gloo}"
    threads = threads_of(ranks, {**os.environ, **(env or {})})
    start_method = _choose_start_method(options["start_method"], options["keep_children"])
    environ = environment(
        device_type, gpus if local else None, options["deterministic"], threads if contract else None, env
    )
    if local:
        forkserver.check_folder(start_method, environ)
    return Plan(
        name=name,
        nprocs=ranks,
        device=device_type,
        backend=chosen,
        contract=contract,
        pass_rank=pass_rank,
        seed=options["seed"],
        deterministic=bool(options["deterministic"]),
        threads=threads,
        timeout_s=options["timeout"],
        pg_timeout_s=options["pg_timeout"],
        max_restarts=options["max_restarts"],
        stall_after_s=options["stall_after"],
        stop_on_nan=bool(options["stop_on_nan"]),
        start_method=start_method,
        argv=[name, *argv],
        environ=environ,
        process_state=present(),
        sys_path=process.import_path(),
        cwd=cwd,
        gpus=tuple(gpus) if gpus is not None else None,
        env=dict(env or {}),
        shares=tuple(shares.items()),
        min_hosts=len(shares) if options["min_hosts"] is None else options["min_hosts"],
        grow=bool(options["grow"]),
        keep_children=bool(options["keep_children"]),
        notice=notice,
        attended=is_attended(options),
        post_mortem=has_post_mortem(options),
        listen=bool(options["listen"]),
    )


def is_attended(options: RunOptions) -> bool:
    """Return whether somebody can answer the debugger of the ranks."""
    return bool(options["wait"]) and frontend.has_stdin()


def has_post_mortem(options: RunOptions) -> bool:
    """Return whether an exception opens the debugger."""
    return frontend.call_pdb() if options["pdb"] is None else bool(options["pdb"])


def _check_options(options: RunOptions, contract: bool, *, hosts: int | None) -> None:
    nprocs, gpus, env, min_hosts = options["nprocs"], options["gpus"], options["env"], options["min_hosts"]
    check_numbers(max_restarts=options["max_restarts"], seed=options["seed"])
    for share in nprocs.values() if isinstance(nprocs, Mapping) and hosts is not None else (nprocs,):
        check_numbers(nprocs=share)
    check_numbers(**{name: options[name] for name in ("timeout", "pg_timeout", "stall_after")})
    if gpus is not None and not (gpus and isinstance(gpus, (list, tuple, range))):
        raise LaunchError(f"gpus is a list of device numbers, e.g. gpus=[0, 1], not {short(gpus)}")
    if env is not None and not isinstance(env, Mapping):
        raise LaunchError(f"env is a dict of strings, not {type(env).__name__}")
    if reserved := [name for name in env or () if contract and name in CONTRACT]:
        raise LaunchError(f"env sets {reserved[0]}, which nbddp sets to each rank's own value. Leave it out")
    if options["grow"] and hosts is None:
        raise LaunchError("grow=True needs hosts=[...]")
    if min_hosts is None:
        return
    if hosts is None:
        raise LaunchError(f"min_hosts={short(min_hosts)} needs hosts=[...]")
    if isinstance(min_hosts, bool) or not isinstance(min_hosts, int) or not 1 <= min_hosts <= hosts:
        raise LaunchError(f"min_hosts is a whole number from 1 to the number of hosts, {hosts}, not {short(min_hosts)}")


def _choose_ranks(
    options: RunOptions, devices: Mapping[str, Mapping[str, int]] | None
) -> tuple[str, int, dict[str, int]]:
    """Return the device type, the number of ranks, and each host's number of ranks ({} on this machine alone)."""
    nprocs, device, gpus = options["nprocs"], options["device"], options["gpus"]
    if devices is not None:
        device_type, shares = choose_shares(devices, nprocs, device, gpus)
        return device_type, sum(shares.values()), shares
    assert not isinstance(nprocs, Mapping)
    device_type, count = choose_device(device, gpus)
    ranks = choose_nprocs(nprocs, device_type, count, gpus)
    if device_type == "cpu" and not options["oversubscribe"]:
        check_cores(ranks)
    return device_type, ranks, {}


# ---------------------------------------------------------------------------- the function


def checked_call(fn: Any, args: Any, kwargs: Any, name: str | None = None, *, first: tuple[Any, ...] = ()) -> Call:
    """Check a function and its arguments, and name the run.

    Args:
        first: arguments that a rank passes before ``args``.

    Raises:
        LaunchError: ``fn`` is not a function, or does not accept the arguments.
    """
    kwargs = kwargs or {}
    named = getattr(fn, "func", fn)  # functools.partial
    name = first_line(str(name or getattr(named, "__name__", type(named).__name__)))
    if not callable(fn):
        advice = " Pass the function itself, without calling it: run(train), not run(train())." if fn is None else ""
        raise LaunchError(f"run() takes a function, not {short(fn)}.{advice}")
    if isinstance(args, (str, bytes)) or not isinstance(args, (tuple, list)):
        raise LaunchError(f"args is a tuple of {name}'s arguments, e.g. args=({short(args)},), not {short(args)}")
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise LaunchError(f"kwargs is a dict of {name}'s keyword arguments, not {short(kwargs)}")
    _check_signature(fn, (*first, *args), kwargs, name)
    return Call(name, fn, tuple(args), dict(kwargs))


def working_directory() -> str:
    """Return the notebook's working directory, where the ranks start. Raises LaunchError if it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        path = ""
        with contextlib.suppress(OSError):  # not on Linux
            path = f", {os.readlink('/proc/self/cwd').removesuffix(' (deleted)')},"
        raise LaunchError(
            f"the notebook's working directory{path} has been deleted, and the ranks would start in it. "
            "Change to one that exists, with %cd or os.chdir()"
        ) from None


def _check_signature(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> None:
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        kind = "a generator function" if inspect.isgeneratorfunction(fn) else "a coroutine function"
        raise LaunchError(f"{name} is {kind}: calling it runs none of its lines. Use a plain function")
    try:
        signature = hints.signature(fn)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        shown = hints.shown(signature)
        raise LaunchError(f"{name}{shown} cannot be called with these arguments: {error}") from None


def check_numbers(**named: Any) -> None:
    """Check options that are numbers, or None. Raises LaunchError."""
    for name, value in named.items():
        if value is None:
            continue
        whole = name in ("nprocs", "max_restarts", "seed")
        least = 1 if name == "nprocs" else 0
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise LaunchError(f"{name} is {'a whole number' if whole else 'a number of seconds'}, not {short(value)}")
        if value < least or (not whole and not value > 0):
            advice = ""
            if name == "nprocs" and value == 0:
                advice = " (torch.cuda.device_count() is 0 without a GPU); leave it out for the default"
            raise LaunchError(f"{name}={value} is too small{advice}")


def _choose_start_method(start_method: str | None, keep_children: bool) -> str:
    if keep_children and start_method == "forkserver":
        raise LaunchError(
            "keep_children=True needs start_method='spawn': a fork server ends the processes that its ranks leave"
        )
    if start_method is None and not keep_children:
        return "forkserver" if forkserver.available() else "spawn"
    if start_method == "fork":
        raise LaunchError(
            "start_method='fork' would copy the notebook's process with its threads' locks and its CUDA context; "
            "'forkserver' is as fast and has neither"
        )
    if start_method not in (None, "forkserver", "spawn"):
        raise LaunchError(f"start_method is 'forkserver' or 'spawn', not {short(start_method)}")
    return start_method or "spawn"
