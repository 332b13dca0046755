"""A rank's records as ``helpers.log`` writes them (msgpack), and the files that keep them.

In a file, a head begins what one start of one rank has written. A job's ranks have a file each: PATH, PATH.rank1, ...
"""

import bisect
import fcntl
import glob
import os
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import msgpack
import numpy as np

from nbddp.errors import LaunchError
from nbddp.history.points import RECORD
from nbddp.text import short

MAX_STEP = 1 << 53  # of both signs: beyond it a chart's numbers, which are doubles, skip some
AUTOLOG = "heard, not logged"  # in place of an op: a curve that log() of the same name replaces
OPS = (None, "mean", "sum", "min", "max", AUTOLOG)
_MARK = b"\xc1nbddp metrics 1\n"  # msgpack begins nothing with 0xC1
_HEAD_BYTES = 4096
_MAX_RANKS, _MAX_STARTS = 1 << 16, 10_000  # the second of a rank; each takes a millisecond


class RecordReader:
    """Decodes one rank's records, whose bytes arrive cut anywhere."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(max_buffer_size=0)

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield what is complete: a list for each ``log()``, a dict for anything else."""
        self._unpacker.feed(data)
        yield from self._unpacker


@dataclass(frozen=True)
class Start:
    """One start of one rank.

    Attributes:
        began: unix time; the ranks that start together may differ by seconds.
        reason: of the restart.
        broken_off: not every rank has reached the last points.
        first_step: that the rank logged, if a history has saved it.
    """

    rank: int
    world_size: int
    began: float
    reason: str = ""
    broken_off: bool = False
    first_step: int | None = None

    def head(self) -> bytes:
        return _MARK + bytes(msgpack.packb(astuple(self)))


def open_file(path: str | None, rank: int, world_size: int) -> int:
    """Open the file of a job's rank to append records, after those of its earlier starts. None: they go nowhere.

    Raises:
        LaunchError: another process is writing it, or it is something else.
    """
    if path is None:
        return os.open(os.devnull, os.O_WRONLY)
    path += f".rank{rank}" if rank else ""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LaunchError(f"--metrics: another process is writing to {path}; give each job its own file") from None
    except OSError:
        pass  # the file system has no locks
    if os.pread(fd, len(_MARK), 0) not in (b"", _MARK):
        raise LaunchError(f"--metrics: {path} exists and isn't a metrics file; choose another name")
    os.write(fd, Start(rank, world_size, time.time(), time.strftime("restarted %Y-%m-%d %H:%M")).head())
    return fd


def read(path: str | os.PathLike[str]) -> list[dict[int, tuple[Start, bytes]]]:
    """By generation and rank, what the files of a job or a saved history hold. Raises OSError and ValueError."""
    path = os.fspath(path)
    starts = [each for name in [path, *glob.glob(f"{glob.escape(path)}.rank[1-9]*")] for each in _starts(name)]
    generations = [{0: each} for each in sorted(starts, key=lambda each: each[0].began) if each[0].rank == 0]
    if not generations:
        raise ValueError("it has no records from rank 0")
    times = [each[0][0].began for each in generations]
    for start, data in starts:  # of a generation that began at the same time, by the clocks of several machines
        after = bisect.bisect(times, start.began)
        nearest = min(range(max(0, after - 1), min(after + 1, len(times))), key=lambda i: abs(times[i] - start.began))
        generations[nearest][start.rank] = start, data
    return generations


def checked(data: bytes) -> Iterator[Any]:
    """The records of a file. Raises an exception if nbddp writes no such record."""
    for record in RecordReader().feed(data):
        if record == 0:  # the machine crashed: the file had grown, but what was in it had not been written
            return
        if isinstance(record, list):
            _, step, counted, reduce, weight, values = record
            fits = type(step) is int and abs(step) <= MAX_STEP and type(counted) is bool and weight >= 0
            fits = fits and reduce in OPS and all(type(n) is str and type(v) is float for n, v in values.items())
        elif "metrics" in record:
            ranks = [each for _, by_rank in record["metrics"] for each in by_rank]
            fits = all(type(name) is str and by_rank for name, by_rank in record["metrics"])
            fits = fits and all(type(rank) is int and type(ops) is list and ops for rank, ops in ranks)
            fits = fits and {op for _, ops in ranks for op in ops} <= set(OPS)
        elif "rows" in record:
            rows, first = np.frombuffer(record["rows"], RECORD), record["first"]
            fits = len(rows) > 0 and (abs(rows["step"]) <= MAX_STEP).all() and (rows["weight"] >= 0).all()
            fits = fits and type(first) is int and abs(first) <= MAX_STEP
            fits = fits and type(record["name"]) is str and bool(record["ops"]) and set(record["ops"]) <= set(OPS)
        else:
            fits = type(record["time"]) is float
        if not fits:
            raise ValueError(f"it has a record that nbddp didn't write: {short(record)}")
        yield record


def _starts(path: str) -> Iterator[tuple[Start, bytes]]:
    with open(path, "rb") as file:
        before, *parts = file.read().split(_MARK)
    if before or not parts:
        raise ValueError("it wasn't written by nbddp")
    for part in parts:
        unpacker = msgpack.Unpacker()
        unpacker.feed(part[:_HEAD_BYTES])
        start = Start(*unpacker.unpack())
        if not 0 <= start.rank < start.world_size <= _MAX_RANKS:
            raise ValueError(f"it has rank {start.rank} of {start.world_size}")
        if len(parts) > _MAX_STARTS * start.world_size:
            raise ValueError(f"it has {len(parts):,} starts")
        yield start, part[unpacker.tell() :]
