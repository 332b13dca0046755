"""Reads the metrics files of a job's ranks, and splits them by attempt and rank."""

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
from nbddp.atomic_file import read_own
from nbddp.errors import NbddpError
from nbddp.history.metrics_check import check_begin, check_records
from nbddp.history.records import RECORD_DTYPE

_SIZE = wire.RECORD.size
_MAX_NBYTES = 8 << 30  # over 200 million records
_CHUNK_BYTES = 8192 * _SIZE
_FOREIGN = "{} was not written by python -m nbddp ... --metrics"


def path_of(path: str, rank: int) -> str:
    """The file for the metrics of that rank. Each rank has its own, so that hosts need no shared file system."""
    return path if rank == 0 else f"{path}.rank{rank}"


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
        """All that is known about why the ranks were started again."""
        return f"started again {datetime.fromtimestamp(self.began):%Y-%m-%d %H:%M:%S}"

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """All records, a chunk of each rank in turn: values that wait for other ranks do not pile up."""
        chunks = {rank: _chunks(data) for rank, data in sorted(self.records.items())}
        for round_ in itertools.zip_longest(*chunks.values(), fillvalue=b""):
            yield from ((rank, data) for rank, data in zip(chunks, round_) if data)


def _chunks(data: memoryview) -> Iterator[bytes]:
    return (bytes(data[at : at + _CHUNK_BYTES]) for at in range(0, len(data), _CHUNK_BYTES))


def read(path: str | os.PathLike[str]) -> list[Attempt]:
    """The job's attempts, in the order of time; at least one.

    Raises:
        NbddpError: one of the files is not a metrics file, is damaged, or was written by another version of nbddp.
    """
    path = os.fspath(path)
    first = _parts(path)
    if not first:
        raise NbddpError(_FOREIGN.format(path))
    attempts = [Attempt(part.began, part.world_size, {0: part.records}) for part in first]
    for rank in _other_ranks(path):
        for part in _parts(path_of(path, rank)):
            attempt = _nearest(attempts, part.began)
            if rank < attempt.world_size:
                attempt.records[rank] = part.records
    _warn_of_missing(path, attempts)
    return attempts


@dataclass
class _Part:
    """What one rank wrote in one attempt."""

    began: float
    world_size: int
    records: memoryview


def _parts(path: str) -> list[_Part]:
    data = read_own(path, _MAX_NBYTES)
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
    parts = []
    for start, stop in itertools.pairwise([*starts, whole]):
        attempt = memoryview(data)[start * _SIZE : stop * _SIZE]
        world_size, began = check_begin(path, attempt[:_SIZE])
        # After a machine crash the file may end in zeros: space was allocated, but the last records were not written.
        used = len(bytes(attempt).rstrip(b"\0"))
        records = attempt[_SIZE : -(-used // _SIZE) * _SIZE]
        check_records(path, records)
        parts.append(_Part(began, world_size, records))
    return parts


def _other_ranks(path: str) -> list[int]:
    folder, name = os.path.split(os.path.abspath(path))
    named = (re.fullmatch(re.escape(name) + r"\.rank([1-9]\d*)", entry) for entry in os.listdir(folder))
    return sorted(int(match[1]) for match in named if match)


def _nearest(attempts: list[Attempt], at: float) -> Attempt:
    """The ranks of an attempt begin within seconds of each other, perhaps on machines whose clocks differ a little."""
    index = bisect.bisect([attempt.began for attempt in attempts], at)
    return min(attempts[max(0, index - 1) : index + 1], key=lambda attempt: abs(attempt.began - at))


def _warn_of_missing(path: str, attempts: list[Attempt]) -> None:
    there = {rank for attempt in attempts for rank in attempt.records}
    missing = sorted(set(range(max(attempt.world_size for attempt in attempts))) - there)
    if missing:
        ranks = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} ranks, the first is {missing[0]}"
        warnings.warn(
            f"no metrics of {ranks}: metrics with reduce= are combined over the other ranks only. Put the files of all "
            f"hosts ({path_of(os.path.basename(path), missing[0])} ...) into one folder",
            stacklevel=3,
        )
