"""Chooses the type of device, the number of ranks and the backend of a run, on this machine or on several hosts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from nbddp.errors import LaunchError
from nbddp.text import short
from nbddp.worker.context import current_accelerator

CPU_NPROCS = 2  # ranks on a machine without GPUs, unless the user chooses another number
_ALWAYS_ALLOWED_RANKS = 64  # can always be started
_MAX_RANKS_PER_CORE = 16
_NCCL_SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"  # "1": a new NCCL lets ranks share a GPU


def choose_device(device: str | torch.device | None, gpus: Sequence[int] | None) -> tuple[str, int]:
    """Return the device type, and the number of devices of that type (0 for the CPU)."""
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
    """Return the device type that ``device=`` names."""
    try:
        requested = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LaunchError(f"device={device!r} is not a torch device: {str(error).splitlines()[0]}") from None
    if requested.index is not None:
        advice = f"use device={requested.type!r}, gpus=[{requested.index}]"
        raise LaunchError(f"device={str(device)!r} names one device; {advice}")
    if requested.type == "cpu" and gpus is not None:
        raise LaunchError(f"gpus={list(gpus)} and device='cpu' exclude each other; leave one out")
    return requested.type


def accelerator() -> tuple[str, int] | None:
    """Return the type and number of this machine's accelerators; makes no context on them."""
    # torch counts with NVML where it can. torch.accelerator would initialise the driver in the notebook kernel, whose
    # forks, such as accelerate's notebook_launcher, could then no longer use CUDA.
    if count := torch.cuda.device_count():
        return "cuda", count
    current = current_accelerator()
    # MPS has one device and no collectives.
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


def choose_nprocs(nprocs: int | None, device_type: str, count: int, gpus: Sequence[int] | None) -> int:
    """Return the number of ranks on a machine with ``count`` devices of that type."""
    if gpus is not None:
        _check_gpus(gpus, device_type, count)
        if nprocs not in (None, len(gpus)):
            raise LaunchError(f"nprocs={nprocs}, but gpus={list(gpus)} are {len(gpus)}: one process for each")
        return len(gpus)
    if device_type == "cpu":
        return nprocs or CPU_NPROCS
    if nprocs is not None and nprocs > count:
        raise LaunchError(
            f"nprocs={nprocs}, but this machine has {count} {device_type} device{'s' * (count != 1)}: "
            f"one process per device. Use nprocs={count}, or device='cpu'"
        )
    return nprocs or count


def check_cores(nprocs: int) -> None:
    """Refuse too many ranks on the CPU, where each rank is a process that needs a core.

    Raises:
        LaunchError: so many ranks would take minutes to start.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(_ALWAYS_ALLOWED_RANKS, _MAX_RANKS_PER_CORE * cores)
    if nprocs > most:
        raise LaunchError(
            f"nprocs={nprocs} on {cores} cores would take minutes and much memory; at most {most} start here. "
            f"Use nprocs={cores}, or oversubscribe=True if you mean it"
        )


def _check_gpus(gpus: Sequence[int], device_type: str, count: int) -> None:
    if device_type != "cuda":
        raise LaunchError(f"gpus= picks CUDA devices; for {device_type} use its own environment variable")
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in gpus):
        raise LaunchError(f"gpus is a list of device numbers, e.g. gpus=[0, 1], not {short(gpus)}")
    missing = [i for i in gpus if not 0 <= i < count]
    if missing:
        raise LaunchError(f"gpus={list(gpus)}: there is no GPU {missing[0]} here, only {list(range(count))}")


def check_shared_gpus(gpus: Sequence[int], backend: str | None, environ: Mapping[str, str]) -> str:
    """Return a notice about ranks that share a GPU; "" if each rank has its own.

    Args:
        backend: of the process group; None: the function opens its own.
        environ: the ranks' environment variables.

    Raises:
        LaunchError: the backend needs a GPU for each rank.
    """
    shared = {gpu: count for gpu, count in Counter(gpus).items() if count > 1}
    if shared and backend != "gloo" and environ.get(_NCCL_SHARES) != "1":
        raise LaunchError(
            f"gpus={list(gpus)} names GPU {next(iter(shared))} twice, and NCCL needs a GPU for each rank. "
            "To try something out with several ranks on one GPU, use backend='gloo', which is slower"
        )
    if not shared:
        return ""
    where = " and ".join(f"{count} on GPU {gpu}" for gpu, count in shared.items())
    return f"{len(gpus)} processes{f' with {backend}' if backend else ''}: {where}"


def device_index(local_rank: int, gpus: Sequence[int] | None) -> int:
    """Return the index of a local rank's device among those that the ranks see; ``gpus`` may name one twice."""
    return local_rank if gpus is None else list(dict.fromkeys(gpus)).index(gpus[local_rank])


def choose_shares(
    hosts: Mapping[str, Mapping[str, int]],
    nprocs: int | Mapping[str, int] | None,
    device: str | torch.device | None,
    gpus: Sequence[int] | None,
) -> tuple[str, dict[str, int]]:
    """Return the device type, and the number of ranks on each host.

    Args:
        hosts: the number of devices by type for each host.

    Raises:
        LaunchError: names the host.
    """
    device_type = _type_on_all(hosts, device, gpus)
    if isinstance(nprocs, Mapping):
        for host in hosts.keys() - nprocs.keys():
            raise LaunchError(f"nprocs={dict(nprocs)} does not name {host}: give its number of ranks")
        for host in nprocs.keys() - hosts.keys():
            raise LaunchError(f"nprocs={dict(nprocs)} names {host!r}, which is not in hosts=")
    shares = {}
    for host, devices in hosts.items():
        requested = nprocs[host] if isinstance(nprocs, Mapping) else nprocs
        try:
            shares[host] = choose_nprocs(requested, device_type, devices.get(device_type, 0), gpus)
        except LaunchError as error:
            raise LaunchError(f"{host}: {error}") from None
    if nprocs is None and len(set(shares.values())) > 1:
        counts = ", ".join(f"{host} has {count}" for host, count in shares.items())
        example = "{" + ", ".join(f"{host!r}: {count}" for host, count in shares.items()) + "}"
        raise LaunchError(f"the hosts have different numbers of {device_type} devices: {counts}. Use nprocs={example}")
    return device_type, shares


def _type_on_all(
    hosts: Mapping[str, Mapping[str, int]], device: str | torch.device | None, gpus: Sequence[int] | None
) -> str:
    if device is None:
        found = {next(iter(devices), "cpu") for devices in hosts.values()}
        if len(found) > 1:
            types = ", ".join(f"{host} has {next(iter(devices), 'none')}" for host, devices in hosts.items())
            raise LaunchError(f"the hosts have different kinds of devices: {types}. Use device='cpu', or leave one out")
        return found.pop()
    device_type = _type_of(device, gpus)
    for host, devices in hosts.items():
        if device_type != "cpu" and not devices.get(device_type):
            raise LaunchError(
                f"device={device_type!r}, but torch sees none on {host}. Use device='cpu', or leave it out"
            )
    return device_type


def choose_backend(backend: str | None, device_type: str, *, local: bool) -> str:
    """Return the backend of the process group.

    Args:
        local: the ranks run on this machine, so its torch must have the backend.
    """
    if backend is None:
        backend = dist.Backend.default_device_backend_map.get(device_type, "gloo")
    if not isinstance(backend, str):
        raise LaunchError(f"backend is a name such as 'gloo' or 'nccl', not {short(backend)}")
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        if name not in dist.Backend.backend_list or name == "undefined":
            known = ", ".join(b for b in dist.Backend.backend_list if b != "undefined")
            raise LaunchError(f"backend={backend!r} is not known; torch knows {known}")
        if local and not dist.is_backend_available(name):
            usable = [b for b in dist.Backend.backend_list if b != "undefined" and dist.is_backend_available(b)]
            raise LaunchError(f"backend={backend!r}: this torch was built without {name}. It has {', '.join(usable)}")
        if name == "nccl" and device_type == "cpu":
            raise LaunchError("backend='nccl' works on GPUs only; on the CPU use 'gloo'")
    return backend.lower()
