"""A block: one file in memory, without a name, that the notebook and all ranks of a machine map."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from nbddp.payload import huge_pages

MAP_FROM_NBYTES = 1 << 20  # below this a copy is cheaper than a mapping, and does not keep the whole block alive
_CHUNK = 4 << 20  # bytes
_MOST_THREADS = 4


class Block:
    """Owns the descriptor of a block. It pickles as its bytes, so it can also leave the machine."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes

    @classmethod
    def of(cls, parts: Sequence[tuple[int, memoryview]], nbytes: int) -> Block:
        """Write each part at its offset."""
        fd = huge_pages.open_file() if nbytes >= huge_pages.FROM_NBYTES else None
        block = cls(os.memfd_create("nbddp", os.MFD_CLOEXEC) if fd is None else fd, nbytes)
        try:
            block._write(parts, several=fd is not None)
        except BaseException:  # an interrupt's traceback would keep it open
            block.close()
            raise
        return block

    def _write(self, parts: Sequence[tuple[int, memoryview]], *, several: bool) -> None:
        """``pwrite`` is the fastest way, but two of them wait for each other: several threads copy into a mapping."""
        os.ftruncate(self.fd, self.nbytes)
        chunks = iter([(at + i, data[i : i + _CHUNK]) for at, data in parts for i in range(0, data.nbytes, _CHUNK)])
        with ThreadPoolExecutor(_MOST_THREADS, "nbddp-copy") as pool:
            try:
                helpers = min(torch.get_num_threads(), _MOST_THREADS) - 1 if several else 0
                copies = [pool.submit(_copy, self._mapped(shared=True), chunks) for _ in range(helpers)]
                for offset, data in chunks:
                    while data.nbytes:
                        done = os.pwrite(self.fd, data, offset)
                        offset, data = offset + done, data[done:]
            finally:
                collections.deque(chunks, maxlen=0)  # interrupted: nobody begins another
        for copy in copies:
            copy.result()

    def _mapped(self, *, shared: bool) -> torch.Tensor:
        # Not mmap.mmap, which keeps a duplicate of the descriptor open as long as the mapping.
        return torch.from_file(f"/proc/self/fd/{self.fd}", shared=shared, size=self.nbytes, dtype=torch.uint8)

    def view(self) -> memoryview:
        """Return the bytes, private and writable; any view of a part keeps them alive, also when this is closed."""
        if self.nbytes >= MAP_FROM_NBYTES:
            return self._mapped(shared=False).numpy().data
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


def _copy(mapped: torch.Tensor, chunks: Iterator[tuple[int, memoryview]]) -> None:
    into = mapped.numpy()
    for offset, data in chunks:
        np.copyto(into[offset : offset + data.nbytes], np.frombuffer(data, np.uint8))
