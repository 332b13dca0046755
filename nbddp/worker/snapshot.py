"""Saves snapshots atomically on rank 0, and loads them on every rank to its device."""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import socket
import tempfile
import zipfile
import zlib
from collections import Counter
from typing import Any, BinaryIO

import torch
from torch.nn.parallel import DistributedDataParallel

from nbddp.atomic_file import WholeFile, open_own
from nbddp.errors import NbddpError
from nbddp.worker import agreement, context, metrics, snapshot_format
from nbddp.worker.agreement import collectives_begun, set_default

_MARK = "nbddp snapshot"
_CHUNK_NBYTES = 1 << 20
_STEP = "last step"  # that log() counted
_STEPS = "last steps"  # for each metric
_ADVICE_ON_ONE_HOST = "Put a barrier() between load_snapshot() and the next save_snapshot() of the same file"
_ADVICE = "Put snapshots into a folder that all hosts share"


def save_snapshot(path: str | os.PathLike[str], **state: Any) -> None:
    """Write ``state`` to ``path``, on rank 0 only; an old file stays until the new one is complete.

    Args:
        path: the file, in a folder that exists.
        **state: tensors, numbers, text, dates, paths, numpy's arrays, scalars and random generators, and containers
            of these. A model, an optimizer or any other object with a ``state_dict``, also in a dict, list or tuple,
            is saved as its ``state_dict`` (a DDP model as that of its ``.module``).

    Raises:
        NbddpError: :func:`load_snapshot` could not read an object in ``state``, e.g. of your own class or a function.
            The error names the object, and nothing is written.
        FileNotFoundError: rank 0's machine has no such folder. OSError: the system refuses to write the file.
    """
    metrics.send()  # a resumed run does not log again what was logged before its snapshot
    if not context.is_primary():
        return
    _check_folder(os.path.dirname(os.path.abspath(path)))
    plain_state = _plain(state, {})
    content = {_MARK: 1, "state": plain_state, _STEP: metrics.last_step(), _STEPS: metrics.last_steps()}
    with WholeFile(path, 0o666) as file:
        try:
            snapshot_format.write(content, file)
            file.flush()
            snapshot_format.check(file.name)
        except OSError:  # e.g. a full disk
            raise
        except Exception as error:  # whatever a user's __reduce__ raises
            raise _refused(path, plain_state, error) from None
    metrics.report_snapshot(_name_on_all_hosts(path))


def _check_folder(folder: str) -> None:
    if not os.path.isdir(folder):
        where = socket.gethostname()
        raise FileNotFoundError(
            errno.ENOENT, f"there is no such folder on {where}, where rank 0 saves snapshots", folder
        )


def _refused(path: str | os.PathLike[str], state: dict[str, Any], error: Exception) -> Exception:
    found = snapshot_format.culprit(state)
    if found is None:
        return error
    name, description = found
    return NbddpError(
        f"{os.fspath(path)} was not written, because load_snapshot() could not read it again: {name} is {description}"
    )


def load_snapshot(
    path: str | os.PathLike[str], map_location: Any = None, *, weights_only: bool = True
) -> dict[str, Any] | None:
    """Load what :func:`save_snapshot` wrote; None if the file does not exist yet.

    It is not a collective: if no collective comes between loading and the next save, put a ``barrier()`` there.
    Ranks that load the same ``path`` at the same point must find the same content: if the file is not shared by all
    hosts, they would continue with different weights. A restart without the host of rank 0 must find its snapshot.
    The steps that :func:`nbddp.log` counts continue from the snapshot's, and so do the curves.

    Args:
        map_location: as for ``torch.load``; default: this rank's device.
        weights_only: as for ``torch.load``: accept only tensors and the values of numpy and the standard library.
            With False the file may run any code.

    Raises:
        NbddpError: another rank has loaded something else, the snapshot was lost with its host, or the file is
            truncated or damaged (its checksums are compared before anything is unpickled), is not a snapshot, holds
            objects of other classes, or belongs to another user (in a folder that is not that user's).
    """
    if not os.path.exists(path):
        _check_found(path, "found no file there")
        return None
    device = map_location or context.device()
    with open_own(path) as file:
        digest = _checked(file, os.fspath(path))
        load = snapshot_format.read if weights_only else functools.partial(torch.load, weights_only=False)
        try:
            content = load(file, map_location=device)
        except Exception as error:  # a pickle that torch did not write may raise anything
            raise _unreadable(file, os.fspath(path), error) from error
    if not isinstance(content, dict) or _MARK not in content or not isinstance(content.get("state"), dict):
        raise NbddpError(f"{os.fspath(path)} was not written by save_snapshot(); read it with torch.load()")
    step = content.get(_STEP)
    which = "a snapshot" if step is None else f"the snapshot of step {step}"
    _check_found(path, f"loaded {which} ({digest})", step)
    if isinstance(step, int):
        metrics.resume_after(step, content.get(_STEPS))
    state: dict[str, Any] = content["state"]
    return state


def _name_on_all_hosts(path: str | os.PathLike[str]) -> str:
    """The path in the same words on all hosts, where users and their homes may have other names."""
    name = os.path.normpath(os.fspath(path))
    for word, folder in (("~", os.path.expanduser("~")), ("$TMPDIR", tempfile.gettempdir())):
        if name.startswith(folder.rstrip(os.sep) + os.sep) and folder != os.sep:
            return word + name[len(folder) :]
    return name


def _check_found(path: str | os.PathLike[str], found: str, step: int | None = None) -> None:
    """Raise NbddpError if the other ranks, or those before a restart, would not agree with what was found."""
    name = os.fspath(path)
    host, last_step = context.lost_snapshots().get(_name_on_all_hosts(path), ("", -1))
    if host and (found.startswith("found no") or (step is not None and step < last_step)):
        saved = "a snapshot" if last_step < 0 else f"the snapshot of step {last_step}"
        raise NbddpError(
            f"load_snapshot({name!r}): before the restart rank 0 saved {saved} there on {host}, which is lost, but "
            f"rank {context.rank()} on {socket.gethostname()} {found}. {_ADVICE}"
        )
    _compare_with_other_ranks(name, found)
    agreement.when_grouped(lambda: _compare_with_other_ranks(name, found))


_compared: Counter[tuple[str, int]] = Counter()  # loads so far, by path and point of the program


def _compare_with_other_ranks(name: str, found: str) -> None:
    """Raise NbddpError if the first rank to load this path at this point found something else."""
    if (point := collectives_begun()) is None:
        return
    common = _name_on_all_hosts(name)
    key = f"snapshot {common} {point} {_compared[common, point]}"
    _compared[common, point] += 1
    host = socket.gethostname()
    rank, their_host, theirs = set_default(key, f"{context.rank()}\n{host}\n{found}").split("\n")
    if theirs != found:
        first, this, advice = f"rank {rank}", f"rank {context.rank()}", _ADVICE_ON_ONE_HOST
        if their_host != host:
            advice = _ADVICE
            first, this = f"{first} on {their_host}", f"{this} on {host}"
        raise NbddpError(
            f"load_snapshot({name!r}): {first} {theirs}, but {this} {found}: they would continue with different "
            f"weights. {advice}"
        )


def _checked(file: BinaryIO, path: str) -> str:
    """Verify torch.save's checksums, which torch.load ignores, and return a digest of the content.

    A damaged file is not unpickled, since it could hold other weights or other code.
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
        raise _damaged(path, error) from error
    file.seek(0)
    found = [(entry.filename, entry.CRC, entry.file_size) for entry in entries]
    return f"{zlib.crc32(repr(found).encode()):08x}"


def _check_layout(entries: list[zipfile.ZipInfo], nbytes: int) -> None:
    """Require torch.save's layout: zipfile skips data before the archive, torch does not."""
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise zipfile.BadZipFile("an entry is compressed")
    if min((entry.header_offset for entry in entries), default=-1) != 0:
        raise zipfile.BadZipFile("it does not begin with its first entry")
    if sum(entry.file_size for entry in entries) > nbytes:
        raise zipfile.BadZipFile("its entries are larger than the file")


def _unreadable(file: BinaryIO, path: str, error: Exception) -> NbddpError:
    unsafe: list[str] = []
    with contextlib.suppress(Exception):  # torch parses the pickle again, which it could not read
        file.seek(0)
        unsafe = snapshot_format.unsafe_names(file, not_on_our_list=True)
    if unsafe:
        return NbddpError(
            f"{path} holds {', '.join(unsafe[:3])}, which may be any code. If you trust the file, pass "
            "weights_only=False"
        )
    return _damaged(path, error)


def _damaged(path: str, error: Exception) -> NbddpError:
    why = str(error).split("\n")[0] or type(error).__name__
    return NbddpError(
        f"{path} cannot be read as a snapshot: {why}. It is truncated or damaged, or was not written by save_snapshot()"
    )


def _plain(value: Any, seen: dict[int, Any]) -> Any:
    """Replace objects in dicts, lists and tuples by their ``state_dict``; a value without any is returned as it is."""
    if isinstance(value, DistributedDataParallel):
        value = value.module
    if type(value) not in (dict, list, tuple):
        has_one = hasattr(value, "state_dict") and not isinstance(value, type)
        return value.state_dict() if has_one else value
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = value  # a cycle keeps the original, which needs no change or is refused later
    changed = [_plain(item, seen) for item in (value.values() if isinstance(value, dict) else value)]
    if all(map(operator.is_, changed, value.values() if isinstance(value, dict) else value)):
        return value
    seen[id(value)] = dict(zip(value, changed)) if isinstance(value, dict) else type(value)(changed)
    return seen[id(value)]
