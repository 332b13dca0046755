"""Both sides. A file that holds one pickled object: a job that waits for its ranks, or what came of one.

    [block, as payload writes it][head, JSON][checksum of block and head][length of the head][mark]

The block comes first, where a reader can map it; the head comes last, and so is missing in a copy that was cut off.
Reading the head runs nothing; unpacking the block runs whatever its writer put there. So that no damage runs, the
checksum (CRC-32) is compared before; it is no protection from somebody who changes the file on purpose.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import BinaryIO

from nbddp.errors import NbddpError
from nbddp.versions import difference, versions
from nbddp.wholefile import WholeFile, open_own

JOB, RESULT = "job", "result"
_WRITER = {JOB: "nbddp.export()", RESULT: "python -m nbddp ... --result"}
_MARK = b"nbddp file 2\n"  # changes with what is before it
_MARK_OF_ANY = b"nbddp file "
_END = struct.Struct(f"<IQ{len(_MARK)}s")
_CHUNK_NBYTES = 1 << 20
_MODE = 0o600  # whoever can write the file runs code as its reader, and it holds the notebook's data


@dataclass(frozen=True)
class Head:
    """What is known of the object without unpacking it.

    Attributes:
        kind: ``JOB`` or ``RESULT``.
        name: of the function.
        nbytes: of the block.
        versions: of what it was written with.
        folders: of a job, where the notebook found modules, beside those of its Python.
    """

    kind: str
    name: str
    nbytes: int
    versions: dict[str, str]
    folders: list[str]

    def __post_init__(self) -> None:
        kinds = {"kind": str, "name": str, "nbytes": int, "versions": dict, "folders": list}
        if not all(isinstance(getattr(self, field), kind) for field, kind in kinds.items()):
            raise TypeError("a head of something else")


def write(
    path: str | os.PathLike[str], kind: str, name: str, fill: Callable[[int], int], folders: tuple[str, ...] = ()
) -> None:
    """Write the file whole or not at all; an older one stays until then.

    Args:
        fill: writes the block to the fd that it is given, and returns its size.
    """
    with WholeFile(path, _MODE) as file:
        nbytes = fill(file.fileno())
        head = json.dumps(asdict(Head(kind, name, nbytes, versions(), list(folders)))).encode()
        file.seek(nbytes)
        file.write(head)
        file.write(_END.pack(_checksum(file, nbytes + len(head)), len(head), _MARK))


def open_block(path: str | os.PathLike[str], kind: str) -> tuple[int, Head]:
    """The file's fd, the caller's to close; its block may be unpacked here. And its head.

    Raises:
        NbddpError: it is no such file, is cut off, or was written with other versions.
    """
    with open_own(path) as file:
        head = _read_head(file, kind)
        theirs, ours = difference(head.versions)
        if theirs:
            raise NbddpError(
                f"{os.fspath(path)} was written with {theirs}, and here is {ours}: what one pickles, "
                "another may not read. Install the same versions here, or write it anew"
            )
        return os.dup(file.fileno()), head


def _read_head(file: BinaryIO, kind: str) -> Head:
    checksum, length, block_nbytes = _read_end(file, kind)
    if checksum != _checksum(file, block_nbytes + length):
        raise _foreign(file, kind, " or damaged: its checksum is not that of what it holds")
    try:
        file.seek(block_nbytes)
        head = Head(**json.loads(file.read(length)))
    except (ValueError, TypeError, RecursionError):
        raise _foreign(file, kind) from None
    if head.kind != kind or head.nbytes != block_nbytes:
        raise _foreign(file, kind)
    return head


def _read_end(file: BinaryIO, kind: str) -> tuple[int, int, int]:
    """The checksum, and the sizes of head and block, which are the file's."""
    rest = file.seek(0, os.SEEK_END) - _END.size
    if rest < 0:
        raise _foreign(file, kind)
    file.seek(rest)
    checksum, length, mark = _END.unpack(file.read(_END.size))
    if mark != _MARK and mark.startswith(_MARK_OF_ANY):
        raise NbddpError(f"{file.name} was written by another version of nbddp, in another format: write it again")
    if mark != _MARK or length > rest:
        raise _foreign(file, kind)
    return checksum, length, rest - length


def _foreign(file: BinaryIO, kind: str, damage: str = "") -> NbddpError:
    return NbddpError(f"{file.name} was not written by {_WRITER[kind]}, or is cut off{damage}")


def _checksum(file: BinaryIO, nbytes: int) -> int:
    """Of its first bytes; reads a bounded piece at a time."""
    checksum, left = 0, nbytes
    file.seek(0)
    while left and (piece := file.read(min(left, _CHUNK_NBYTES))):
        checksum, left = zlib.crc32(piece, checksum), left - len(piece)
    file.seek(nbytes)
    return checksum
