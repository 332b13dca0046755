"""Replaces the parts of a value that cannot be sent to the notebook by a description, so that the rest can be sent."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from nbddp.payload.known import Known
from nbddp.payload.packing import probe

_SHOWN_CHARS = 1000
_MAX_DEPTH = 60
_MAX_PROBES = 2000  # each pickles a part; the parts that remain then count as parts that cannot be pickled


@dataclass(frozen=True)
class Remains:
    """Replaces an object that cannot be sent to the notebook; its repr is the object's, and the reason."""

    text: str
    why: str

    def __repr__(self) -> str:
        return f"{self.text}  (stayed on its rank: {self.why})"


def of(value: Any, known: Known | None = None) -> Any:
    """The value itself if it can be pickled, otherwise its replacement."""
    error = _error_of(value, known)
    return value if error is None else _replacement(value, error)


def parts_of(value: Any, known: Known | None = None) -> Any:
    """Like ``of``, but a container or object with attributes is copied, and only its unpicklable parts are replaced."""
    return _Search(known).parts_of(value, _MAX_DEPTH)


def _error_of(value: Any, known: Known | None) -> Exception | None:
    try:
        probe(value, known=known, back=True)
    except Exception as error:  # whatever a user's __reduce__ raises
        return error
    return None


class _Search:
    def __init__(self, known: Known | None) -> None:
        self._known = known
        self._probes = 0

    def parts_of(self, value: Any, depth: int) -> Any:
        error = self._probe(value)
        if error is None:
            return value
        try:
            copied = self._copy_of(value, depth - 1) if depth else value
        except Exception:  # whatever a user's class does when it is copied
            return _replacement(value, error)
        pickles = copied is not value and _error_of(copied, self._known) is None
        return copied if pickles else _replacement(value, error)

    def _probe(self, value: Any) -> Exception | None:
        self._probes += 1
        if self._probes > _MAX_PROBES:
            return RuntimeError("too many parts that cannot be sent")
        return _error_of(value, self._known)

    def _copy_of(self, value: Any, depth: int) -> Any:
        """A copy with replacements for the parts that do not pickle; the value itself if it has no parts."""
        if isinstance(value, dict):
            copied = copy.copy(value)
            copied.clear()
            copied.update(self._items_of(list(value.items()), depth))
            return copied
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self._items_of(list(value), depth))
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(self._items_of(list(value), depth))
        if isinstance(value, type) or not hasattr(value, "__dict__"):
            return value
        copied = copy.copy(value)
        vars(copied).update({name: self.parts_of(part, depth) for name, part in vars(value).items()})
        return copied

    def _items_of(self, items: list[Any], depth: int) -> list[Any]:
        """The items with replacements; the list is halved until the few that do not pickle are found."""
        if self._probe(items) is None:
            return items
        if len(items) == 1:
            return [self.parts_of(items[0], depth)]
        half = len(items) // 2
        return self._items_of(items[:half], depth) + self._items_of(items[half:], depth)


def _replacement(value: Any, error: Exception) -> Remains:
    try:
        text = repr(value)[:_SHOWN_CHARS]
    except Exception:  # whatever a user's __repr__ raises
        text = f"<{type(value).__name__}>"
    return Remains(text, str(error).split("\n")[0] or type(error).__name__)
