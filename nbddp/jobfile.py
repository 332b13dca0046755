"""Both sides. A file that holds one pickled object: a job that waits for its ranks, or what came of one.

    [block, as payload writes it][head, JSON][length of the head][mark]

The block comes first, where a reader can map it; the head comes last, and so is missing in a copy that was cut off.
Reading the head runs nothing; unpacking the block runs whatever its writer put there.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import BinaryIO

from nbddp.errors import NbddpError
from nbddp.versions import difference, versions
from nbddp.wholefile import WholeFile

JOB, RESULT = "job", "result"
_WRITER = {JOB: "nbddp.export()", RESULT: "python -m nbddp ... --result"}
_MARK = b"nbddp file 1\n"
_END = struct.Struct(f"<Q{len(_MARK)}s")
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
        file.write(head + _END.pack(len(head), _MARK))


def open_block(path: str | os.PathLike[str], kind: str) -> tuple[int, Head]:
    """The file's fd, the caller's to close; its block may be unpacked here. And its head.

    Raises:
        NbddpError: it is no such file, is cut off, or was written with other versions.
    """
    with open(path, "rb") as file:
        head = _read_head(file, kind)
        theirs, ours = difference(head.versions)
        if theirs:
            raise NbddpError(
                f"{os.fspath(path)} was written with {theirs}, and here is {ours}: what one pickles, "
                "another may not read. Install the same versions here, or write it anew"
            )
        return os.dup(file.fileno()), head


def _read_head(file: BinaryIO, kind: str) -> Head:
    size = file.seek(0, os.SEEK_END)
    try:
        file.seek(-_END.size, os.SEEK_END)
        length, mark = _END.unpack(file.read())
        file.seek(-_END.size - length, os.SEEK_END)
        head = Head(**json.loads(file.read(length))) if mark == _MARK else None
    except (OSError, ValueError, TypeError, RecursionError):
        head = None
    if head is None or head.kind != kind or size != _END.size + length + head.nbytes:
        raise NbddpError(f"{file.name} was not written by {_WRITER[kind]}, or is cut off")
    return head
