"""Reads and writes files that hold one pickled object: a job, or the result of one.

    [block, as payload writes it][head, JSON][checksum of block and head][length of the head][mark]

The block comes first, so that a reader can map it; the head comes last, so a truncated copy lacks it. Reading the head
runs no code; unpacking the block can run any code. The checksum (CRC-32) is compared first, so that damaged data is
not unpacked; it does not protect from intentional changes.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import BinaryIO

from nbddp.atomic_file import WholeFile, open_own
from nbddp.errors import NbddpError
from nbddp.versions import difference, versions

JOB, RESULT = "job", "result"
_WRITER = {JOB: "nbddp.export()", RESULT: "python -m nbddp ... --result"}
_MARK = b"nbddp file 2\n"  # the number is the version of the format
_ANY_VERSION_MARK = b"nbddp file "
_END = struct.Struct(f"<IQ{len(_MARK)}s")
_CHUNK_NBYTES = 1 << 20
_MODE = 0o600  # write access lets others run code as the reader, and read access shows the notebook's data


@dataclass(frozen=True)
class Head:
    """A description of the object that can be read without unpacking it.

    Attributes:
        kind: ``JOB`` or ``RESULT``.
        name: the function's name.
        nbytes: the size of the block.
        versions: the versions of Python and the packages that wrote it.
        folders: for a job, the notebook's ``sys.path`` without the folders of its Python.
    """

    kind: str
    name: str
    nbytes: int
    versions: dict[str, str]
    folders: list[str]

    def __post_init__(self) -> None:
        kinds = {"kind": str, "name": str, "nbytes": int, "versions": dict, "folders": list}
        if not all(isinstance(getattr(self, field), kind) for field, kind in kinds.items()):
            raise TypeError("the head has other types")


def write(
    path: str | os.PathLike[str], kind: str, name: str, fill: Callable[[int], int], folders: tuple[str, ...] = ()
) -> None:
    """Write the file atomically; an older one stays until then.

    Args:
        fill: writes the block to a file descriptor, and returns its size.
    """
    with WholeFile(path, _MODE) as file:
        nbytes = fill(file.fileno())
        head = json.dumps(asdict(Head(kind, name, nbytes, versions(), list(folders)))).encode()
        file.seek(nbytes)
        file.write(head)
        file.write(_END.pack(_checksum(file, nbytes + len(head)), len(head), _MARK))


def open_block(path: str | os.PathLike[str], kind: str) -> tuple[int, Head]:
    """Open a file whose block can be unpacked here. Returns its file descriptor, which the caller closes, and its head.

    Raises:
        NbddpError: the file is of another kind, is truncated, or was written with other versions.
    """
    with open_own(path) as file:
        head = _read_head(file, kind)
        theirs, ours = difference(head.versions)
        if theirs:
            raise NbddpError(
                f"{os.fspath(path)} was written with {theirs}, but {ours} is installed here, which may not be able to "
                "read it. Install the same versions here, or write the file again"
            )
        return os.dup(file.fileno()), head


def _read_head(file: BinaryIO, kind: str) -> Head:
    rest = file.seek(0, os.SEEK_END) - _END.size
    if rest < 0:
        raise _not_ours(file, kind)
    file.seek(rest)
    checksum, length, mark = _END.unpack(file.read(_END.size))
    if mark != _MARK and mark.startswith(_ANY_VERSION_MARK):
        raise NbddpError(f"{file.name} was written by a version of nbddp with another format: write it again")
    if mark != _MARK or length > rest:
        raise _not_ours(file, kind)
    block_nbytes = rest - length
    if checksum != _checksum(file, block_nbytes + length):
        raise _not_ours(file, kind, " or damaged: its checksum does not match its content")
    try:
        file.seek(block_nbytes)
        head = Head(**json.loads(file.read(length)))
    except (ValueError, TypeError, RecursionError):
        raise _not_ours(file, kind) from None
    if head.kind != kind or head.nbytes != block_nbytes:
        raise _not_ours(file, kind)
    return head


def _not_ours(file: BinaryIO, kind: str, damage: str = "") -> NbddpError:
    return NbddpError(f"{file.name} was not written by {_WRITER[kind]}, or is truncated{damage}")


def _checksum(file: BinaryIO, nbytes: int) -> int:
    """Return the checksum of the first ``nbytes``, which are read in pieces."""
    checksum, left = 0, nbytes
    file.seek(0)
    while left and (piece := file.read(min(left, _CHUNK_NBYTES))):
        checksum, left = zlib.crc32(piece, checksum), left - len(piece)
    file.seek(nbytes)
    return checksum
