"""Kernel side. The files that a job's ranks wrote their metrics to, taken apart again by attempt and rank."""

from __future__ import annotations

import bisect
import itertools
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

import numpy as np

from nbddp import wire
from nbddp.errors import NbddpError
from nbddp.kernel.metrics_check import check_begin, check_records
from nbddp.kernel.records import RECORD_DTYPE
from nbddp.wholefile import read_own

_SIZE = wire.RECORD.size
_MOST_NBYTES = 8 << 30  # 250 million records
_PIECE_BYTES = 8192 * _SIZE
_FOREIGN = "{} was not written by python -m nbddp ... --metrics"


@dataclass
class Attempt:
    """From one start of the ranks to the next.

    Attributes:
        began: unix time, by rank 0's clock.
        records: what each rank wrote, by rank.
    """

    began: float
    world_size: int
    records: dict[int, memoryview] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """What is known of why it was made."""
        return f"started again {datetime.fromtimestamp(self.began):%Y-%m-%d %H:%M:%S}"

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """All of it, a little of each rank in turn: what waits for other ranks does not wait long."""
        pieces = {rank: _cut(data) for rank, data in sorted(self.records.items())}
        for round_ in itertools.zip_longest(*pieces.values(), fillvalue=b""):
            yield from ((rank, data) for rank, data in zip(pieces, round_) if data)


def read(path: str | os.PathLike[str]) -> list[Attempt]:
    """The job's attempts, in the order of time; at least one.

    Raises:
        NbddpError: there is something else in one of the files, it is damaged, or it is another version's.
    """
    path = os.fspath(path)
    first = _parts(path)
    if not first:
        raise NbddpError(_FOREIGN.format(path))
    attempts = [Attempt(part.began, part.world_size, {0: part.records}) for part in first]
    for rank in _other_ranks(path):
        # Each in a process of its own, on perhaps another machine: an attempt's ranks begin within seconds.
        for part in _parts(wire.metrics_path(path, rank)):
            attempt = _nearest(attempts, part.began)
            if rank < attempt.world_size:
                attempt.records[rank] = part.records
    _tell_of_missing(path, attempts)
    return attempts


@dataclass
class _Part:
    """What one rank wrote in one attempt."""

    began: float
    world_size: int
    records: memoryview


def _parts(path: str) -> list[_Part]:
    data = read_own(path, _MOST_NBYTES)
    if len(data) < _SIZE:  # a rank that was killed before it began
        return []
    if not data.startswith(wire.BEGIN_MARK, 1):
        if data.startswith(wire.BEGIN_MARK_OF_ANY, 1):
            raise NbddpError(
                f"{path} was written by another version of nbddp, with metrics in another format: load it with the "
                "version that wrote it"
            )
        raise NbddpError(_FOREIGN.format(path))
    whole = len(data) // _SIZE  # the last record of a rank that was killed may be torn
    kinds = np.frombuffer(data, dtype=RECORD_DTYPE, count=whole)["kind"]
    starts = np.flatnonzero(kinds == wire.KIND_BEGIN).tolist()
    return [
        _part(path, memoryview(data)[start * _SIZE : stop * _SIZE])
        for start, stop in itertools.pairwise([*starts, whole])
    ]


def _part(path: str, data: memoryview) -> _Part:
    world_size, began = check_begin(path, data[:_SIZE])
    # A machine that went down may leave zeros where its last records had room already.
    used = len(bytes(data).rstrip(b"\0"))
    records = data[_SIZE : -(-used // _SIZE) * _SIZE]
    check_records(path, records)
    return _Part(began, world_size, records)


def _other_ranks(path: str) -> list[int]:
    folder, name = os.path.split(os.path.abspath(path))
    named = (re.fullmatch(re.escape(name) + r"\.rank([1-9]\d*)", entry) for entry in os.listdir(folder))
    return sorted(int(match[1]) for match in named if match)


def _nearest(attempts: list[Attempt], at: float) -> Attempt:
    index = bisect.bisect([attempt.began for attempt in attempts], at)
    return min(attempts[max(0, index - 1) : index + 1], key=lambda attempt: abs(attempt.began - at))


def _tell_of_missing(path: str, attempts: list[Attempt]) -> None:
    there = {rank for attempt in attempts for rank in attempt.records}
    missing = sorted(set(range(max(attempt.world_size for attempt in attempts))) - there)
    if missing:
        ranks = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} ranks, the first is {missing[0]}"
        warnings.warn(
            f"no metrics of {ranks}: what is logged with reduce= is of the others alone. Put the files of all hosts "
            f"({wire.metrics_path(os.path.basename(path), missing[0])} ...) into one folder",
            stacklevel=3,
        )


def _cut(data: memoryview) -> Iterator[bytes]:
    return (bytes(data[at : at + _PIECE_BYTES]) for at in range(0, len(data), _PIECE_BYTES))
