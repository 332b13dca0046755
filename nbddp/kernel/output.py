"""What a rank has printed: the beginning of its order, and the newest bytes, with offsets that count from its start."""

import sys

from nbddp.text import fold

_FIRST_BYTES = 256 << 10
_KEPT_BYTES = 4 << 20


class Output:
    """The output of a rank; that of an order lies between two offsets. Any thread may read it."""

    def __init__(self) -> None:
        self._parts = 0, bytearray()  # how much is no longer kept, and what is
        self._first = 0, bytearray()  # where the order began, and its first bytes

    @property
    def size(self) -> int:
        """How much the rank has printed so far."""
        dropped, kept = self._parts
        return dropped + len(kept)

    def begin_order(self) -> int:
        """Keep what comes first from here on. Returns the offset."""
        self._first = self.size, bytearray()
        return self.size

    def add(self, data: bytes) -> None:
        dropped, kept = self._parts
        kept += data
        self._first[1].extend(data[: max(0, _FIRST_BYTES - len(self._first[1]))])
        if len(kept) > 2 * _KEPT_BYTES:
            self._parts = dropped + len(kept) - _KEPT_BYTES, kept[-_KEPT_BYTES:]

    def text(self, begin: int = 0, end: int = sys.maxsize) -> str:
        """Return what was printed between two offsets, as a terminal shows it."""
        (dropped, kept), (at, first) = self._parts, self._first
        head = bytes(first[begin - at : max(0, end - at)]) if begin >= at and begin < dropped else b""
        begin += len(head)
        tail, missing = bytes(kept[max(0, begin - dropped) : max(0, end - dropped)]), min(end, dropped) - begin
        if missing <= 0:
            return _folded(head + tail)
        dropped_here = f"[{'' if head else 'the first '}{missing:,} bytes were dropped]"
        return "\n".join([*([_folded(head).rstrip("\n")] if head else []), dropped_here, _folded(tail)])


def _folded(data: bytes) -> str:
    return fold(data.decode("utf-8", "replace"))
