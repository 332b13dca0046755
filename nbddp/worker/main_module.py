"""This rank's ``__main__``, which stands for the notebook's."""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
from IPython.core.autocall import ExitAutocall

from nbddp import payload
from nbddp.messages import OF_A_RANK

# Classes and functions of the notebook: by their number in what it has sent, or by the name that was asked for.
received: dict[int | str, Any] = {}


def install(main: types.ModuleType) -> None:
    """Make this module ``__main__``; its functions and classes go by value to children that are spawned."""
    sys.modules["__main__"] = main
    ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign]  # they can't import the notebook


@contextlib.contextmanager
def completed_by(ask: Callable[[str], payload.Block | None]) -> Iterator[None]:
    """Let pickles and strings name classes and functions that the notebook hasn't sent, because no code names them."""

    def missing(name: str) -> Any:
        if name.startswith("__") or (block := ask(name)) is None:
            raise AttributeError(f"module '__main__' has no attribute {name!r}", name=name)
        before = dict(names)
        with block:
            unpacked = payload.unpack(block)  # cloudpickle sets the globals that it uses
        new = {each: obj for each, obj in unpacked.named.items() if each not in before}
        names.update({**new, **before})
        received.update(new)
        return unpacked.value

    names = vars(sys.modules["__main__"])
    names["__getattr__"] = missing
    try:
        yield
    finally:
        names.pop("__getattr__", None)


@contextlib.contextmanager
def exiting_at_once() -> Iterator[None]:
    """Let ``exit()`` end a function as in Python; IPython's would first let the cell come to its end."""
    names = vars(sys.modules["__main__"])
    of_ipython = {name: value for name, value in list(names.items()) if isinstance(value, ExitAutocall)}
    names.update(dict.fromkeys(of_ipython, sys.exit))
    try:
        yield
    finally:
        names.update({name: value for name, value in of_ipython.items() if names.get(name) is sys.exit})


def unpack(block: payload.Block, before: int) -> Any:
    """Unpack what the notebook sends, and define its functions and classes in ``__main__``, for pickle.

    Args:
        before: how many of them it has sent, though perhaps not all have arrived.
    """
    names = vars(sys.modules["__main__"])
    own = {name: names[name] for name in OF_A_RANK if name in names}
    with block:
        unpacked = payload.unpack(block)  # cloudpickle sets the globals that functions use
    names.update({**unpacked.named, **own})
    received.update(enumerate(unpacked.by_value, before))
    return unpacked.value


def sizes() -> dict[str, int]:
    """Return how long the global lists, dicts, and sets are."""
    found = list(vars(sys.modules["__main__"]).items())
    return {name: len(value) for name, value in found if type(value) in (list, dict, set)}


def grown_since(before: dict[str, int]) -> str:
    """Return the name of one that has grown since; "" if none has."""
    after = sizes()
    return next((name for name, size in before.items() if after.get(name, 0) > size), "")


def _by_value(_: Any, obj: Any) -> Any:
    if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
        loads: Callable[[bytes], Any] = cloudpickle.loads
        return loads, (cloudpickle.dumps(obj),)
    return NotImplemented
