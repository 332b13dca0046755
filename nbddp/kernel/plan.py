"""Kernel side. What a run is to be: every argument checked, every default decided, before any process exists."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nbddp.errors import LaunchError, first_line, short
from nbddp.kernel import forked, forkserver
from nbddp.kernel.devices import check_cores, choose_backend, choose_device, choose_nprocs, choose_shares
from nbddp.kernel.environment import CONTRACT, Place, environment, threads_of
from nbddp.kernel.rendezvous import Rendezvous
from nbddp.process_state import ProcessState, present

STALL_AFTER_S = 60.0


@dataclass(frozen=True)
class Plan:
    """A run, decided. Built by :func:`make_plan` alone.

    Attributes:
        device: ``"cpu"``, ``"cuda"`` or another accelerator's type.
        backend: of the ready-made process group; None for none (``init=False``).
        contract: do the ranks get torchrun's environment variables?
        environ, process_state, sys_path, cwd: the kernel's own at this moment.
        notice: a default that the user should hear of, or "".
        env: what the user adds to the environment.
        shares: how many ranks each host has, in the order of the ranks; () on this machine alone.
        min_hosts: with so many left, a run that may restart goes on.
        keep_children: may processes that a rank has detached outlive it?
        optional: keyword arguments that are left out where they do not pickle.
        receive: makes the run's values of what the ranks returned, on the run's thread.
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
    keep_children: bool = False
    notice: str = ""
    optional: frozenset[str] = frozenset()
    receive: Callable[[list[Any]], list[Any]] = list

    def rank_environ(self, rank: int, rendezvous: Rendezvous, restart_count: int) -> dict[str, str]:
        """The whole environment of one rank."""
        if not self.contract:
            return self.environ
        place = Place(rank, rank, self.nprocs, self.nprocs)
        run_id = f"nbddp-{os.getpid()}-{rendezvous.port}"
        return {
            **self.environ,
            **rendezvous.environ(),
            **place.environ(run_id, restart_count=restart_count, max_restarts=self.max_restarts),
        }


def make_plan(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    nprocs: int | Mapping[str, int] | None = None,
    device: str | torch.device | None = None,
    gpus: Sequence[int] | None = None,
    backend: str | None = None,
    init: bool = True,
    seed: int | None = None,
    deterministic: bool = False,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    pg_timeout: float | None = None,
    max_restarts: int = 0,
    stall_after: float | None = STALL_AFTER_S,
    name: str | None = None,
    start_method: str | None = None,
    keep_children: bool = False,
    argv: Sequence[str] = (),
    contract: bool = True,
    pass_rank: bool = False,
    hosts: Mapping[str, Mapping[str, int]] | None = None,
    min_hosts: int | None = None,
    oversubscribe: bool = False,
) -> Plan:
    """Check and decide. The arguments are those of :func:`nbddp.run`.

    Args:
        hosts: how many devices of which type each host has; None: this machine alone.

    Raises:
        LaunchError: an argument that cannot work, with what to do instead.
    """
    name = check_call(fn, (0, *args) if pass_rank else args, kwargs, name)
    cwd = working_directory()
    _check_numbers(max_restarts=max_restarts, seed=seed)
    for share in nprocs.values() if isinstance(nprocs, Mapping) and hosts is not None else (nprocs,):
        _check_numbers(nprocs=share)
    _check_numbers(timeout=timeout, pg_timeout=pg_timeout, stall_after=stall_after)
    _check_containers(gpus, env, contract)
    shares: dict[str, int] = {}
    if hosts is None:
        if min_hosts is not None:
            raise LaunchError(f"min_hosts={short(min_hosts)} goes with hosts=[...]")
        assert not isinstance(nprocs, Mapping)
        device_type, count = choose_device(device, gpus)
        ranks = choose_nprocs(nprocs, device_type, count, gpus)
        if device_type == "cpu" and not oversubscribe:
            check_cores(ranks)
    else:
        device_type, shares = choose_shares(hosts, nprocs, device, gpus)
        ranks = sum(shares.values())
    notice = ""
    if device is None and gpus is None and device_type == "cpu" and nprocs is None:
        notice = f"no GPU: {ranks} processes on CPU" + (" with gloo" if init and backend in (None, "gloo") else "")
    threads = threads_of(ranks, {**os.environ, **(env or {})})
    start_method = _choose_start_method(start_method, keep_children)
    environ = environment(
        device_type, gpus if hosts is None else None, deterministic, threads if contract else None, env
    )
    if hosts is None:
        forkserver.check_folder(start_method, environ)
    return Plan(
        name=name,
        nprocs=ranks,
        device=device_type,
        backend=choose_backend(backend, device_type, here=hosts is None) if init else None,
        contract=contract,
        pass_rank=pass_rank,
        seed=seed,
        deterministic=bool(deterministic),
        threads=threads,
        timeout_s=timeout,
        pg_timeout_s=pg_timeout,
        max_restarts=max_restarts,
        stall_after_s=stall_after,
        start_method=start_method,
        argv=[name, *argv],
        environ=environ,
        process_state=present(),
        sys_path=forked.import_path(),
        cwd=cwd,
        gpus=tuple(gpus) if gpus is not None else None,
        env=dict(env or {}),
        shares=tuple(shares.items()),
        min_hosts=_choose_min_hosts(min_hosts, len(shares)),
        keep_children=bool(keep_children),
        notice=notice,
    )


# ---------------------------------------------------------------------------- the function


def check_call(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str | None) -> str:
    """The run's name. Raises LaunchError if this is no function, or cannot be called so."""
    name = first_line(str(name or _name_of(fn)))
    _check_function(fn, args, kwargs, name)
    return name


def working_directory() -> str:
    """The notebook's, in which the ranks start. Raises LaunchError if it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise LaunchError(
            f"the notebook's working directory{_last_known_directory()} has been deleted, and the ranks would start "
            "in it. Change to one that exists, with %cd or os.chdir()"
        ) from None


def _last_known_directory() -> str:
    try:
        return f", {os.readlink('/proc/self/cwd').removesuffix(' (deleted)')},"
    except OSError:  # not on Linux
        return ""


def _name_of(fn: Any) -> str:
    fn = getattr(fn, "func", fn)  # functools.partial
    return str(getattr(fn, "__name__", type(fn).__name__))


def _check_function(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> None:
    if not callable(fn):
        advice = " Pass the function itself, without calling it: run(train), not run(train())." if fn is None else ""
        raise LaunchError(f"run() takes a function, not {short(fn)}.{advice}")
    if isinstance(args, (str, bytes)) or not isinstance(args, (tuple, list)):
        raise LaunchError(f"args is a tuple of {name}'s arguments, e.g. args=({short(args)},), not {short(args)}")
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise LaunchError(f"kwargs is a dict of {name}'s keyword arguments, not {short(kwargs)}")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        kind = "a generator function" if inspect.isgeneratorfunction(fn) else "a coroutine function"
        raise LaunchError(f"{name} is {kind}: calling it runs none of its lines. Use a plain function")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise LaunchError(f"{name}{signature} cannot be called with these arguments: {error}") from None


def _check_numbers(**named: Any) -> None:
    for name, value in named.items():
        if value is None:
            continue
        whole = name in ("nprocs", "max_restarts", "seed")
        least = {"nprocs": 1}.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise LaunchError(f"{name} is {'a whole number' if whole else 'a number of seconds'}, not {short(value)}")
        if value < least or (not whole and not value > 0):
            advice = ""
            if name == "nprocs" and value == 0:
                advice = " (torch.cuda.device_count() is 0 without a GPU); leave it out for the default"
            raise LaunchError(f"{name}={value} is too small{advice}")


def _check_containers(gpus: Any, env: Any, contract: bool) -> None:
    if gpus is not None and not (gpus and isinstance(gpus, (list, tuple, range))):
        raise LaunchError(f"gpus is a list of device numbers, e.g. gpus=[0, 1], not {short(gpus)}")
    if env is not None and not isinstance(env, Mapping):
        raise LaunchError(f"env is a dict of strings, not {type(env).__name__}")
    ours = [name for name in env or () if contract and name in CONTRACT]
    if ours:
        raise LaunchError(f"env sets {ours[0]}, which tells a rank its place and is set for each. Leave it out")


# ---------------------------------------------------------------------------- surroundings


def _choose_min_hosts(min_hosts: int | None, hosts: int) -> int:
    if min_hosts is None:
        return hosts
    if isinstance(min_hosts, bool) or not isinstance(min_hosts, int) or not 1 <= min_hosts <= hosts:
        raise LaunchError(f"min_hosts is a whole number from 1 to the number of hosts, {hosts}, not {short(min_hosts)}")
    return min_hosts


def _choose_start_method(start_method: str | None, keep_children: bool) -> str:
    if keep_children and start_method == "forkserver":
        raise LaunchError("keep_children=True goes with start_method='spawn': a fork server ends what its ranks leave")
    if start_method is None and not keep_children:
        return "forkserver" if forkserver.available() else "spawn"
    if start_method == "fork":
        raise LaunchError(
            "start_method='fork' would copy the notebook's process, its threads' locks and its CUDA context with "
            "it; 'forkserver' is as fast and starts clean"
        )
    if start_method not in (None, "forkserver", "spawn"):
        raise LaunchError(f"start_method is 'forkserver' or 'spawn', not {short(start_method)}")
    return start_method or "spawn"
