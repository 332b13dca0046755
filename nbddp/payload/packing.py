"""Packs objects into a block and unpacks them: a stream by cloudpickle, next to it the memory of arrays and tensors.

[sizes][table][pickle stream][array or storage][array or storage] ...
"""

import inspect
import io
import linecache
import os
import pickle
import struct
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbddp.payload import mapped
from nbddp.payload.block import Block
from nbddp.payload.pickler import Packer, Received, Unpacker, can_be_sent, is_definition

_SIZES = struct.Struct("<QQ")  # of the table and of the stream
_ALIGN = 64


@dataclass
class Packed:
    """A packed object; ``by_value``, ``codes``, and ``weak_references`` as in :class:`Packer`."""

    block: Block
    by_value: list[Any]
    codes: list[types.CodeType]
    weak_references: int = 0


@dataclass
class Unpacked:
    """An object from a block; ``named`` and ``by_value`` as in :class:`Packer`."""

    value: Any
    named: dict[str, Any]
    by_value: list[Any]


def pack(obj: object, *, back: bool = False, received: Received | None = None, elsewhere: bool = False) -> Packed:
    """Pack an object. Raises whatever pickling raises; :func:`explain.explained` names the variable.

    Args:
        back: it goes from a rank to the notebook.
        received: classes and functions that the other side has sent, which go back as their number or name.
        elsewhere: it may be unpacked elsewhere, so nothing is a file's name; and of cells only the functions' lines go.
    """
    stream = io.BytesIO()
    packer = Packer(stream, back=back, received=received)
    packer.dump((obj, packer.named, packer.by_value))
    buffers = [buffer.raw() for buffer in packer.buffers]
    # Cells exist in the notebook only: for tracebacks, inspect and the debugger their lines are sent too.
    files = [file for file in {code.co_filename for code in packer.codes} if not os.path.exists(file)]
    sources = {file: _lines_of(file, packer.codes) if elsewhere else linecache.getlines(file) for file in files}
    places = [None] * len(buffers) if back or elsewhere else mapped.places(buffers)
    described, offset = [], 0
    for buffer, place in zip(buffers, places, strict=True):
        described.append((offset if place is None else place, buffer.nbytes, buffer.readonly))
        offset += 0 if place else _aligned(buffer.nbytes)
    table = pickle.dumps((described, sources))
    head = _SIZES.pack(len(table), stream.tell()) + table
    first = _aligned(len(head) + stream.tell())
    parts = [(first + at, buffer) for (at, *_), buffer in zip(described, buffers, strict=True) if isinstance(at, int)]
    block = Block.of([(0, memoryview(head)), (len(head), stream.getbuffer()), *parts], first + offset)
    return Packed(block, [*map(_unless_closure, packer.by_value)], packer.codes, packer.weak_references)


def definition(name: str) -> Block | None:
    """Pack the class or function that cells have defined under this name; None if there's none that can be sent."""
    found = getattr(sys.modules["__main__"], name, None)
    return pack(found).block if is_definition(name, found) and can_be_sent(found) else None


def unpack(block: Block, *, known: Sequence[Any] = ()) -> Unpacked:
    """Read the object from a block. Large arrays are mapped copy-on-write."""
    memory = block.view()
    table_nbytes, stream_nbytes = _SIZES.unpack_from(memory)
    stream_at = _SIZES.size + table_nbytes
    described, sources = pickle.loads(memory[_SIZES.size : stream_at])
    for file, lines in sources.items():  # without a time: linecache.checkcache() leaves such an entry alone
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    end = stream_at + stream_nbytes
    stream, buffers = io.BytesIO(memory[stream_at:end]), _buffers(memory[_aligned(end) :], described)
    value, named, by_value = Unpacker(stream, buffers, known).load()
    return Unpacked(value, named, [*map(_unless_closure, by_value)])


def _unless_closure(obj: Any) -> Any:
    """Return None for a closure: it never goes back by its number, and would keep what it has closed over."""
    return None if getattr(obj, "__closure__", None) else obj


def _lines_of(file: str, codes: Iterable[types.CodeType]) -> list[str]:
    """Return the lines of these functions at their numbers, without the rest of the cell, which may hold a token."""
    lines = linecache.getlines(file)
    kept = ["...\n"] * len(lines)  # an empty line would belong to the function above
    for code in codes:
        if code.co_filename == file:
            first = code.co_firstlineno - 1
            if code.co_name == "<lambda>":  # the block of one is its whole statement
                last = max(line or 0 for _, _, line in code.co_lines())
            else:
                last = first + len(inspect.getblock(lines[first:]))
            kept[first:last] = lines[first:last]
    return kept


def _buffers(memory: memoryview, described: list[tuple[int | mapped.Place, int, bool]]) -> Iterator[memoryview]:
    files: dict[str, memoryview] = {}
    for at, nbytes, readonly in described:
        view = memory[at : at + nbytes] if isinstance(at, int) else mapped.view(at, nbytes, files)
        yield view.toreadonly() if readonly else view


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
