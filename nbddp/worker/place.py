"""Worker side. Which rank a launcher has made of this process: torchrun's variables, or what srun says instead."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Mapping

import psutil
import torch

from nbddp.errors import LaunchError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORT = "29500"  # as torch's own launchers have it


def contract(environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's environment contract, as far as this process has to know it.

    Complete under torchrun; a PyTorchJob's pods lack what concerns one host; under srun it is made of Slurm's
    variables; without any launcher there is one rank.

    Raises:
        LaunchError: a part of it is missing that nobody but the user knows.
    """
    given = {name: environ[name] for name in (*_NEEDED, "LOCAL_RANK", "LOCAL_WORLD_SIZE") if environ.get(name)}
    if "RANK" not in given and "WORLD_SIZE" not in given:
        given = {**(_by_slurm(environ) if "SLURM_PROCID" in environ else _ALONE), **given}
    if given.get("WORLD_SIZE") == "1" and "MASTER_ADDR" not in given:
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    given = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **given}
    _check(given, slurm="SLURM_PROCID" in environ)
    return given


_ALONE = {"RANK": "0", "WORLD_SIZE": "1"}


def restarts(environ: Mapping[str, str]) -> int:
    """How often torchrun has started this rank again, or Slurm has requeued the job."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT") or environ.get("SLURM_RESTART_COUNT") or 0)


def _by_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ.get("SLURM_NTASKS", ""),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": _tasks_here(environ),
        "MASTER_PORT": _PORT,
    }


def _tasks_here(environ: Mapping[str, str]) -> str:
    """Of ``2(x3),1``: two tasks on each of three nodes, one on the fourth."""
    told = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1"
    counts: list[str] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", told):
        counts += [tasks] * int(nodes or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else "1"


def _check(given: Mapping[str, str], *, slurm: bool) -> None:
    missing = [name for name in _NEEDED if not given.get(name)]
    if missing and slurm:
        raise LaunchError(
            f"{' and '.join(missing)} missing. Slurm names no meeting point: before srun, "
            "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
        )
    if missing:
        raise LaunchError(
            f"{' and '.join(missing)} missing, though the other variables of a launcher are set. "
            "torchrun sets all of them; without any, this is one rank"
        )
    wrong = [name for name, value in given.items() if name != "MASTER_ADDR" and not value.isdigit()]
    if wrong:
        raise LaunchError(f"{wrong[0]} is a whole number, not {given[wrong[0]]!r}")
    if int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        raise LaunchError(f"RANK={given['RANK']}, but WORLD_SIZE={given['WORLD_SIZE']}: ranks count from 0")


def interface(contract: Mapping[str, str]) -> str:
    """By which gloo's ranks reach each other; "" where torch's own choice, by this host's name, is no worse.

    That name need not be known to any DNS server, and Debian gives it 127.0.1.1, where no other host is.
    """
    address = "127.0.0.1"
    if contract["LOCAL_WORLD_SIZE"] != contract["WORLD_SIZE"]:
        address = _address_towards(contract["MASTER_ADDR"], int(contract["MASTER_PORT"]))
        if not address or ipaddress.ip_address(address).is_loopback:
            return ""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return ""


def _address_towards(host: str, port: int) -> str:
    """This host's own, on the way there; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
    return ""


def device(local_rank: int) -> tuple[str, int]:
    """The device's type, and its index.

    Raises:
        LaunchError: there are fewer devices than ranks here.
    """
    found = torch.accelerator.current_accelerator()
    count = torch.get_device_module(found).device_count() if found is not None else 0
    if found is None or found.type == "mps" or not count:  # MPS has nothing to distribute over
        return "cpu", local_rank
    if count == 1:
        return found.type, 0  # srun --gpus-per-task=1 and the like: each rank sees its own alone
    if local_rank >= count:
        raise LaunchError(
            f"this machine has {count} {found.type} devices, and this is its rank {local_rank} (from 0): one process "
            "per device. Start fewer, or hide the devices to run on the CPU (CUDA_VISIBLE_DEVICES=)"
        )
    return found.type, local_rank


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
