"""Makes metrics of the run from what libraries log: its numbers, each of them once."""

from __future__ import annotations

import functools
import numbers
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

Log = Callable[[dict[str, Any], "int | None"], None]
_USERS_OWN = ("nbddp", "")


class Logged(NamedTuple):
    """What one call logs.

    Attributes:
        metrics: may hold mappings, and values that are not numbers, which are left out.
        step: an x value; None: the run counts.
        place: where the library writes it to: a folder, the id of a run. "" for a library that has one place.
        label: the place's name for people.
        passed_on: what the library gives to the user's callbacks, which log it elsewhere or log metrics of their own.
    """

    metrics: Mapping[str, Any]
    step: Any = None
    place: str = ""
    label: str = ""
    passed_on: Mapping[str, Any] | None = None


class Curves:
    """Receives what libraries log and logs it in the run.

    If a trainer sends its metrics on, to TensorBoard and W&B, only the trainer's call is logged. Its callbacks may log
    more: a call that has none of the trainer's values is logged, too. If several libraries log one name, the first
    one's counts. A library's second place (another writer, another run) has its name in front: ``val/loss``.

    Args:
        log: logs these metrics at that step.
        is_logged: returns whether a name has been logged in the run.

    Attributes:
        owners: the library and the place that log each name.
    """

    def __init__(self, log: Log, is_logged: Callable[[str], bool]) -> None:
        self.owners: dict[str, tuple[str, str]] = {}
        self._log = log
        self._is_logged = is_logged
        self._given_up: set[str] = set()
        self._calls = threading.local()

    def listen_to(self, owner: Any, method: str, library: str, read: Callable[..., Logged]) -> None:
        """Log what this method of a class, or function of a module, logs; ``read`` has its parameters."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def heard(*args: Any, **kwargs: Any) -> Any:
            outer: Logged | None = getattr(self._calls, "outer", None)
            logged = self._hear(library, lambda: read(*args, **kwargs), outer)
            if outer is not None or logged is None:
                return original(*args, **kwargs)
            self._calls.outer = logged
            try:
                return original(*args, **kwargs)
            finally:
                self._calls.outer = None

        setattr(owner, method, heard)

    def give_up(self, library: str, error: Exception) -> None:
        """Say that this library draws no curves, once."""
        if library not in self._given_up:
            self._given_up.add(library)
            reason = f"{type(error).__name__}: {error}"
            print(f"nbddp: draws no curves of what {library} logs ({reason})", file=sys.stderr)

    def begin_again(self) -> None:
        """Forget who logs which name: the next metrics are another run's."""
        self.owners.clear()

    def leave_out(self, names: Iterable[str]) -> None:
        """Log nothing more under these names, which the user's code logs itself."""
        for name in names:
            self.owners[name] = _USERS_OWN

    def _hear(self, library: str, read: Callable[[], Logged], outer: Logged | None) -> Logged | None:
        """Log what one call logs, inside the call ``outer`` of another library, if any. None if it was not read."""
        if library in self._given_up or (outer is not None and outer.passed_on is None):
            return None
        try:
            logged = read()
            found = list(_numbers(logged.metrics))
            if outer is not None and _values(found) & _values(_numbers(outer.passed_on or {})):
                return logged
            metrics = {}
            for name, value in found:
                if (own := self._name(name, library, logged)) is not None:
                    metrics[own] = value
            if metrics:
                self._log(metrics, _whole(logged.step))
            return logged
        except Exception as error:  # another version of the library: the training must not end
            self.give_up(library, error)
            return None

    def _name(self, name: str, library: str, logged: Logged) -> str | None:
        """The metric's name in the run; None if it is another library's."""
        mine = (library, logged.place)
        owner = self._owner(name, mine)
        if owner == mine:
            return name
        if owner[0] != library:
            return None
        name = f"{logged.label}/{name}"
        return name if self._owner(name, mine) == mine else None

    def _owner(self, name: str, claimant: tuple[str, str]) -> tuple[str, str]:
        if name not in self.owners:
            self.owners[name] = _USERS_OWN if self._is_logged(name) else claimant
        return self.owners[name]


def _numbers(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")  # as W&B names them
        elif _is_number(value):
            yield f"{prefix}{name}", value


def _values(metrics: Iterable[tuple[str, Any]]) -> set[str]:
    return {repr(float(value)) for _, value in metrics}  # as text, since NaN is not equal to itself


def _is_number(value: Any) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.size == 1 and value.dtype.kind in "biuf"
    if callable(numel := getattr(value, "numel", None)):  # a tensor
        return bool(numel() == 1 and not value.is_complex())
    return isinstance(value, numbers.Real)


def _whole(step: Any) -> int | None:
    try:
        return None if step is None else int(step)
    except (TypeError, ValueError, OverflowError):  # a text, NaN
        return None
