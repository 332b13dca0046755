"""A file with one packed object: a job, or the result of one. The last line describes it, as JSON.

The block comes first, so that a reader can map it. To read the line runs no code; to unpack the block can run any.
A checksum of both ends the line: it tells damage, and costs each reader one pass over the file.
"""

import json
import os
import sys
import zlib
from typing import Any

import cloudpickle
import torch

from nbddp.errors import NbddpError
from nbddp.files import new_file
from nbddp.payload import Block

JOB, RESULT = "job", "result"
_WRITER = {JOB: "nbddp.export()", RESULT: "python -m nbddp ... --result"}
# Python's bytecode is in the file, and the pickle calls functions of torch and cloudpickle.
_VERSIONS = "Python {}.{}, torch {}, cloudpickle {}".format(
    *sys.version_info[:2], torch.__version__, cloudpickle.__version__
)
_LINE_BYTES = 1 << 20  # the most of the last line that's read


def write(path: str | os.PathLike[str], kind: str, block: Block, **described: Any) -> None:
    """Write a file that only its owner can read: it holds the notebook's data. Raises NbddpError if it can't be."""
    line = json.dumps({"nbddp": kind, "nbytes": block.nbytes, "versions": _VERSIONS, **described}).encode()
    with new_file(path, mode=0o600) as file:
        file.write(block.view())
        file.write(b"\n%b %08x" % (line, _checksum(block, line)))


def read(path: str | os.PathLike[str], kind: str) -> tuple[Block, dict[str, Any]]:
    """Return the block and what describes it.

    Raises:
        OSError: the file can't be opened.
        NbddpError: it isn't of this kind, is truncated or damaged, or was written with other versions.
    """
    path = os.fspath(path)
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LINE_BYTES))
        last = file.read().rpartition(b"\n")[2]
        line, _, checksum = last.rpartition(b" ")
        nbytes = size - len(last) - 1
        try:
            described = json.loads(line)
            versions, *fits = described["versions"], described["nbddp"], described["nbytes"]
        except (ValueError, TypeError, KeyError, RecursionError):
            fits = []
        if fits != [kind, nbytes]:
            raise NbddpError(f"{path} wasn't written by {_WRITER[kind]}, or is truncated")
        if versions != _VERSIONS:
            raise NbddpError(f"{path} was written with {versions}; this machine has {_VERSIONS}: use the same versions")
        block = Block(os.dup(file.fileno()), nbytes)
        if b"%08x" % _checksum(block, line) != checksum:
            block.close()
            raise NbddpError(f"{path} is damaged: its checksum doesn't match")
        return block, described


def _checksum(block: Block, line: bytes) -> int:
    return zlib.crc32(line, zlib.crc32(block.view()))
