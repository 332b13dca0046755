"""Parses the bytes of a metrics pipe into names and records; the bytes may be cut anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbddp import wire
from nbddp.shown import Shown, ShownReader

RECORD_DTYPE = np.dtype(
    [("kind", "u1"), ("op", "u1"), ("id", "<u2"), ("counted", "u1"), ("unused", "V3")]
    + [("weight", "<f8"), ("step", "<i8"), ("value", "<f8"), ("time", "<f8")]
)


class RankReader:
    """Turns the raw bytes of one rank's metrics pipe back into names and records."""

    def __init__(self) -> None:
        self._rest = b""
        self._names: dict[int, str] = {}
        self._pieces: dict[int, bytes] = {}  # by id, of names that are not complete yet
        self._shown = ShownReader()

    def feed(self, data: bytes) -> npt.NDArray[Any]:
        data = self._rest + data
        whole = len(data) // wire.RECORD.size * wire.RECORD.size
        self._rest = data[whole:]
        records: npt.NDArray[Any] = np.frombuffer(data, dtype=RECORD_DTYPE, count=whole // wire.RECORD.size)
        for i in np.flatnonzero(records["kind"] == wire.KIND_NAME).tolist():
            _, more, ident, piece = wire.NAME_PIECE.unpack_from(data, i * wire.RECORD.size)
            text = self._pieces.pop(ident, b"") + piece
            if more:
                self._pieces[ident] = text
            else:
                self._names[ident] = text.rstrip(b"\0").decode("utf-8", "replace")
        return records

    def shown(self, records: npt.NDArray[Any]) -> list[Shown]:
        """What ``show()`` has sent, as far as it is complete with these records of :meth:`feed`."""
        pieces = records[records["kind"] == wire.KIND_SHOWN]
        return self._shown.feed(pieces.view(np.uint8).reshape(-1, wire.RECORD.size)) if len(pieces) else []

    def name(self, ident: int) -> str:
        return self._names[ident]
