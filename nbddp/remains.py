"""Both sides. What is left of a value that cannot leave its rank: the parts that travel, and words for the others."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from nbddp import payload
from nbddp.known import Known

_SHOWN_CHARS = 1000
_MAX_DEPTH = 60
_MAX_LOOKS = 2000  # each pickles a part; what is not looked at by then counts as what cannot travel


@dataclass(frozen=True)
class Remains:
    """Stands for what cannot leave its rank; shown as that was."""

    text: str
    why: str

    def __repr__(self) -> str:
        return f"{self.text}  (stayed on its rank: {self.why})"


def of(value: Any, known: Known | None = None) -> Any:
    """The value itself if it travels, else what stands for it."""
    error = _error_of(value, known)
    return value if error is None else _words_for(value, error)


def parts_of(value: Any, known: Known | None = None) -> Any:
    """The same, but of containers and objects with attributes a copy, in which only the parts are replaced."""
    return _Search(known).parts_of(value, _MAX_DEPTH)


def _error_of(value: Any, known: Known | None) -> Exception | None:
    try:
        payload.probe(value, known=known, back=True)
    except Exception as error:  # whatever a user's __reduce__ raises
        return error
    return None


class _Search:
    def __init__(self, known: Known | None) -> None:
        self._known = known
        self._looks = 0

    def parts_of(self, value: Any, depth: int) -> Any:
        error = self._look(value)
        if error is None:
            return value
        try:
            copied = self._copy_of(value, depth - 1) if depth else value
        except Exception:  # whatever a user's class does when it is copied
            return _words_for(value, error)
        travels = copied is not value and _error_of(copied, self._known) is None
        return copied if travels else _words_for(value, error)

    def _look(self, value: Any) -> Exception | None:
        self._looks += 1
        return _error_of(value, self._known) if self._looks <= _MAX_LOOKS else RuntimeError("one of very many")

    def _copy_of(self, value: Any, depth: int) -> Any:
        """With the parts that travel, and words for the others; the value itself where it has no parts."""
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
        """Halved until the few that do not travel are found."""
        if self._look(items) is None:
            return items
        if len(items) == 1:
            return [self.parts_of(items[0], depth)]
        half = len(items) // 2
        return self._items_of(items[:half], depth) + self._items_of(items[half:], depth)


def _words_for(value: Any, error: Exception) -> Remains:
    try:
        text = repr(value)[:_SHOWN_CHARS]
    except Exception:  # whatever a user's __repr__ raises
        text = f"<{type(value).__name__}>"
    return Remains(text, str(error).split("\n")[0] or type(error).__name__)
