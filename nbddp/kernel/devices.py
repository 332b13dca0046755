"""Kernel side. What a run is to use, here or on each host: which type of device, how many ranks, which backend."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbddp.errors import LaunchError, short

CPU_NPROCS = 2  # ranks on a machine without GPUs, when the user does not say
_FEW_RANKS = 64  # can always be started
_MOST_PER_CORE = 16


def choose_device(device: str | torch.device | None, gpus: Sequence[int] | None) -> tuple[str, int]:
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


def choose_nprocs(nprocs: int | None, device_type: str, count: int, gpus: Sequence[int] | None) -> int:
    """How many ranks a machine has that has so many devices of that type."""
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


def check_cores(nprocs: int) -> None:
    """Refuse what nobody means: each rank on the CPU is a process that wants a core.

    Raises:
        LaunchError: so many would take minutes to start.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(_FEW_RANKS, _MOST_PER_CORE * cores)
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
            shares[host] = choose_nprocs(asked, device_type, devices.get(device_type, 0), gpus)
        except LaunchError as error:
            raise LaunchError(f"{host}: {error}") from None
    if nprocs is None and len(set(shares.values())) > 1:
        counts = ", ".join(f"{host} has {count}" for host, count in shares.items())
        example = "{" + ", ".join(f"{host!r}: {count}" for host, count in shares.items()) + "}"
        raise LaunchError(f"the hosts have different numbers of {device_type} devices: {counts}. Say nprocs={example}")
    return device_type, shares


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


def choose_backend(backend: str | None, device_type: str, *, here: bool) -> str:
    """The process group's.

    Args:
        here: is it this machine's torch that has to have it?
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
        if here and not dist.is_backend_available(name):
            usable = [b for b in dist.Backend.backend_list if b != "undefined" and dist.is_backend_available(b)]
            raise LaunchError(f"backend={backend!r}: this torch was built without {name}. It has {', '.join(usable)}")
        if name == "nccl" and device_type == "cpu":
            raise LaunchError("backend='nccl' works on GPUs only; on the CPU use 'gloo'")
    return backend.lower()
