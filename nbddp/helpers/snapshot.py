"""Saves snapshots on rank 0, whole or not at all, and loads them on every rank to its device."""

import argparse
import contextlib
import datetime
import os
import pathlib
import pickle
import re
import socket
import time
import types
import zipfile
import zlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from nbddp.errors import NbddpError
from nbddp.files import new_file
from nbddp.helpers import context, log
from nbddp.payload import libraries

_multiarray = np._core.multiarray if hasattr(np, "_core") else np.core.multiarray  # type: ignore[attr-defined]  # numpy 1
_NUMPY = [np.ndarray, np.dtype, _multiarray._reconstruct, _multiarray.scalar]
_NUMPY += {type(np.dtype(code)) for code in np.typecodes["All"]}
_PLAIN = [bytes, frozenset, range, slice, argparse.Namespace, types.SimpleNamespace, pathlib.PosixPath]
_PLAIN += [datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone]


class _Pickler(pickle.Pickler):
    """Refuses what is only this rank's share."""

    def reducer_override(self, obj: Any) -> Any:
        return libraries.reduced(obj, back=True)


_PICKLE = types.SimpleNamespace(__name__="pickle", Pickler=_Pickler)
_LOADS_AGAIN_S = 2.0  # a rank that has found no file, has written one, and loads it together with the others


def save_snapshot(path: str | os.PathLike[str], **state: Any) -> None:
    """Write ``state`` to ``path``, only on rank 0; an old file stays until the new one is complete.

    Args:
        **state: tensors, numbers, text, NumPy arrays and numbers, and containers of these. A model, an optimizer, or
            any other object with a ``state_dict`` is saved as its ``state_dict`` (a DDP model as its ``.module``'s).

    Raises:
        NbddpError: the file can't be written, or :func:`load_snapshot` couldn't read it back; the old one stays.
    """
    if not context.is_primary():
        return
    with new_file(path) as file:
        try:
            with contextlib.ExitStack() as stack:
                # With checksums, even if the user has turned them off: the loss would show at the restart only.
                stack.callback(torch.serialization.set_crc32_options, torch.serialization.get_crc32_options())
                torch.serialization.set_crc32_options(True)
                torch.save({"state": _plain(state, {}), "steps": log.last_steps()}, file, _PICKLE)
            file.flush()
            os.fsync(file.fileno())
            _read(f"/proc/self/fd/{file.fileno()}", "cpu", mmap=True)
        except Exception as error:  # of anything that is pickled
            if isinstance(error.__context__, OSError):  # torch's own error for a full disk says nothing of the disk
                raise error.__context__ from None
            raise NbddpError(f"{os.fspath(path)} wasn't written: {_reason(error)}") from error
    log.record(saved=os.path.abspath(path), step=max(log.last_steps().values(), default=None))


def load_snapshot(
    path: str | os.PathLike[str], map_location: Any = None, *, weights_only: bool = True
) -> dict[str, Any] | None:
    """Load what :func:`save_snapshot` wrote; None if the file doesn't exist yet.

    The steps that :func:`nbddp.log` counts continue from the snapshot's.

    Raises:
        NbddpError: the file is damaged or isn't a snapshot, or another rank found a different file at this path.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        return _agreed(path, "no file", None)
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not compare the checksums
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"{damaged} is damaged")
            digest = zlib.crc32(repr([(each.filename, each.CRC) for each in archive.infolist()]).encode())
        content = _read(path, map_location or context.device(), weights_only=weights_only)
        if not isinstance(content, dict) or content.keys() != {"state", "steps"}:
            raise ValueError("it wasn't written by save_snapshot(); use torch.load()")
    except Exception as error:  # a file from elsewhere may raise anything
        refused = isinstance(error, pickle.UnpicklingError) and weights_only
        hint = ". If you trust the file (loading it can run any code), use weights_only=False" if refused else ""
        raise NbddpError(f"{path} can't be read as a snapshot: {_reason(error)}{hint}") from error
    log.resume_after(content["steps"])
    return _agreed(path, f"a snapshot ({digest:08x})", content["state"])


def _read(path: str, map_location: Any, **options: Any) -> Any:
    with torch.serialization.safe_globals([*_NUMPY, *_PLAIN]):
        return torch.load(path, map_location=map_location, **{"weights_only": True, **options})


def _reason(error: Exception) -> str:
    """What the error says; of torch's page about ``weights_only``, the one line that is about this file."""
    line = re.search(
        r"^(?:\s*WeightsUnpickler error: )?(.+)\s+Check the documentation of torch\.load", str(error), re.M
    )
    return line[1].strip().rstrip(".") if line else str(error)


def _agreed(path: str, found: str, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the state. Raise NbddpError if another rank has found another file, and doesn't load it again soon."""
    if context.world_size() > 1 and dist.is_initialized():
        store = distributed_c10d._get_default_store()
        point = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]  # ranks with the same number are at the same place
        here = f"rank {context.rank()} on {socket.gethostname()} found {found}"
        keys = [f"nbddp snapshot {path} {point} {rank}" for rank in range(context.world_size())]
        store.set(keys[context.rank()], here)
        deadline = time.monotonic() + _LOADS_AGAIN_S
        while others := [other for key in keys if (other := _looked_up(store, key)) and not other.endswith(found)]:
            if time.monotonic() > deadline:
                raise NbddpError(
                    f"load_snapshot({path!r}): {others[0]}, but {here}. All ranks must see the same file; call "
                    "barrier() between loading it and saving the next one"
                )
            time.sleep(0.02)
    return state


def _looked_up(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _plain(value: Any, found: dict[int, Any]) -> Any:
    """Replace objects in dicts, lists and tuples by their ``state_dict``; ``found``, by id, keeps what is shared."""
    if isinstance(value, DistributedDataParallel):
        value = value.module
    if id(value) in found:
        return found[id(value)]
    plain = value
    if type(value) is dict:
        plain = found[id(value)] = {}  # before its items, which may hold it
        plain.update((key, _plain(item, found)) for key, item in value.items())
    elif type(value) is list:
        plain = found[id(value)] = []
        plain.extend(_plain(item, found) for item in value)
    elif type(value) is tuple:
        plain = tuple(_plain(item, found) for item in value)
    elif hasattr(value, "state_dict") and not isinstance(value, type):
        libraries.reduced(value, back=True)  # before a collective of FSDP's, in which rank 0 would be alone
        plain = value.state_dict()
    found[id(value)] = plain
    return plain
