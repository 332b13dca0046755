"""A block: one file in memory, without a name, that the notebook and all ranks of a machine map."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from nbddp.payload import huge_pages

MAP_FROM_NBYTES = 1 << 20  # below this a copy is cheaper than a mapping, and does not keep the whole block alive


class Block:
    """Owns the descriptor of a block. It pickles as its bytes, so it can also leave the machine."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes

    @classmethod
    def of(cls, parts: Sequence[tuple[int, memoryview]], nbytes: int) -> Block:
        """Write each part at its offset. ``pwrite`` fills a new file at the speed of memcpy; a mapping takes longer."""
        fd = huge_pages.open_file() if nbytes >= huge_pages.FROM_NBYTES else None
        block = cls(os.memfd_create("nbddp", os.MFD_CLOEXEC) if fd is None else fd, nbytes)
        os.ftruncate(block.fd, nbytes)
        for offset, data in parts:
            while data.nbytes:
                done = os.pwrite(block.fd, data, offset)
                offset, data = offset + done, data[done:]
        return block

    def view(self) -> memoryview:
        """Return the bytes, private and writable; any view of a part keeps them alive, also when this is closed."""
        if self.nbytes >= MAP_FROM_NBYTES:
            # Not mmap.mmap, which keeps a duplicate of the descriptor open as long as the mapping.
            mapped = torch.from_file(f"/proc/self/fd/{self.fd}", shared=False, size=self.nbytes, dtype=torch.uint8)
            return mapped.numpy().data
        return memoryview(bytearray(os.pread(self.fd, self.nbytes, 0)))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (bytes(self.view()),)


def _rebuilt(data: bytes) -> Block:
    return Block.of([(0, memoryview(data))], len(data))
