"""Worker side. This rank's ``__main__``, which stands for the notebook's."""

from __future__ import annotations

import multiprocessing.reduction
import sys
import types
from typing import Any

import cloudpickle

from nbddp.known import Known
from nbddp.payload import Unpacked

known = Known()  # what came from the notebook


def install() -> types.ModuleType:
    """Give this process an empty ``__main__``, and let its own children receive what is defined there."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    # A child that a rank starts by spawn (a DataLoader worker, say) cannot import the notebook:
    # classes and functions of __main__ travel to it by value, too.
    multiprocessing.reduction.ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign]
    return main


def publish(main: types.ModuleType, unpacked: Unpacked) -> Known:
    """Name in ``__main__`` what the notebook has there now, so that pickle and torch.save find it; and keep in mind all
    that came.
    """
    global known
    for name, obj in unpacked.named.items():
        main.__dict__.setdefault(name, obj)
    known = Known(unpacked.by_value, main.__dict__)
    return known


def _by_value(_: Any, obj: Any) -> Any:
    if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
        return cloudpickle.loads, (cloudpickle.dumps(obj),)
    return NotImplemented
