"""Real files with bytes changed, as a disk, a network or a stranger may leave them; and what loading one may do."""

from __future__ import annotations

import contextlib
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import nbddp

MOST_NBYTES = 512 << 20  # of address space that one load may take
MOST_CPU_S = 5.0

_HUGE = st.sampled_from([2**8, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**33, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
_NUMBERS = _HUGE.map(lambda number: struct.pack("<Q", number)) | st.floats().map(lambda x: struct.pack("<d", x))


class TooLong(BaseException):
    """A load that has used up its time."""


@st.composite
def mutated(draw: st.DrawFn, data: bytes, unit: int = 1) -> bytes:
    """The bytes after one to three changes.

    Args:
        unit: size of the file's records; half of the changes begin at one and are of whole ones.
    """
    for _ in range(draw(st.integers(1, 3))):
        data = _changed(draw, data, draw(st.sampled_from([1, unit])))
    return data


def _changed(draw: st.DrawFn, data: bytes, unit: int) -> bytes:
    start, stop = _span(draw, data, unit)
    before, span, after = data[:start], data[start:stop], data[stop:]
    other = draw(st.integers(0, len(after) // unit)) * unit
    how: dict[str, Callable[[], bytes]] = {
        "flip": lambda: _flipped(draw, data),
        "overwrite": lambda: _overwritten(data, start, draw(st.binary(min_size=1, max_size=16))),
        "number": lambda: _overwritten(data, draw(st.integers(0, len(data) // 8)) * 8, draw(_NUMBERS)),
        "number anywhere": lambda: _overwritten(data, start, draw(_NUMBERS)),
        "number at the end": lambda: _overwritten(data, len(data) - draw(st.integers(1, 64)), draw(_NUMBERS)),
        "zeros": lambda: before + bytes(len(span)) + after,
        "cut out": lambda: before + after,
        "cut off": lambda: before,
        "insert": lambda: before + draw(st.binary(min_size=1, max_size=48)) + span + after,
        "twice": lambda: before + span + span + after,
        "swap": lambda: before + after[:other] + span + after[other:],
        "noise": lambda: draw(st.binary(max_size=200)),
    }
    return how[draw(st.sampled_from(sorted(how)))]()


def _span(draw: st.DrawFn, data: bytes, unit: int) -> tuple[int, int]:
    count = len(data) // unit
    start = draw(st.integers(0, count))
    return start * unit, min(count, start + draw(st.integers(1, 8) | st.integers(1, max(1, count)))) * unit


def _flipped(draw: st.DrawFn, data: bytes) -> bytes:
    if not data:
        return data
    at, bit = draw(st.integers(0, len(data) - 1)), draw(st.integers(0, 7))
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def _overwritten(data: bytes, at: int, new: bytes) -> bytes:
    at = max(0, at)
    return data[:at] + new + data[at + len(new) :]


def loaded(load: Callable[[], Any], *names: object) -> Any:
    """What it gives, or the one NbddpError that it may raise, which names one of these and a reason."""
    try:
        with bounded():
            return load()
    except nbddp.NbddpError as error:
        told = str(error)
        assert any(str(name) in told for name in names), told
        assert len(told) < 2000
        return error


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Allocations beyond the limit fail with MemoryError; what computes for longer gets TooLong."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = signal.signal(signal.SIGVTALRM, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_NBYTES, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def _too_long(*_: object) -> None:
    raise TooLong
