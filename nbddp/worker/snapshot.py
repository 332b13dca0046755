"""Worker side. Snapshots: rank 0 writes them whole or not at all, every rank reads them to its device."""

from __future__ import annotations

import os
import pickle
import zipfile
from typing import Any, BinaryIO

import torch
from torch.nn.parallel import DistributedDataParallel

from nbddp.errors import NbddpError
from nbddp.wholefile import WholeFile, open_own
from nbddp.worker import context, metrics

_MARK = "nbddp snapshot"
_STEP = "last step"  # that log() counted
_STEPS = "last steps"  # of each metric


def save_snapshot(path: str | os.PathLike[str], **state: Any) -> None:
    """Write ``state`` to ``path``, on rank 0 only; the old file stays until the new one is complete.

    Args:
        path: the folder must exist.
        **state: tensors, numbers, containers of them; a model, an optimizer or anything else with a
            ``state_dict`` is saved as that (a DDP model as its ``.module``'s).
    """
    if not context.is_primary():
        return
    content = {_MARK: 1, "state": {name: _plain(value) for name, value in state.items()}}
    with WholeFile(path, 0o666) as file:  # a file like any other
        torch.save({**content, _STEP: metrics.last_step(), _STEPS: metrics.last_steps()}, file)


def load_snapshot(
    path: str | os.PathLike[str], map_location: Any = None, *, weights_only: bool = True
) -> dict[str, Any] | None:
    """What :func:`save_snapshot` wrote, or None when there is no such file yet.

    No collective: a function that saves before its ranks have met once after loading puts a ``barrier()`` between.
    The steps that :func:`nbddp.log` counts go on from the snapshot's, so that a resumed curve does.

    Args:
        map_location: as for ``torch.load``; default: this rank's device.
        weights_only: as for ``torch.load``: refuse anything but tensors and plain values. With False
            the file may run any code.

    Raises:
        NbddpError: the file is torn, is no snapshot, or belongs to another user (in a folder that is not that user's).
    """
    if not os.path.exists(path):
        return None
    try:
        with open_own(path) as file:
            content = _load(file, map_location or context.device(), weights_only)
    except _Unreadable as error:
        raise NbddpError(
            f"{os.fspath(path)} cannot be read as a snapshot: {error}. "
            "It is torn, foreign, or holds other things than tensors and plain values (weights_only=False)"
        ) from error.__cause__
    if not isinstance(content, dict) or not {_MARK, "state"} <= content.keys():
        raise NbddpError(f"{os.fspath(path)} was not written by save_snapshot(); read it with torch.load()")
    if isinstance(step := content.get(_STEP), int):
        metrics.resume_after(step, content.get(_STEPS))
    state: dict[str, Any] = content["state"]
    return state


class _Unreadable(Exception):
    """torch cannot read the file that it was given."""


def _load(file: BinaryIO, map_location: Any, weights_only: bool) -> Any:
    try:
        return torch.load(file, map_location=map_location, weights_only=weights_only)
    # An OSError here is a seek beyond the end of a torn file: it is open already.
    except (RuntimeError, pickle.UnpicklingError, EOFError, zipfile.BadZipFile, ValueError, OSError) as error:
        raise _Unreadable(str(error).split("\n")[0] or type(error).__name__) from error


def _plain(value: Any) -> Any:
    if isinstance(value, DistributedDataParallel):
        value = value.module
    return value.state_dict() if hasattr(value, "state_dict") else value
