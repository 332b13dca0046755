"""A block: one file in memory that the notebook and all ranks map.

The file uses huge pages where the system allows them, otherwise it is a ``memfd``. Neither is limited by a container's
64 MB /dev/shm or has a name in a file system.
"""

from __future__ import annotations

import collections
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nbddp.payload import huge_pages

MAP_FROM_NBYTES = 1 << 20  # below this a copy is cheaper than a mapping, and does not keep the whole block alive
_IN_ONE_PIECE_BELOW = 64 << 10  # bytes: one system call takes less time than several
_CHUNK_NBYTES = 4 << 20  # copied by one thread between two calls of keep_going()
_PARALLEL_FROM_NBYTES = 32 << 20
_MAX_THREADS = 4

_Chunks = Iterator[tuple[int, memoryview]]


def open_block(name: str, nbytes: int = 0) -> int:
    """Create an empty block without a name in any file system, and return its file descriptor.

    Args:
        nbytes: the final size, if known. The first large block waits for the file system with huge pages.
    """
    if (fd := huge_pages.open_file(f"nbddp-{name}", nbytes)) is not None:
        return fd
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"nbddp-{name}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def note_call(fd: int) -> None:
    """Note in the block for a call's result that the function is called next.

    A message would wake the notebook kernel, which takes 0.3 to 0.8 ms of each cell on 4 ranks.
    """
    os.ftruncate(fd, 1)


def was_called(fd: int) -> bool:
    """Return whether the function whose result this block is for has been called, or has failed before that."""
    return os.fstat(fd).st_size > 0


def map_block(fd: int, nbytes: int) -> memoryview:
    """The block's bytes, private and writable; any view of a part keeps them alive."""
    if nbytes < MAP_FROM_NBYTES or not can_map():
        copy = bytearray(nbytes)
        read = 0
        while read < nbytes:
            if not (more := os.preadv(fd, [memoryview(copy)[read:]], read)):
                raise EOFError(f"a block of {nbytes} bytes ends after {read}")
            read += more
        return memoryview(copy)
    return storage_bytes(_mapping(fd, nbytes, shared=False))


def can_map() -> bool:
    """Can this system map a block?"""
    return os.path.exists("/proc/self/fd")


def _mapping(fd: int, nbytes: int, *, shared: bool) -> Any:
    """A storage that maps the file. Not mmap.mmap, which keeps a duplicate of the fd open as long as the mapping."""
    return torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", shared=shared, nbytes=nbytes)


def write_at(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of ``data``. ``pwrite`` fills a new memfd at memcpy speed; a shared mapping takes 1.4 times as long."""
    view = memoryview(data).cast("B")
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done:], offset + done)


def fill(fd: int, nbytes: int, parts: Sequence[tuple[int, memoryview]], keep_going: Callable[[], bool]) -> None:
    """Size the block and copy the parts to their offsets: in one piece if it is small, with several threads if large.

    Two ``pwrite`` calls on one file wait for each other, but page faults in its mapping do not. So one thread writes,
    and the others copy into a mapping. On two cores, two threads copy 1 GiB in 0.7 to 0.9 of the time of one.

    Args:
        parts: pairs of offset and bytes, sorted by offset.
        keep_going: copying stops when this returns False.
    """
    if nbytes < _IN_ONE_PIECE_BELOW:
        whole = bytearray(nbytes)
        for offset, data in parts:
            whole[offset : offset + data.nbytes] = data
        return write_at(fd, memoryview(whole), 0)
    chunks = iter(
        [
            (offset + start, data[start : start + _CHUNK_NBYTES])
            for offset, data in parts
            for start in range(0, data.nbytes, _CHUNK_NBYTES)
        ]
    )
    written = sum(data.nbytes for _, data in parts)
    if written < nbytes // 2:
        # Bytes that no tensor uses stay holes. Huge pages would fill them, but a file that grows during the writes
        # has small pages.
        _write(fd, chunks, keep_going)
        return os.ftruncate(fd, nbytes)
    os.ftruncate(fd, nbytes)
    mapped, helpers = None, _helper_threads(fd, written)
    if helpers:
        with contextlib.suppress(RuntimeError):  # this process changed its user, or lacks address space
            mapped = storage_bytes(_mapping(fd, nbytes, shared=True))
    if mapped is None:
        return _write(fd, chunks, keep_going)
    copies = []
    with ThreadPoolExecutor(helpers, "nbddp-copy") as pool:
        try:
            with contextlib.suppress(RuntimeError):  # the system allows no more threads
                for _ in range(helpers):
                    copies.append(pool.submit(_copy, mapped, chunks, keep_going))
            _write(fd, chunks, keep_going)
        finally:
            collections.deque(chunks, maxlen=0)  # after an error the threads must not begin another chunk
    for copy in copies:
        copy.result()
    return None


def write_piece(fd: int, piece: memoryview | bytes, at: int, nbytes: int) -> None:
    """Write one piece of a block that arrives in pieces, in order; the first piece replaces an earlier block.

    Args:
        at: the piece's offset.
        nbytes: the whole block's size, set with the first piece: Linux chooses the page size by the file's size.
    """
    if at == 0:
        os.ftruncate(fd, 0)
        os.ftruncate(fd, nbytes)
    write_at(fd, piece, at)


def _write(fd: int, chunks: _Chunks, keep_going: Callable[[], bool]) -> None:
    for offset, data in chunks:
        if not keep_going():
            return
        write_at(fd, data, offset)


def _copy(mapped: memoryview, chunks: _Chunks, keep_going: Callable[[], bool]) -> None:
    for offset, data in chunks:
        if not keep_going():
            return
        target = np.frombuffer(mapped[offset : offset + data.nbytes], dtype=np.uint8)
        np.copyto(target, np.frombuffer(data, dtype=np.uint8))


def _helper_threads(fd: int, nbytes: int) -> int:
    """The number of threads that copy into a mapping while one writes; with it, at most as many as torch uses.

    0 if the file's memory may be limited: beyond the limit, ``pwrite`` raises an error, but a write to the mapping is
    a SIGBUS.
    """
    if nbytes < _PARALLEL_FROM_NBYTES:
        return 0
    with contextlib.suppress(OSError):
        strict = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
        unlimited = os.fstatvfs(fd).f_blocks == 0  # limited by the machine's memory only
        if unlimited and os.fstat(fd).st_nlink == 0 and not strict:
            return min(torch.get_num_threads(), _MAX_THREADS) - 1
    return 0


@dataclass(frozen=True)
class Place:
    """An area's offset in the block, and the number of the mapping that it is read from.

    Attributes:
        mapping: areas that overlap have different numbers, so that a write to one does not change the others.
    """

    offset: int
    mapping: int = 0


def as_bytes(storage: Any) -> torch.Tensor:
    """A storage as a tensor of uint8 over the same memory."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def storage_bytes(storage: Any) -> memoryview:
    """A CPU storage's memory."""
    return memoryview(as_bytes(storage).numpy())  # type: ignore[arg-type]


def storage_over(view: memoryview) -> torch.UntypedStorage:
    """A CPU storage over the view's memory, which it keeps alive."""
    if not view.nbytes:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
