"""What a rank has printed: the newest bytes, with offsets that count from its beginning."""

from __future__ import annotations

import sys

from nbddp.text import fold

_KEPT_BYTES = 4 << 20


class Output:
    """The output of a rank. A call is a pair of offsets."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._dropped = 0

    @property
    def size(self) -> int:
        """How much the rank has printed so far."""
        return self._dropped + len(self._kept)

    def add(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > 2 * _KEPT_BYTES:
            self._dropped += len(self._kept) - _KEPT_BYTES
            del self._kept[:-_KEPT_BYTES]

    def text(self, begin: int = 0, end: int = sys.maxsize) -> str:
        """Return what was printed between two offsets, as a terminal shows it."""
        raw = bytes(self._kept[max(0, begin - self._dropped) : max(0, end - self._dropped)])
        text = fold(raw.decode("utf-8", "replace"))
        missing = min(end, self._dropped) - begin
        return f"[{missing:,} older bytes are no longer kept]\n{text}" if missing > 0 else text
