"""Refuses objects that would pickle, but would not work in the process that reads them."""

from __future__ import annotations

import io
import multiprocessing.connection
import multiprocessing.managers
import multiprocessing.queues
import multiprocessing.synchronize
from typing import Any

import torch

from nbddp.payload import classes, libraries
from nbddp.payload.shared_tensors import SharedHere

# multiprocessing passes these only to a process that it is starting.
NEEDS_INHERITANCE: tuple[type, ...] = (
    multiprocessing.connection.Connection,
    multiprocessing.queues.Queue,
    multiprocessing.queues.SimpleQueue,
    multiprocessing.synchronize.SemLock,
    multiprocessing.synchronize.Condition,
    multiprocessing.synchronize.Event,
    multiprocessing.managers.BaseProxy,
)


def refuse_unshippable(obj: object, *, back: bool = False) -> None:
    """Raise ``TypeError`` for an object that would pickle, but would not work in another process.

    Args:
        back: whether it is sent to a notebook, which may get objects that a rank created for itself.
    """
    if isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
        name = getattr(obj, "name", "")
        raise TypeError(f"an open file ({name!r}) stays where it was opened; open it inside the function")
    if isinstance(obj, NEEDS_INHERITANCE):
        kind = type(obj).__name__
        # SemLocks know their context; queues and events have them as attributes (multiprocessing since 2023).
        parts = (obj, *getattr(obj, "__dict__", {}).values())
        if any(getattr(part, "_is_fork_ctx", False) for part in parts):
            raise TypeError(
                f"a {kind} of multiprocessing's fork context works only in forks of this process; "
                f'make it with multiprocessing.get_context("spawn").{kind}()'
            )
    if (refusal := libraries.refusal_of(type(obj))) is not None and not (back and refusal.of_one_process):
        raise TypeError(refusal.text(type(obj).__name__))
    if isinstance(obj, torch.nn.Module) and classes.is_parametrized(type(obj)):
        classes.refuse_parametrized(obj)


def refuse_uninherited(obj: object) -> None:
    """Raise ``TypeError`` for an object that a process can get only from the process that starts it."""
    if isinstance(obj, NEEDS_INHERITANCE):
        kind = type(obj).__name__
        raise TypeError(f"a {kind} reaches only processes that the notebook itself starts; make it inside the function")
    if isinstance(obj, (torch.Tensor, torch.UntypedStorage)) and _is_in_shared_memory(obj):
        raise TypeError(
            "a tensor in shared memory (share_memory_()) reaches only processes that the notebook itself starts; "
            "pass its .clone()"
        )


def _is_in_shared_memory(obj: Any) -> bool:
    if obj.device.type != "cpu" or (isinstance(obj, torch.Tensor) and obj.layout is not torch.strided):
        return False
    try:
        return (obj.untyped_storage() if isinstance(obj, torch.Tensor) else obj) in SharedHere()
    except (RuntimeError, NotImplementedError, ValueError):  # lazy, or a wrapper subclass without storage of its own
        return False
