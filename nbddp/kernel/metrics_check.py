"""Kernel side. Is a file of metrics what a rank writes? Looked at before anything is made of its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbddp import wire
from nbddp.errors import NbddpError
from nbddp.kernel.records import RECORD_DTYPE

MOST_RANKS = 1 << 16
_LATEST = 1e11  # unix time, in the year 5138
_MOST_COUNT = 2.0**63
_MOST_IDS = 1 << 16

_Records = npt.NDArray[Any]
_Bools = npt.NDArray[np.bool_]


def check_begin(path: str, record: bytes | memoryview) -> tuple[int, float]:
    """The world size and the time in a rank's first record. Raises NbddpError if no rank writes such ones."""
    _, mark, world_size, rank, began = wire.BEGIN.unpack(record)
    if mark != wire.BEGIN_MARK:
        raise _damaged(path, "a rank begins in it without the mark of this format")
    if not 0 < world_size <= MOST_RANKS:
        raise _damaged(path, f"it says that there were {world_size:,} ranks, and at most {MOST_RANKS:,} are read")
    if rank >= world_size:
        raise _damaged(path, f"it says that it is of rank {rank:,} of {world_size:,}")
    if not 0 <= began < _LATEST:
        raise _damaged(path, f"it says that a rank began at {began!r} s of unix time")
    return world_size, began


def check_records(path: str, data: memoryview) -> None:
    """What a rank has written after its first record. Raises NbddpError if no rank writes that."""
    records = np.frombuffer(data, dtype=RECORD_DTYPE, count=len(data) // wire.RECORD.size)
    named = _named_from(path, records, data)
    for fault, found in _faults(records, named):
        if found.any():
            raise _damaged(path, f"{fault} (record {int(np.argmax(found)) + 1:,} of {len(records):,} since a begin)")


def _faults(records: _Records, named: npt.NDArray[np.int64]) -> list[tuple[str, _Bools]]:
    """What may be wrong, and where it is."""
    kind = records["kind"]
    metric, bar, number = (kind == one for one in (wire.KIND_METRIC, wire.KIND_PROGRESS, wire.KIND_SAMPLES))
    has_numbers = metric | bar | number
    return [
        ("a record of no kind that there is", (kind != wire.KIND_NAME) & ~has_numbers),
        ("a value of a name that was not given", has_numbers & (named[records["id"]] > np.arange(len(records)))),
        ("a reduce= that there is not", metric & ~np.isin(records["op"], list(wire.REDUCE_NAMES))),
        ("a step that is neither counted nor given", metric & (records["counted"] > 1)),
        ("a time that is not a number", has_numbers & ~np.isfinite(records["time"])),
        ("a count that is not a number", (bar | number) & ~_is_count(records["value"])),
        ("a loop's level that is not a number", bar & ~_is_count(records["weight"])),
    ]


def _is_count(numbers: npt.NDArray[np.float64]) -> _Bools:
    return (numbers >= 0) & (numbers <= _MOST_COUNT)  # False for NaN, too


def _named_from(path: str, records: _Records, data: memoryview) -> npt.NDArray[np.int64]:
    """By id, the record that ends its name; behind all of them where there is none."""
    named = np.full(_MOST_IDS, len(records))
    pieces: dict[int, bytes] = {}
    for i in np.flatnonzero(records["kind"] == wire.KIND_NAME).tolist():
        _, more, ident, piece = wire.NAME_PIECE.unpack_from(data, i * wire.RECORD.size)
        text = pieces.pop(ident, b"") + piece
        if more > 1 or named[ident] < i:
            raise _damaged(path, f"name {ident} is in it twice, or is none")
        if more:
            pieces[ident] = text
            continue
        named[ident] = i
        try:
            text.decode()
        except UnicodeDecodeError:
            raise _damaged(path, f"name {ident} is not UTF-8") from None
    return named


def _damaged(path: str, why: str) -> NbddpError:
    return NbddpError(f"{path} is damaged, or is not a file of metrics: {why}")
