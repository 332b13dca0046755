"""This rank's ``__main__``, which stands for the notebook's."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle

from nbddp import payload

received: list[Any] = []  # classes and functions of the notebook, in its order


def install(main: types.ModuleType) -> None:
    """Make this module ``__main__``; its functions and classes go by value to children that are spawned."""
    sys.modules["__main__"] = main
    ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign]  # they can't import the notebook


def unpack(block: payload.Block, before: int) -> Any:
    """Unpack what the notebook sends, and define its functions and classes in ``__main__``, for pickle.

    Args:
        before: how many of them it has sent, though perhaps not all have arrived.
    """
    with block:
        unpacked = payload.unpack(block)
    vars(sys.modules["__main__"]).update(unpacked.named)
    received[before:] = [None] * (before - len(received)) + unpacked.by_value
    return unpacked.value


def _by_value(_: Any, obj: Any) -> Any:
    if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
        loads: Callable[[bytes], Any] = cloudpickle.loads
        return loads, (cloudpickle.dumps(obj),)
    return NotImplemented
