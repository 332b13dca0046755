"""Makes the environment variables of the ranks: torchrun's, and those that a run adds to this process's."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbddp.errors import LaunchError
from nbddp.text import short

# The variables of torchrun's environment contract that differ between ranks or runs.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
CONTRACT = (*_RANK_VARIABLES, "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankPosition:
    """The numbers by which a rank knows its position among all ranks."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int = 0
    group_world_size: int = 1

    def environ(self, run_id: str, *, restart_count: int, max_restarts: int) -> dict[str, str]:
        """Return torchrun's environment variables, except the address of the store."""
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


def threads_of(nprocs: int, environ: Mapping[str, str]) -> int:
    """Return the intra-op threads of one rank: the user's variables, as torch reads them, else its share of cores."""
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        value = str(environ.get(name, ""))
        if value.isdigit() and int(value) > 0:
            return int(value)
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
    """Return this process's environment with the variables that a run adds.

    Args:
        threads: the number of threads of one rank; None: set no variables for threads or accelerate.
        interface: the network interface for the ranks' connections; None: loopback.
    """
    environ = dict(os.environ)
    interface = interface or next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if threads is not None:
        environ.setdefault("OMP_NUM_THREADS", str(threads))
    if device_type == "cpu" and threads is not None:
        # Without this, accelerate ignores the process group and trains N separate models.
        environ.setdefault("ACCELERATE_USE_CPU", "true")
    if deterministic:
        environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if gpus is not None:
        # Each GPU once: with a repeated one, CUDA sees none.
        visible = [v for v in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible else str(i) for i in dict.fromkeys(gpus))
    for key, value in (env or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            # The text leaves out the value, which may be a secret: errors stay in the saved notebook.
            named = key if isinstance(key, str) else f"a key of type {type(key).__name__}"
            raise LaunchError(f"env is a dict of strings; {named} is set to {type(value).__name__}. Use str(...)")
        if not key or "=" in key or "\0" in key + value:
            name = short(key.partition("=")[0])
            raise LaunchError(
                f"env has {name}: a name must not be empty or contain '=', and neither name nor value a zero byte"
            )
        environ[key] = value
    return environ
