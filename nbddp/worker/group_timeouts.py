"""Lets the collectives of this rank wait for an hour, while a rank is stopped in the debugger."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

TIMEOUT_S = 3600.0
_set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # private before torch 2.15

_before: dict[str, datetime.timedelta] = {}  # the timeouts of the groups that wait for an hour, by the group's name


def hold() -> None:
    """Let the collectives that begin from now on in this call wait for an hour, in all process groups."""
    for group, name in list(distributed_c10d._world.pg_names.items()):  # private; torch 2.6 to 2.15
        with contextlib.suppress(ValueError):  # this rank is not in it
            before = _timeout_of(group)
            _set_timeout(datetime.timedelta(seconds=TIMEOUT_S), group)
            if before is not None:
                _before.setdefault(name, before)


def restore() -> None:
    """Undo :func:`hold` of a session's previous call."""
    timeouts = dict(_before)
    _before.clear()
    for group, name in list(distributed_c10d._world.pg_names.items()) if timeouts else ():
        if name in timeouts:
            _set_timeout(timeouts[name], group)


def _timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Return the timeout of a group's collectives; None for a backend that does not say it. Private, as above."""
    backends: list[Any] = [group._get_backend(device) for device in getattr(group, "_device_types", ())]
    timeouts = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends]
    return next(filter(None, timeouts), None)
