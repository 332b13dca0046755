"""Lets ranks compare values through the process group's store, without waiting for each other.

The first rank at a point of the program stores its value, and later ranks compare theirs with it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import distributed_c10d

from nbddp.worker import context


def collectives_begun() -> int | None:
    """The number of collectives that this rank has begun in the default group; None without other ranks.

    Ranks that run the same code with the same number are at the same point of the program.
    """
    if context.world_size() == 1 or not dist.is_initialized():
        return None
    count = getattr(dist.group.WORLD, "_get_sequence_number_for_group", None)  # torch 2.6 to 2.15
    try:
        return int(count()) if count is not None else None
    except RuntimeError:  # a backend that does not count
        return None


_waiting: list[Callable[[], None]] = []  # comparisons that were due before there was a group


def when_grouped(compare: Callable[[], None]) -> None:
    """Compare as soon as the user's code opens a group, through which the ranks can."""
    if context.world_size() > 1 and not dist.is_initialized():
        _waiting.append(compare)


def group_is_open() -> None:
    """Make the comparisons that have waited for a group. Raises what they raise."""
    while _waiting:
        _waiting.pop(0)()


def set_default(key: str, value: str) -> str:
    """Store the value unless another rank has stored one under this key; returns the stored value."""
    find = getattr(distributed_c10d, "_get_default_store", None)  # torch 2.6 to 2.15
    try:
        return str(find().compare_set(f"nbddp {key}", "", value), "utf-8") if find is not None else value
    except (RuntimeError, ValueError):  # no store (MPI), or the run has closed it
        return value
