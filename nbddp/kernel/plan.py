"""Kernel side. What a run is to be: every argument checked, every default decided, before any process exists."""

from __future__ import annotations

import inspect
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from nbddp.errors import LaunchError
from nbddp.kernel import forkserver
from nbddp.kernel.rendezvous import Rendezvous

# What torchrun's environment contract says differently to each rank or run.
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_CONTRACT = (*_PLACE, "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STALL_AFTER_S = 60.0
CPU_NPROCS = 2  # ranks on a machine without GPUs, when the user does not say


@dataclass(frozen=True)
class Plan:
    """A run, decided. Built by :func:`make_plan` alone.

    Attributes:
        device: ``"cpu"``, ``"cuda"`` or another accelerator's type.
        backend: of the ready-made process group; None for none (``init=False``).
        contract: do the ranks get torchrun's environment variables?
        environ, sys_path, cwd: the kernel's own at this moment.
        notice: a default that the user should hear of, or "".
        env: what the user adds to the environment.
        shares: how many ranks each host has, in the order of the ranks; () on this machine alone.
        min_hosts: with so many left, a run that may restart goes on.
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
    sys_path: list[str]
    cwd: str
    gpus: tuple[int, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    shares: tuple[tuple[str, int], ...] = ()
    min_hosts: int = 0
    notice: str = ""
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


@dataclass(frozen=True)
class Place:
    """A rank's among the others."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int = 0
    group_world_size: int = 1

    def environ(self, run_id: str, *, restart_count: int, max_restarts: int) -> dict[str, str]:
        """torchrun's environment contract, but for the store's address."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.group_rank),
            "GROUP_WORLD_SIZE": str(self.group_world_size),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "TORCHELASTIC_RESTART_COUNT": str(restart_count),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            "TORCHELASTIC_RUN_ID": run_id,
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
    argv: Sequence[str] = (),
    contract: bool = True,
    pass_rank: bool = False,
    hosts: Mapping[str, Mapping[str, int]] | None = None,
    min_hosts: int | None = None,
) -> Plan:
    """Check and decide. The arguments are those of :func:`nbddp.run`.

    Args:
        hosts: how many devices of which type each host has; None: this machine alone.

    Raises:
        LaunchError: an argument that cannot work, with what to do instead.
    """
    name = check_call(fn, (0, *args) if pass_rank else args, kwargs, name)
    _check_numbers(max_restarts=max_restarts, seed=seed)
    for share in nprocs.values() if isinstance(nprocs, Mapping) and hosts is not None else (nprocs,):
        _check_numbers(nprocs=share)
    _check_numbers(timeout=timeout, pg_timeout=pg_timeout, stall_after=stall_after)
    _check_containers(gpus, env, contract)
    shares: dict[str, int] = {}
    if hosts is None:
        if min_hosts is not None:
            raise LaunchError(f"min_hosts={_short(min_hosts)} goes with hosts=[...]")
        assert not isinstance(nprocs, Mapping)
        device_type, count = _choose_device(device, gpus)
        ranks = _choose_nprocs(nprocs, device_type, count, gpus)
    else:
        device_type, shares = choose_shares(hosts, nprocs, device, gpus)
        ranks = sum(shares.values())
    notice = ""
    if device is None and gpus is None and device_type == "cpu" and nprocs is None:
        notice = f"no GPU: {ranks} processes on CPU" + (" with gloo" if init and backend in (None, "gloo") else "")
    threads = threads_of(ranks, {**os.environ, **(env or {})})
    return Plan(
        name=name,
        nprocs=ranks,
        device=device_type,
        backend=_choose_backend(backend, device_type, here=hosts is None) if init else None,
        contract=contract,
        pass_rank=pass_rank,
        seed=seed,
        deterministic=bool(deterministic),
        threads=threads,
        timeout_s=timeout,
        pg_timeout_s=pg_timeout,
        max_restarts=max_restarts,
        stall_after_s=stall_after,
        start_method=_choose_start_method(start_method),
        argv=[name, *argv],
        environ=environment(
            device_type, gpus if hosts is None else None, deterministic, threads if contract else None, env
        ),
        sys_path=[path or os.getcwd() for path in sys.path],
        cwd=os.getcwd(),
        gpus=tuple(gpus) if gpus is not None else None,
        env=dict(env or {}),
        shares=tuple(shares.items()),
        min_hosts=_choose_min_hosts(min_hosts, len(shares)),
        notice=notice,
    )


# ---------------------------------------------------------------------------- the function


def check_call(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str | None) -> str:
    """The run's name. Raises LaunchError if this is no function, or cannot be called so."""
    name = name or _name_of(fn)
    _check_function(fn, args, kwargs, name)
    return name


def _name_of(fn: Any) -> str:
    fn = getattr(fn, "func", fn)  # functools.partial
    return str(getattr(fn, "__name__", type(fn).__name__))


def _check_function(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> None:
    if not callable(fn):
        advice = " Pass the function itself, without calling it: run(train), not run(train())." if fn is None else ""
        raise LaunchError(f"run() takes a function, not {_short(fn)}.{advice}")
    if isinstance(args, (str, bytes)) or not isinstance(args, (tuple, list)):
        raise LaunchError(f"args is a tuple of {name}'s arguments, e.g. args=({_short(args)},), not {_short(args)}")
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise LaunchError(f"kwargs is a dict of {name}'s keyword arguments, not {_short(kwargs)}")
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
            raise LaunchError(f"{name} is {'a whole number' if whole else 'a number of seconds'}, not {_short(value)}")
        if value < least or (not whole and not value > 0):
            advice = ""
            if name == "nprocs" and value == 0:
                advice = " (torch.cuda.device_count() is 0 without a GPU); leave it out for the default"
            raise LaunchError(f"{name}={value} is too small{advice}")


def _check_containers(gpus: Any, env: Any, contract: bool) -> None:
    if gpus is not None and not (gpus and isinstance(gpus, (list, tuple, range))):
        raise LaunchError(f"gpus is a list of device numbers, e.g. gpus=[0, 1], not {_short(gpus)}")
    if env is not None and not isinstance(env, Mapping):
        raise LaunchError(f"env is a dict of strings, not {_short(env)}")
    ours = [name for name in env or () if contract and name in _CONTRACT]
    if ours:
        raise LaunchError(f"env sets {ours[0]}, which tells a rank its place and is set for each. Leave it out")


# ---------------------------------------------------------------------------- devices


def _choose_device(device: str | torch.device | None, gpus: Sequence[int] | None) -> tuple[str, int]:
    """The device type, and how many of it there are (0 for the CPU)."""
    if device is None:
        found = accelerator()
        if found is None and gpus is not None:
            raise LaunchError(f"gpus={list(gpus)}, but torch sees no GPU here. Leave gpus out to run on the CPU")
        return found or ("cpu", 0)
    device_type = _type_of(device, gpus)
    if device_type == "cpu":
        return "cpu", 0
    count = _device_count(device_type)
    if count == 0:
        raise LaunchError(f"device={device_type!r}, but torch sees none here. Use device='cpu', or leave it out")
    return device_type, count


def _type_of(device: str | torch.device, gpus: Sequence[int] | None) -> str:
    """What ``device=`` says."""
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LaunchError(f"device={device!r} is no torch device: {str(error).splitlines()[0]}") from None
    if wanted.index is not None:
        raise LaunchError(f"device={str(device)!r} names one device; say device={wanted.type!r}, gpus=[{wanted.index}]")
    if wanted.type == "cpu" and gpus is not None:
        raise LaunchError(f"gpus={list(gpus)} and device='cpu' exclude each other; leave one out")
    return wanted.type


def accelerator() -> tuple[str, int] | None:
    """This machine's accelerator, found without making a context on it."""
    current = torch.accelerator.current_accelerator()
    # MPS has one device and no collectives of its own: nothing to distribute over.
    if current is None or current.type == "mps":
        return None
    count = _device_count(current.type)
    return (current.type, count) if count else None


def _device_count(device_type: str) -> int:
    try:
        module = torch.get_device_module(device_type)
    except RuntimeError:
        return 0
    return int(module.device_count()) if hasattr(module, "device_count") else 0


def _choose_nprocs(nprocs: int | None, device_type: str, count: int, gpus: Sequence[int] | None) -> int:
    if gpus is not None:
        _check_gpus(gpus, device_type, count)
        if nprocs not in (None, len(gpus)):
            raise LaunchError(f"nprocs={nprocs}, but gpus={list(gpus)} are {len(gpus)}: one process per GPU")
        return len(gpus)
    if device_type == "cpu":
        return nprocs or CPU_NPROCS
    if nprocs is not None and nprocs > count:
        raise LaunchError(
            f"nprocs={nprocs}, but this machine has {count} {device_type} device{'s' * (count != 1)}: "
            f"one process per device. Use nprocs={count}, or device='cpu'"
        )
    return nprocs or count


def _check_gpus(gpus: Sequence[int], device_type: str, count: int) -> None:
    if device_type != "cuda":
        raise LaunchError(f"gpus= picks CUDA devices; for {device_type} use its own environment variable")
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in gpus):
        raise LaunchError(f"gpus is a list of device numbers, e.g. gpus=[0, 1], not {_short(gpus)}")
    missing = [i for i in gpus if not 0 <= i < count]
    if missing:
        raise LaunchError(f"gpus={list(gpus)}: there is no GPU {missing[0]} here, only {list(range(count))}")
    if len(set(gpus)) != len(gpus):
        raise LaunchError(f"gpus={list(gpus)} names a GPU twice: one process per GPU")


def choose_shares(
    hosts: Mapping[str, Mapping[str, int]],
    nprocs: int | Mapping[str, int] | None,
    device: str | torch.device | None,
    gpus: Sequence[int] | None,
) -> tuple[str, dict[str, int]]:
    """The device type, and how many ranks each host has.

    Args:
        hosts: how many devices of which type each has.

    Raises:
        LaunchError: names the host.
    """
    device_type = _type_on_all(hosts, device, gpus)
    if isinstance(nprocs, Mapping):
        _check_mapping(nprocs, hosts)
    shares = {}
    for host, devices in hosts.items():
        asked = nprocs[host] if isinstance(nprocs, Mapping) else nprocs
        try:
            shares[host] = _choose_nprocs(asked, device_type, devices.get(device_type, 0), gpus)
        except LaunchError as error:
            raise LaunchError(f"{host}: {error}") from None
    if nprocs is None and len(set(shares.values())) > 1:
        counts = ", ".join(f"{host} has {count}" for host, count in shares.items())
        example = "{" + ", ".join(f"{host!r}: {count}" for host, count in shares.items()) + "}"
        raise LaunchError(f"the hosts have different numbers of {device_type} devices: {counts}. Say nprocs={example}")
    return device_type, shares


def _choose_min_hosts(min_hosts: int | None, hosts: int) -> int:
    if min_hosts is None:
        return hosts
    if isinstance(min_hosts, bool) or not isinstance(min_hosts, int) or not 1 <= min_hosts <= hosts:
        raise LaunchError(
            f"min_hosts is a whole number from 1 to the number of hosts, {hosts}, not {_short(min_hosts)}"
        )
    return min_hosts


def _type_on_all(
    hosts: Mapping[str, Mapping[str, int]], device: str | torch.device | None, gpus: Sequence[int] | None
) -> str:
    if device is None:
        found = {next(iter(devices), "cpu") for devices in hosts.values()}
        if len(found) > 1:
            told = ", ".join(f"{host} has {next(iter(devices), 'none')}" for host, devices in hosts.items())
            raise LaunchError(f"not every host has the same kind of device: {told}. Say device='cpu', or leave one out")
        return found.pop()
    device_type = _type_of(device, gpus)
    for host, devices in hosts.items():
        if device_type != "cpu" and not devices.get(device_type):
            raise LaunchError(
                f"device={device_type!r}, but torch sees none on {host}. Use device='cpu', or leave it out"
            )
    return device_type


def _check_mapping(nprocs: Mapping[str, int], hosts: Mapping[str, Any]) -> None:
    for host in hosts.keys() ^ nprocs.keys():
        problem = "does not say how many ranks it has" if host in hosts else "names it, which is none of the hosts"
        raise LaunchError(f"{host}: nprocs={dict(nprocs)} {problem}")


def _choose_backend(backend: str | None, device_type: str, *, here: bool) -> str:
    """Args: here: is it this machine's torch that has to have it?"""
    if backend is None:
        backend = dist.Backend.default_device_backend_map.get(device_type, "gloo")
    if not isinstance(backend, str):
        raise LaunchError(f"backend is a name such as 'gloo' or 'nccl', not {_short(backend)}")
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        if name not in dist.Backend.backend_list or name == "undefined":
            known = ", ".join(b for b in dist.Backend.backend_list if b != "undefined")
            raise LaunchError(f"backend={backend!r} is not known; torch knows {known}")
        if here and not dist.is_backend_available(name):
            usable = [b for b in dist.Backend.backend_list if b != "undefined" and dist.is_backend_available(b)]
            raise LaunchError(f"backend={backend!r}: this torch was built without {name}. It has {', '.join(usable)}")
        if name == "nccl" and device_type == "cpu":
            raise LaunchError("backend='nccl' works on GPUs only; on the CPU use 'gloo'")
    return backend.lower()


# ---------------------------------------------------------------------------- surroundings


def _choose_start_method(start_method: str | None) -> str:
    if start_method is None:
        return "forkserver" if forkserver.available() else "spawn"
    if start_method == "fork":
        raise LaunchError(
            "start_method='fork' would copy the notebook's process, its threads' locks and its CUDA context with "
            "it; 'forkserver' is as fast and starts clean"
        )
    if start_method not in ("forkserver", "spawn"):
        raise LaunchError(f"start_method is 'forkserver' or 'spawn', not {_short(start_method)}")
    return start_method


def threads_of(nprocs: int, environ: Mapping[str, str]) -> int:
    """Intra-op threads of one rank: the user's OMP_NUM_THREADS, else this process's cores divided."""
    asked = str(environ.get("OMP_NUM_THREADS", ""))
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // nprocs)


def environment(
    device_type: str,
    gpus: Sequence[int] | None,
    deterministic: bool,
    threads: int | None,
    env: Mapping[str, str] | None,
    interface: str | None = None,
) -> dict[str, str]:
    """This process's environment and what a run adds to it.

    Args:
        threads: of one rank; None: as little as can be.
        interface: for the ranks' connections; None: loopback.
    """
    environ = dict(os.environ)
    interface = interface or next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if threads is not None:
        environ.setdefault("OMP_NUM_THREADS", str(threads))
    if device_type == "cpu" and threads is not None:
        # Without it accelerate takes no notice of the group and trains N separate models.
        environ.setdefault("ACCELERATE_USE_CPU", "true")
    if deterministic:
        environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if gpus is not None:
        visible = [v for v in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible else str(i) for i in gpus)
    for key, value in (env or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise LaunchError(f"env is a dict of strings; {key!r}: {value!r} is not. Use str(...)")
        environ[key] = value
    return environ


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
