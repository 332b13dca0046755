"""Blocks are filled by several threads, and hold what one thread would have written."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from nbddp.payload import block

PARTS = [(64, 1000), (2000, 1), (4096, 200_000), (300_001, 77_777), (500_000, 0)]
NBYTES = 500_000


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Few bytes are enough for several threads; the names of those that have written."""
    monkeypatch.setattr(block, "_IN_ONE_PIECE_BELOW", 0)
    monkeypatch.setattr(block, "_CHUNK_NBYTES", 1000)
    monkeypatch.setattr(block, "_PARALLEL_FROM_NBYTES", 0)
    names: set[str] = set()
    for kind in ("_write", "_copy"):
        function = getattr(block, kind)

        def named(*args: object, function=function, kind=kind) -> None:
            names.add(f"{kind} {threading.current_thread().name.rpartition('_')[0]}")
            function(*args)

        monkeypatch.setattr(block, kind, named)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield names
    torch.set_num_threads(before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nbddp-copy")]


def _data() -> tuple[list[tuple[int, memoryview]], bytes]:
    """Parts at their offsets, and the whole block that they make."""
    whole = np.zeros(NBYTES, dtype=np.uint8)
    parts = []
    for offset, size in PARTS:
        data = np.random.default_rng(offset).integers(1, 255, size, dtype=np.uint8)
        whole[offset : offset + size] = data
        parts.append((offset, memoryview(data)))
    return parts, whole.tobytes()


def test_several_threads_fill_a_block_bit_for_bit(threads: set[str]) -> None:
    parts, whole = _data()
    for _ in range(20):
        fd = block.open_block("test")
        block.fill(fd, NBYTES, parts, lambda: True)
        assert os.pread(fd, NBYTES + 1, 0) == whole
        os.close(fd)
    assert threads == {"_write ", "_copy nbddp-copy"}


def test_a_small_block_is_filled_with_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, whole = [(64, memoryview(b"a" * 100)), (300, memoryview(b"b")), (700, memoryview(b""))], bytearray(700)
    whole[64:164], whole[300:301] = b"a" * 100, b"b"
    writes: list[int] = []
    monkeypatch.setattr(block, "write_at", lambda fd, data, offset: writes.append(os.pwrite(fd, data, offset)))
    fd = block.open_block("test")
    block.fill(fd, len(whole), parts, lambda: True)
    assert os.pread(fd, len(whole) + 1, 0) == whole
    assert writes == [len(whole)]
    os.close(fd)


def test_a_file_on_a_disk_is_never_mapped_for_writing(threads: set[str]) -> None:
    """A full disk would be a SIGBUS there, which ends the process, and no error."""
    parts, whole = _data()
    with tempfile.TemporaryFile() as file:
        block.fill(file.fileno(), NBYTES, parts, lambda: True)
        assert os.pread(file.fileno(), NBYTES + 1, 0) == whole
    assert threads == {"_write "}


def test_a_block_is_filled_without_threads_when_none_can_start(
    threads: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    parts, whole = _data()
    fd = block.open_block("test")
    block.fill(fd, NBYTES, parts, lambda: True)
    monkeypatch.undo()
    assert os.pread(fd, NBYTES + 1, 0) == whole
    os.close(fd)
    assert threads == {"_write "}


def test_copying_stops_when_the_block_is_no_longer_wanted(threads: set[str]) -> None:
    looks: list[None] = []

    def keep_going() -> bool:
        looks.append(None)
        return len(looks) <= 50

    parts, whole = _data()
    fd = block.open_block("test")
    block.fill(fd, NBYTES, parts, keep_going)
    written = sum(byte != 0 for byte in os.pread(fd, NBYTES, 0))
    assert 40_000 <= written <= 54_000 < sum(byte != 0 for byte in whole)
    os.close(fd)


@pytest.mark.parametrize("failing", ["write_at", "copyto"])
def test_an_error_in_any_thread_is_raised_and_ends_the_others(
    threads: set[str], failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(*_args: object) -> None:
        failed.set()
        raise OSError("no more")

    def write_nothing(*_args: object) -> None:
        failed.wait(20)  # else one thread may have done all before the other began

    for module, name in ((block, "write_at"), (np, "copyto")):
        monkeypatch.setattr(module, name, fail if name == failing else write_nothing)
    parts, _ = _data()
    fd = block.open_block("test")
    with pytest.raises(OSError, match="no more"):
        block.fill(fd, NBYTES, parts, lambda: True)
    os.close(fd)
