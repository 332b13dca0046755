"""Worker side. What ranks leave for each other in the process group's store: no rank waits for another.

The first rank to come to a point of the program says what it has there, and the later ones compare.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

from nbddp.worker import context


def collectives() -> int | None:
    """How many collectives this rank has begun in the default group; None where there is nobody to compare with.

    Ranks with the same number that do the same are at the same point of their program.
    """
    if context.world_size() == 1 or not dist.is_initialized():
        return None
    count = getattr(dist.group.WORLD, "_get_sequence_number_for_group", None)  # torch 2.6 to 2.13
    try:
        return int(count()) if count is not None else None
    except RuntimeError:  # a backend that does not count
        return None


def first_to_say(key: str, value: str) -> str:
    """What the first rank with this key has left in the group's store; ``value`` if that is this one."""
    find = getattr(distributed_c10d, "_get_default_store", None)  # torch 2.6 to 2.13
    try:
        return str(find().compare_set(f"nbddp {key}", "", value), "utf-8") if find is not None else value
    except (RuntimeError, ValueError):  # no store (MPI), or it has gone with the run
        return value
