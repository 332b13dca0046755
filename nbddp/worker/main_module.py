"""Installs this rank's ``__main__`` module, which stands for the notebook's."""

from __future__ import annotations

import multiprocessing.reduction
import sys
import types
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


def publish(main: types.ModuleType, unpacked: Unpacked) -> Known:
    """Define the notebook's names in ``__main__``, for pickle and torch.save, and remember all unpacked objects."""
    global known
    for name, obj in unpacked.named.items():
        main.__dict__.setdefault(name, obj)
    known = Known(unpacked.by_value, main.__dict__)
    return known


def _by_value(_: Any, obj: Any) -> Any:
    if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
        return cloudpickle.loads, (cloudpickle.dumps(obj),)
    return NotImplemented
