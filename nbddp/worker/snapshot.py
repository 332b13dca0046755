"""Worker side. Snapshots: rank 0 writes them whole or not at all, every rank reads them to its device."""

from __future__ import annotations

import contextlib
import operator
import os
import socket
import zipfile
import zlib
from collections import Counter
from typing import Any, BinaryIO

import torch
from torch.nn.parallel import DistributedDataParallel

from nbddp.errors import NbddpError
from nbddp.wholefile import WholeFile, open_own
from nbddp.worker import context, metrics, plain
from nbddp.worker.agreement import collectives, first_to_say

_MARK = "nbddp snapshot"
_CHUNK_NBYTES = 1 << 20
_STEP = "last step"  # that log() counted
_STEPS = "last steps"  # of each metric


def save_snapshot(path: str | os.PathLike[str], **state: Any) -> None:
    """Write ``state`` to ``path``, on rank 0 only; the old file stays until the new one is complete.

    Args:
        path: the folder must exist.
        **state: what :func:`load_snapshot` reads again: tensors, numbers, text, dates and paths, containers of them,
            numpy's arrays, values and random generators. A model, an optimizer or anything else with a
            ``state_dict``, also in a dict, list or tuple, is saved as that (a DDP model as its ``.module``'s).

    Raises:
        NbddpError: something in ``state`` could not be loaded again (an object or function of your own); names it.
            Nothing was written.
    """
    if not context.is_primary():
        return
    plain_state = _plain(state, {})
    content = {_MARK: 1, "state": plain_state, _STEP: metrics.last_step(), _STEPS: metrics.last_steps()}
    with WholeFile(path, 0o666) as file:  # a file like any other
        try:
            plain.write(content, file)
            file.flush()
            plain.check(file.name)
        except OSError:  # the disk is full
            raise
        except Exception as error:  # whatever a user's __reduce__ raises
            raise _refused(path, plain_state, error) from None


def _refused(path: str | os.PathLike[str], state: dict[str, Any], error: Exception) -> Exception:
    found = plain.culprit(state)
    if found is None:
        return error
    where, what = found
    return NbddpError(
        f"{os.fspath(path)} was not written, because load_snapshot() could not read it again: {where} is {what}"
    )


def load_snapshot(
    path: str | os.PathLike[str], map_location: Any = None, *, weights_only: bool = True
) -> dict[str, Any] | None:
    """What :func:`save_snapshot` wrote, or None when there is no such file yet.

    No collective: a function that saves before its ranks have met once after loading puts a ``barrier()`` between.
    Where there is a process group, ranks that call it at the same point with the same ``path`` have to find the same:
    with a file that not all hosts share, they would train on with different weights.
    The steps that :func:`nbddp.log` counts go on from the snapshot's, so that a resumed curve does.

    Args:
        map_location: as for ``torch.load``; default: this rank's device.
        weights_only: as for ``torch.load``: refuse anything but tensors, numpy's and the standard library's
            values. With False the file may run any code.

    Raises:
        NbddpError: another rank has loaded something else; the file is torn or damaged (its checksums are compared
            before anything is unpickled), is not a snapshot, holds objects of other classes, or belongs to another
            user (in a folder that is not that user's).
    """
    if not os.path.exists(path):
        _compare_with_other_ranks(path, "found no file there")
        return None
    with open_own(path) as file:
        digest = _checked(file, os.fspath(path))
        content = _load(file, os.fspath(path), map_location or context.device(), weights_only)
    if not isinstance(content, dict) or _MARK not in content or not isinstance(content.get("state"), dict):
        raise NbddpError(f"{os.fspath(path)} was not written by save_snapshot(); read it with torch.load()")
    step = content.get(_STEP)
    _compare_with_other_ranks(path, f"loaded {'a snapshot' if step is None else f'that of step {step}'} ({digest})")
    if isinstance(step, int):
        metrics.resume_after(step, content.get(_STEPS))
    state: dict[str, Any] = content["state"]
    return state


_compared: Counter[tuple[str, int]] = Counter()  # loads so far, by path and point of the program


def _compare_with_other_ranks(path: str | os.PathLike[str], found: str) -> None:
    """Raise NbddpError if the first rank to load this here found something else."""
    if (point := collectives()) is None:
        return
    name = os.fspath(path)
    key = f"snapshot {name} {point} {_compared[name, point]}"
    _compared[name, point] += 1
    host = socket.gethostname()
    rank, their_host, theirs = first_to_say(key, f"{context.rank()}\n{host}\n{found}").split("\n")
    if theirs != found:
        first, this = f"rank {rank}", f"rank {context.rank()}"
        if their_host != host:
            first, this = f"{first} on {their_host}", f"{this} on {host}"
        raise NbddpError(
            f"load_snapshot({name!r}): {first} {theirs}, and {this} {found}: they would go on with different weights. "
            "Put snapshots into a folder that all ranks share"
        )


def _checked(file: BinaryIO, path: str) -> str:
    """A digest of the content, by the checksums that torch.save has put beside it; torch.load does not look at them.

    What is damaged would be other weights, or other code: it is not unpickled.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            _check_layout(entries, os.fstat(file.fileno()).st_size)
            for entry in entries:
                with archive.open(entry) as content:
                    while content.read(_CHUNK_NBYTES):
                        pass
    except Exception as error:  # zipfile raises struct.error, NotImplementedError, UnicodeDecodeError and more
        raise _torn(path, error) from error
    file.seek(0)
    found = [(entry.filename, entry.CRC, entry.file_size) for entry in entries]
    return f"{zlib.crc32(repr(found).encode()):08x}"


def _check_layout(entries: list[zipfile.ZipInfo], nbytes: int) -> None:
    """As torch.save lays it out. Something before it zipfile would leave out, and torch would not."""
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise zipfile.BadZipFile("a part of it is compressed")
    if min((entry.header_offset for entry in entries), default=-1) != 0:
        raise zipfile.BadZipFile("it does not begin with its first part")
    if sum(entry.file_size for entry in entries) > nbytes:
        raise zipfile.BadZipFile("its parts are larger than the file")


def _load(file: BinaryIO, path: str, map_location: Any, weights_only: bool) -> Any:
    try:
        if weights_only:
            return plain.read(file, map_location=map_location)
        return torch.load(file, map_location=map_location, weights_only=False)
    except Exception as error:  # of a pickle of no torch's, anything
        raise _unreadable(file, path, error) from error


def _unreadable(file: BinaryIO, path: str, error: Exception) -> NbddpError:
    foreign: list[str] = []
    with contextlib.suppress(Exception):  # torch looks through the pickle that it could not read
        file.seek(0)
        foreign = plain.foreign_names(file, after_ours=True)
    if foreign:
        return NbddpError(
            f"{path} holds {', '.join(foreign[:3])}, which may be any code. If you trust the file: weights_only=False"
        )
    return _torn(path, error)


def _torn(path: str, error: Exception) -> NbddpError:
    why = str(error).split("\n")[0] or type(error).__name__
    return NbddpError(
        f"{path} cannot be read as a snapshot: {why}. It is torn or damaged, or was not written by save_snapshot()"
    )


def _plain(value: Any, seen: dict[int, Any]) -> Any:
    """With the ``state_dict`` in place of what has one, in dicts, lists and tuples; else the very same object."""
    if isinstance(value, DistributedDataParallel):
        value = value.module
    if type(value) not in (dict, list, tuple):
        has_one = hasattr(value, "state_dict") and not isinstance(value, type)
        return value.state_dict() if has_one else value
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = value  # of a cycle the original, which has nothing to replace or is refused
    changed = [_plain(item, seen) for item in (value.values() if isinstance(value, dict) else value)]
    if all(map(operator.is_, changed, value.values() if isinstance(value, dict) else value)):
        return value
    seen[id(value)] = dict(zip(value, changed)) if isinstance(value, dict) else type(value)(changed)
    return seen[id(value)]
