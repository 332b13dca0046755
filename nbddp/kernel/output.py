"""What a rank has printed: the newest bytes, with offsets that count from its beginning."""

from __future__ import annotations

import sys

from nbddp.text import fold

_KEPT_BYTES = 4 << 20


class Output:
    """The output of a rank; that of an order lies between two offsets. Any thread may read it."""

    def __init__(self) -> None:
        self._parts = 0, bytearray()  # how much is no longer kept, and what is

    @property
    def size(self) -> int:
        """How much the rank has printed so far."""
        dropped, kept = self._parts
        return dropped + len(kept)

    def add(self, data: bytes) -> None:
        dropped, kept = self._parts
        kept += data
        if len(kept) > 2 * _KEPT_BYTES:
            self._parts = dropped + len(kept) - _KEPT_BYTES, kept[-_KEPT_BYTES:]

    def text(self, begin: int = 0, end: int = sys.maxsize) -> str:
        """Return what was printed between two offsets, as a terminal shows it."""
        dropped, kept = self._parts
        raw = bytes(kept[max(0, begin - dropped) : max(0, end - dropped)])
        text = fold(raw.decode("utf-8", "replace"))
        missing = min(end, dropped) - begin
        return f"[the first {missing:,} bytes were dropped]\n{text}" if missing > 0 else text
