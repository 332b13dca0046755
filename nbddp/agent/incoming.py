"""A payload while it arrives in pieces; other threads may read the pieces that are there, to pass them on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

from nbddp import payload
from nbddp.hosts.frames import CHUNK
from nbddp.payload.block import write_at


class Incoming:
    """A block that is written piece by piece, in order, by one thread at a time.

    Attributes:
        fd: file descriptor of the block, open as long as this object lives.
        nbytes: of the whole block.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = -1
        self.fd = payload.open_block("payload", nbytes)
        os.ftruncate(self.fd, nbytes)  # before the first write: Linux chooses the page size by the file's size
        self._offsets: list[int] = []  # of the pieces that have arrived
        self._complete = False
        self._changed = threading.Condition()

    @property
    def next_at(self) -> int:
        """Offset behind the last piece; what follows may begin later, since holes are left out."""
        return self._offsets[-1] + CHUNK if self._offsets else 0

    def write(self, piece: bytes | memoryview, at: int) -> None:
        """Write the next piece."""
        write_at(self.fd, piece, at)
        with self._changed:
            self._offsets.append(at)
            self._changed.notify_all()

    def finish(self) -> None:
        """Note that there are no more pieces."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def pieces(self, start: int, wait_s: float) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes of each piece at ``start`` or later, as it arrives, until the last one.

        Where nothing arrives for ``wait_s``, a pair without bytes is yielded.
        """
        index = 0
        while True:
            with self._changed:
                if index == len(self._offsets) and not self._complete:
                    self._changed.wait(wait_s)
                is_there, is_last = index < len(self._offsets), self._complete
            if is_there:
                at = self._offsets[index]
                index += 1
                if at >= start:
                    yield at, os.pread(self.fd, min(CHUNK, self.nbytes - at), at)
            elif is_last:
                return
            else:
                yield 0, b""

    def empty(self) -> None:
        """Free the memory of the block."""
        os.ftruncate(self.fd, 0)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
