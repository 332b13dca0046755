"""Checks that a file holds the records that a rank writes, before any of its numbers is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbddp import wire
from nbddp.errors import NbddpError
from nbddp.history.records import RECORD_DTYPE

_MAX_RANKS = 1 << 16
_MAX_TIME = 1e11  # unix time, in the year 5138
_MAX_COUNT = 2.0**63
_IDS = 1 << 16

_Records = npt.NDArray[Any]


def check_begin(path: str, record: bytes | memoryview) -> tuple[int, float]:
    """The world size and the time in a rank's first record. Raises NbddpError if no rank writes such a record."""
    _, mark, world_size, rank, began = wire.BEGIN.unpack(record)
    if mark != wire.BEGIN_MARK:
        raise _damaged(path, "a rank's first record lacks the mark of this format")
    if not 0 < world_size <= _MAX_RANKS:
        raise _damaged(path, f"it gives a world size of {world_size:,}, which is not between 1 and {_MAX_RANKS:,}")
    if rank >= world_size:
        raise _damaged(path, f"it gives rank {rank:,} with a world size of {world_size:,}")
    if not 0 <= began < _MAX_TIME:
        raise _damaged(path, f"it gives {began!r} as the unix time at which a rank began")
    return world_size, began


def check_records(path: str, data: memoryview) -> None:
    """Check the records after a rank's first one. Raises NbddpError if no rank writes such records."""
    records = np.frombuffer(data, dtype=RECORD_DTYPE, count=len(data) // wire.RECORD.size)
    named = _named_from(path, records, data)
    kind = records["kind"]
    metric, bar, samples = (kind == one for one in (wire.KIND_METRIC, wire.KIND_PROGRESS, wire.KIND_SAMPLES))
    has_numbers = metric | bar | samples
    faults = [
        ("a record is of an unknown kind", (kind != wire.KIND_NAME) & ~has_numbers),
        ("a value comes before its name", has_numbers & (named[records["id"]] > np.arange(len(records)))),
        ("an unknown reduce=", metric & ~np.isin(records["op"], list(wire.REDUCE_NAMES))),
        ("a flag for a counted step is neither 0 nor 1", metric & (records["counted"] > 1)),
        ("a time is not a number", has_numbers & ~np.isfinite(records["time"])),
        ("a count is out of range", (bar | samples) & ~_is_count(records["value"])),
        ("a progress loop's level is out of range", bar & ~_is_count(records["weight"])),
    ]
    for fault, found in faults:
        if found.any():
            number = int(np.argmax(found)) + 1
            raise _damaged(path, f"{fault} (record {number:,} of {len(records):,} after a rank's first record)")


def _is_count(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    return (numbers >= 0) & (numbers <= _MAX_COUNT)  # False for NaN, too


def _named_from(path: str, records: _Records, data: memoryview) -> npt.NDArray[np.int64]:
    """By id, the index of the record that completes its name; ``len(records)`` for an id without a name."""
    named = np.full(_IDS, len(records))
    pieces: dict[int, bytes] = {}
    for i in np.flatnonzero(records["kind"] == wire.KIND_NAME).tolist():
        _, more, ident, piece = wire.NAME_PIECE.unpack_from(data, i * wire.RECORD.size)
        text = pieces.pop(ident, b"") + piece
        if more > 1 or named[ident] < i:
            raise _damaged(path, f"name {ident} is defined twice, or its record is malformed")
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
    return NbddpError(f"{path} is damaged, or is not a metrics file: {why}")
