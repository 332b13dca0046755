"""What ``show()`` sends to the notebook: an image or a piece of HTML of one step, and its records on a metrics pipe."""

from __future__ import annotations

import base64
import os
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nbddp import wire

MAX_BYTES = 256 << 10  # of one image
NAME_CHARS = 120
KINDS = ("image/png", "image/jpeg", "image/svg+xml", "text/html")
_HEAD = struct.Struct("<qIHB")  # step, bytes of the data, bytes of the name, index of the kind
_PIECE = wire.SHOWN_PIECE_BYTES
_MAX_PACKED = MAX_BYTES + _HEAD.size + 4 * NAME_CHARS + _PIECE


@dataclass(frozen=True)
class Shown:
    """An image or a piece of HTML of one step; a notebook displays it.

    Attributes:
        name: the name that it was shown under.
        step: its step.
        kind: ``"image/png"``, ``"image/jpeg"``, ``"image/svg+xml"`` or ``"text/html"``.
        data: the bytes of the file; of SVG and HTML, the text in UTF-8.
    """

    name: str
    step: int
    kind: str
    data: bytes = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whose type is ``kind``."""
        with open(path, "wb") as file:
            file.write(self.data)

    def __repr__(self) -> str:
        return f"<{self.name}, step {self.step:,}: {self.kind}, {len(self.data) / 1000:,.1f} kB>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        is_text = self.kind in ("image/svg+xml", "text/html")
        shown = self.data.decode("utf-8", "replace") if is_text else base64.b64encode(self.data).decode()
        return {self.kind: shown, "text/plain": repr(self)}


def records_of(shown: Shown) -> bytes:
    """The records that carry it on a metrics pipe."""
    name = shown.name.encode("utf-8", "replace")
    packed = _HEAD.pack(shown.step, len(shown.data), len(name), KINDS.index(shown.kind)) + name + shown.data
    count = -(-len(packed) // _PIECE)
    table = np.zeros((count, wire.RECORD.size), np.uint8)
    table[:, 0] = wire.KIND_SHOWN
    table[:-1, 1] = 1  # more pieces follow
    table[:, -_PIECE:] = np.frombuffer(packed.ljust(count * _PIECE, b"\0"), np.uint8).reshape(count, _PIECE)
    return table.tobytes()


class ShownReader:
    """Puts the records of one rank together again."""

    def __init__(self) -> None:
        self._packed = b""  # what has arrived of the next one

    def feed(self, records: npt.NDArray[np.uint8]) -> list[Shown]:
        """What these records complete: of shape (n, 40), all of the kind ``KIND_SHOWN``."""
        found = []
        for part in np.split(records, np.flatnonzero(records[:, 1] == 0) + 1):
            self._packed += part[:, -_PIECE:].tobytes()
            if len(self._packed) > _MAX_PACKED:  # no rank of ours writes this
                self._packed = b""
            elif len(part) and part[-1, 1] == 0:
                shown = _unpacked(self._packed)
                found += [] if shown is None else [shown]
                self._packed = b""
        return found


def _unpacked(packed: bytes) -> Shown | None:
    """None if the bytes are not those of ``records_of``."""
    if len(packed) < _HEAD.size:
        return None
    step, nbytes, name_nbytes, kind = _HEAD.unpack_from(packed)
    name, data = packed[_HEAD.size :][:name_nbytes], packed[_HEAD.size + name_nbytes :][:nbytes]
    if len(data) != nbytes or kind >= len(KINDS):
        return None
    return Shown(name.decode("utf-8", "replace"), step, KINDS[kind], data)
