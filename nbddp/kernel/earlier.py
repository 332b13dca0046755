"""The earlier run of the same function, script, or cell, which the panel shows in gray."""

from collections.abc import Callable
from typing import Any

from nbddp.history.history import History
from nbddp.panel import frontend

_KEPT = 8  # functions, scripts, and cells

_newest: dict[str, History] = {}  # by subject; what ended last comes last


def function(fn: Callable[..., Any]) -> str:
    """The subject of its runs; "" if its name doesn't tell which it is."""
    fn = getattr(fn, "func", fn)  # functools.partial
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return "" if "<lambda>" in name else f"{getattr(fn, '__module__', '')}.{name}"


def cell() -> str:
    """The subject of the running cell; "" if the page doesn't tell."""
    found = frontend.cell_id()
    return found and f"cell {found}"


def before(subject: str) -> History | None:
    """The metrics of its run that ended last."""
    return _newest.get(subject)


def keep(subject: str, history: History) -> None:
    """A run is over."""
    if subject and history.latest():
        _newest.pop(subject, None)
        _newest[subject] = history
        if len(_newest) > _KEPT:
            del _newest[next(iter(_newest))]
