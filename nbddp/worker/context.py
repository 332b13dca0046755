"""This process's rank, world size and device; the notebook itself is rank 0 of 1."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Context:
    """One rank's identity in its run.

    Attributes:
        device_index: the local rank, unless ranks share a device.
        lost_snapshots: before a restart, rank 0 saved these on a host that is lost: its name and last step, by path.
    """

    rank: int
    local_rank: int
    world_size: int
    device_type: str
    device_index: int
    seed: int | None
    restart_count: int
    lost_snapshots: Mapping[str, tuple[str, int]] = field(default_factory=dict)


_current: Context | None = None


def enter(context: Context) -> None:
    """Make this process a rank; called once, before the user's code."""
    global _current
    _current = context


def rank() -> int:
    """Return this process's rank, 0 to ``world_size() - 1``; 0 in the notebook."""
    return _current.rank if _current else _from_group("get_rank", 0)


def local_rank() -> int:
    """Return the rank on this machine; 0 in the notebook. It is the index of its device, unless ranks share one."""
    return _current.local_rank if _current else 0


def world_size() -> int:
    """Return the number of ranks of the run; 1 in the notebook."""
    return _current.world_size if _current else _from_group("get_world_size", 1)


def is_primary() -> bool:
    """Return whether this is rank 0, which prints and saves."""
    return rank() == 0


def device() -> torch.device:
    """Return this rank's device: ``cuda:<local_rank>``, ``cpu`` or another accelerator's.

    With ``gpus=[0, 0]`` the device of both ranks is ``cuda:0``. In the notebook it is the current accelerator if there
    is one, else the CPU.
    """
    import torch

    if _current is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator if accelerator is not None else torch.device("cpu")
    if _current.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(_current.device_type, _current.device_index)


def current_accelerator() -> torch.device | None:
    """Return torch's own answer, which is an error in torch 2.6 where there is no accelerator."""
    import torch

    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:
        return None


def restart_count() -> int:
    """Return how often this run has been restarted after a failure (``max_restarts``)."""
    return _current.restart_count if _current else 0


def lost_snapshots() -> Mapping[str, tuple[str, int]]:
    """Return the snapshots that rank 0 saved on a host that was lost since: the host and the last step, by path."""
    return _current.lost_snapshots if _current else {}


def seed() -> int:
    """Return the run's seed, the same on every rank; 0 if it has none."""
    return (_current.seed or 0) if _current else 0


def print(*args: Any, **kwargs: Any) -> None:
    """``builtins.print``, on rank 0 only."""
    if is_primary():
        builtins.print(*args, **kwargs)


def _from_group(function: str, default: int) -> int:
    # A process that nbddp did not start may have opened a group itself (torchrun, the notebook as rank 0).
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return default
    return int(getattr(dist, function)())
