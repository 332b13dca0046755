"""Installs this rank's ``__main__`` module, which stands for the notebook's."""

from __future__ import annotations

import multiprocessing.reduction
import sys
import types
from collections.abc import Sequence
from typing import Any

import cloudpickle

from nbddp.payload import Unpacked
from nbddp.payload.known import Known

known = Known()  # the objects that came from the notebook


def install() -> types.ModuleType:
    """Give this process an empty ``__main__``, whose functions and classes its spawned children can unpickle."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    # A child that a rank spawns (e.g. a DataLoader worker) cannot import the notebook, so it gets classes and
    # functions of __main__ by value, too.
    multiprocessing.reduction.ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign]
    return main


def publish(main: types.ModuleType, unpacked: Unpacked, numbers: Sequence[int] | None = None) -> Known:
    """Define the notebook's names in ``__main__``, for pickle and torch.save, and remember all unpacked objects.

    Args:
        numbers: on a rank that stays, the notebook's numbers of the unpacked functions and classes.
    """
    global known
    if numbers is None:
        for name, obj in unpacked.named.items():
            main.__dict__.setdefault(name, obj)
        known = Known(unpacked.by_value, main.__dict__)
        return known
    main.__dict__.update(unpacked.named)
    for number, obj in zip(numbers, unpacked.by_value):
        _received.extend([_never_received] * (number + 1 - len(_received)))  # of calls that ended before this
        _received[number] = obj
    earlier, known = known, Known(_received, unpacked.named)
    known.add_earlier(earlier)
    return known


def _never_received() -> None: ...


_received: list[Any] = []  # on a rank that stays, by the notebook's number


def of_the_notebook() -> types.ModuleType:
    """Return the module that stands for the notebook's ``__main__``."""
    return sys.modules["__main__"]


def _by_value(_: Any, obj: Any) -> Any:
    if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
        return cloudpickle.loads, (cloudpickle.dumps(obj),)
    return NotImplemented
