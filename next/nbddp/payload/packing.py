"""Packs objects into a block and unpacks them: a stream by cloudpickle, next to it the memory of arrays and tensors.

[sizes][table][pickle stream][array or storage][array or storage] ...
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nbddp.payload.block import Block
from nbddp.payload.pickler import Packer, Unpacker

_SIZES = struct.Struct("<QQ")  # of the table and of the stream
_ALIGN = 64


@dataclass
class Packed:
    """A packed object, and what was pickled by value: see :class:`Packer`."""

    block: Block
    by_value: list[Any]


@dataclass
class Unpacked:
    """An object from a block; ``by_value`` and ``named`` as in :class:`Packer`."""

    value: Any
    by_value: list[Any]
    named: dict[str, Any]


def pack(obj: object, *, back: bool = False, received: Sequence[Any] = ()) -> Packed:
    """Pack an object. Raises whatever pickling raises; :func:`explain.explained` names the variable.

    Args:
        back: it goes from a rank to the notebook.
        received: classes and functions that the other side has sent, which go back as their number.
    """
    stream = io.BytesIO()
    packer = Packer(stream, back=back, received=received)
    packer.dump((obj, packer.by_value, packer.named))
    buffers = [buffer.raw() for buffer in packer.buffers]
    # Cells exist in the notebook only: for tracebacks, inspect and the debugger their lines are sent too.
    sources = {file: linecache.getlines(file) for file in packer.files if not os.path.exists(file)}
    table = pickle.dumps(([(buffer.nbytes, buffer.readonly) for buffer in buffers], sources))
    head = _SIZES.pack(len(table), stream.tell()) + table
    parts, offset = [(0, memoryview(head)), (len(head), stream.getbuffer())], len(head) + stream.tell()
    for buffer in buffers:
        offset = _aligned(offset)
        parts.append((offset, buffer))
        offset += buffer.nbytes
    return Packed(Block.of(parts, offset), packer.by_value)


def unpack(block: Block, *, known: Sequence[Any] = ()) -> Unpacked:
    """Read the object from a block. Large arrays are mapped copy-on-write."""
    memory = block.view()
    table_nbytes, stream_nbytes = _SIZES.unpack_from(memory)
    stream_at = _SIZES.size + table_nbytes
    buffers, sources = pickle.loads(memory[_SIZES.size : stream_at])
    for file, lines in sources.items():  # without a time: linecache.checkcache() leaves such an entry alone
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    end = stream_at + stream_nbytes
    stream = io.BytesIO(memory[stream_at:end])
    return Unpacked(*Unpacker(stream, _views(memory, end, buffers), known).load())


def _views(memory: memoryview, offset: int, buffers: list[tuple[int, bool]]) -> Iterable[memoryview]:
    for nbytes, readonly in buffers:
        offset = _aligned(offset)
        view = memory[offset : offset + nbytes]
        yield view.toreadonly() if readonly else view
        offset += nbytes


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
