"""Kernel side. What a run is to be: every argument checked, every default decided, before any process exists."""

from __future__ import annotations

import inspect
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    notice: str = ""
    receive: Callable[[list[Any]], list[Any]] = list

    def rank_environ(self, rank: int, rendezvous: Rendezvous, restart_count: int) -> dict[str, str]:
        """The whole environment of one rank."""
        if not self.contract:
            return self.environ
        return {
            **self.environ,
            **rendezvous.environ(),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.nprocs),
            "LOCAL_WORLD_SIZE": str(self.nprocs),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.nprocs),
            "TORCHELASTIC_RESTART_COUNT": str(restart_count),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RUN_ID": f"nbddp-{os.getpid()}-{rendezvous.port}",
        }


def make_plan(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    nprocs: int | None = None,
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
) -> Plan:
    """Check and decide. The arguments are those of :func:`nbddp.run`.

    Raises:
        LaunchError: an argument that cannot work, with what to do instead.
    """
    name = name or _name_of(fn)
    _check_function(fn, (0, *args) if pass_rank else args, kwargs, name)
    _check_numbers(nprocs=nprocs, max_restarts=max_restarts, seed=seed)
    _check_numbers(timeout=timeout, pg_timeout=pg_timeout, stall_after=stall_after)
    _check_containers(gpus, env, contract)
    device_type, count = _choose_device(device, gpus)
    ranks = _choose_nprocs(nprocs, device_type, count, gpus)
    notice = ""
    if device is None and gpus is None and device_type == "cpu" and nprocs is None:
        notice = f"no GPU: {ranks} processes on CPU" + (" with gloo" if init and backend in (None, "gloo") else "")
    threads = _threads(ranks, {**os.environ, **(env or {})})
    return Plan(
        name=name,
        nprocs=ranks,
        device=device_type,
        backend=_choose_backend(backend, device_type) if init else None,
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
        environ=_environ(device_type, gpus, deterministic, threads if contract else None, env),
        sys_path=[path or os.getcwd() for path in sys.path],
        cwd=os.getcwd(),
        notice=notice,
    )


# ---------------------------------------------------------------------------- the function


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
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LaunchError(f"device={device!r} is no torch device: {str(error).splitlines()[0]}") from None
    if wanted.index is not None:
        raise LaunchError(f"device={str(device)!r} names one device; say device={wanted.type!r}, gpus=[{wanted.index}]")
    if wanted.type == "cpu":
        if gpus is not None:
            raise LaunchError(f"gpus={list(gpus)} and device='cpu' exclude each other; leave one out")
        return "cpu", 0
    count = _device_count(wanted.type)
    if count == 0:
        raise LaunchError(f"device={wanted.type!r}, but torch sees none here. Use device='cpu', or leave it out")
    return wanted.type, count


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


def _choose_backend(backend: str | None, device_type: str) -> str:
    if backend is None:
        backend = dist.Backend.default_device_backend_map.get(device_type, "gloo")
    if not isinstance(backend, str):
        raise LaunchError(f"backend is a name such as 'gloo' or 'nccl', not {_short(backend)}")
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        if name not in dist.Backend.backend_list or name == "undefined":
            known = ", ".join(b for b in dist.Backend.backend_list if b != "undefined")
            raise LaunchError(f"backend={backend!r} is not known; torch knows {known}")
        if not dist.is_backend_available(name):
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


def _threads(nprocs: int, environ: Mapping[str, str]) -> int:
    """Intra-op threads of one rank: the user's OMP_NUM_THREADS, else this process's cores divided."""
    asked = str(environ.get("OMP_NUM_THREADS", ""))
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // nprocs)


def _environ(
    device_type: str,
    gpus: Sequence[int] | None,
    deterministic: bool,
    threads: int | None,
    env: Mapping[str, str] | None,
) -> dict[str, str]:
    """The kernel's environment and what a run adds to it; ``threads`` None: as little as can be."""
    environ = dict(os.environ)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
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
