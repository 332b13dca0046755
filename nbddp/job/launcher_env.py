"""Reads this process's rank from its launcher's environment variables: torchrun's, or Slurm's."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Mapping

import psutil
import torch

from nbddp.errors import LaunchError
from nbddp.worker.context import current_accelerator

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORT = "29500"  # the default of torch's own launchers


def contract(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torchrun's environment contract that this process needs.

    torchrun sets all; a PyTorchJob does not set LOCAL_*; under srun all but MASTER_ADDR come from Slurm's;
    without a launcher there is one rank.

    Raises:
        LaunchError: a variable is wrong, or missing and only the user knows it.
    """
    variables = {name: environ[name] for name in (*_NEEDED, "LOCAL_RANK", "LOCAL_WORLD_SIZE") if environ.get(name)}
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        defaults = _from_slurm(environ) if "SLURM_PROCID" in environ else {"RANK": "0", "WORLD_SIZE": "1"}
        variables = {**defaults, **variables}
    if variables.get("WORLD_SIZE") == "1" and "MASTER_ADDR" not in variables:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))  # a free port
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    variables = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **variables}
    _check(variables, slurm="SLURM_PROCID" in environ)
    return variables


def restarts(environ: Mapping[str, str]) -> int:
    """Return how often torchrun has restarted this rank, or Slurm has requeued the job."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT") or environ.get("SLURM_RESTART_COUNT") or 0)


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    # "2(x3),1" are two tasks on each of three nodes, and one task on the fourth.
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1"
    counts: list[str] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [tasks] * int(nodes or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ.get("SLURM_NTASKS", ""),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": counts[node] if node < len(counts) else "1",
        "MASTER_PORT": _PORT,
    }


def _check(variables: Mapping[str, str], *, slurm: bool) -> None:
    missing = [name for name in _NEEDED if not variables.get(name)]
    if missing and slurm:
        raise LaunchError(
            f"{' and '.join(missing)} missing: Slurm does not set a rendezvous address. Before srun, "
            "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
        )
    if missing:
        raise LaunchError(
            f"{' and '.join(missing)} missing, though other variables of a launcher are set. "
            "torchrun sets all of them; to run a single rank, unset all of them"
        )
    wrong = [name for name, value in variables.items() if name != "MASTER_ADDR" and not value.isdigit()]
    if wrong:
        raise LaunchError(f"{wrong[0]} must be a whole number, not {variables[wrong[0]]!r}")
    if int(variables["RANK"]) >= int(variables["WORLD_SIZE"]):
        raise LaunchError(f"RANK={variables['RANK']}, but WORLD_SIZE={variables['WORLD_SIZE']}: ranks count from 0")


def interface(contract: Mapping[str, str]) -> str:
    """Return the network interface for gloo; "" leaves the choice to torch, which looks up this host's name.

    A DNS server may not know that name, and Debian resolves it to 127.0.1.1, which other hosts cannot reach.
    """
    address = "127.0.0.1"
    if contract["LOCAL_WORLD_SIZE"] != contract["WORLD_SIZE"]:
        address = ""
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((contract["MASTER_ADDR"], int(contract["MASTER_PORT"])))  # finds the route, sends nothing
            address = str(probe.getsockname()[0])
        if not address or ipaddress.ip_address(address).is_loopback:
            return ""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return ""


def device(local_rank: int) -> tuple[str, int]:
    """Return the type and the index of a local rank's device.

    Raises:
        LaunchError: this machine has fewer devices than ranks.
    """
    found = current_accelerator()
    count = torch.get_device_module(found).device_count() if found is not None else 0
    if found is None or found.type == "mps" or not count:  # MPS is always a single device
        return "cpu", local_rank
    if count == 1:
        return found.type, 0  # e.g. with srun --gpus-per-task=1, each rank sees only its own device
    if local_rank >= count:
        raise LaunchError(
            f"this machine has {count} {found.type} devices, but this is its local rank {local_rank} (from 0): each "
            "process needs a device. Start fewer, or hide the devices to run on the CPU (CUDA_VISIBLE_DEVICES=)"
        )
    return found.type, local_rank
