"""Kernel side. What the ranks print: whole lines by rank, progress bars folded, memory bounded."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import tempfile
import threading

from nbddp.wire import fold

KEPT_BYTES = 4 << 20  # per rank, once the run is over; while it goes on the whole is in the rank's file
_TAKE_BYTES = 64 << 10
_BEHIND_BYTES = 128 << 10  # a reader further behind than this skips to the end


def open_output() -> int:
    """A file for one rank's output: no name, no size limit but the disk's; appended to by the rank."""
    with tempfile.TemporaryFile() as file:
        fd = os.dup(file.fileno())
    # The rank, its children and C code share this flag through the fd: no write lands on another.
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


class RankOutput:
    """The output of one rank, from the kernel's end of its file.

    ``text()`` is everything while the file is open, and its newest part after ``close()``.
    """

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        self._lock = threading.Lock()
        self._taken = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._kept = ""
        self._untaken = ""
        self._end = (0, b"")  # once closed: the file's size, and its last bytes

    def fileno(self) -> int:
        """The file's descriptor, for the rank that is to print into it."""
        assert self._fd is not None, "the run is over"
        return self._fd

    def note(self, line: str) -> None:
        """A line of our own among the rank's."""
        self.append(f"[{line}]\n")

    def append(self, lines: str) -> None:
        """Whole lines after what the rank has printed; lost, as its own, where the disk is full."""
        size = os.fstat(self.fileno()).st_size
        unfinished = size > 0 and os.pread(self.fileno(), 1, size - 1) != b"\n"
        with contextlib.suppress(OSError):
            os.write(self.fileno(), f"{chr(10) * unfinished}{lines}".encode())

    def take(self) -> str:
        """What came since the last call, at most 64 KiB at a time; ``""`` when there is nothing new."""
        with self._lock:
            if self._fd is None:
                text, self._untaken = self._untaken, ""
                return text
            return self._take()

    def since(self, position: int, limit: int) -> tuple[str, int, bool]:
        """At most ``limit`` bytes from this position on, for a reader beside :meth:`take`.

        Returns:
            the text, the position after it, and whether it follows on: a reader too far behind is taken to the end.
        """
        with self._lock:
            size = os.fstat(self._fd).st_size if self._fd is not None else self._end[0]
            follows = 0 <= size - position <= _BEHIND_BYTES
            if not follows:
                position = max(0, size - limit)
            data = self._bytes_at(position, limit)
        # A character cut in two waits for its other half.
        text, used = codecs.utf_8_decode(data, "replace", False)
        return text, position + used, follows

    def _bytes_at(self, position: int, count: int) -> bytes:
        if self._fd is not None:
            return os.pread(self._fd, count, position)
        size, last = self._end
        start = max(0, position - (size - len(last)))
        return last[start : start + count]

    def text(self) -> str:
        """Everything printed, folded; after the end of the run its newest 4 MiB."""
        with self._lock:
            return fold(self._read(0)) if self._fd is not None else self._kept

    def last_lines(self, count: int) -> str:
        """The newest lines, folded."""
        with self._lock:
            text = self._read(-64 << 10) if self._fd is not None else self._kept
        return "\n".join(fold(text).rstrip("\n").split("\n")[-count:])

    def close(self) -> None:
        """The rank is gone: keep the newest part, give up the file."""
        with self._lock:
            if self._fd is None:
                return
            size = os.fstat(self._fd).st_size
            self._end = (size, os.pread(self._fd, _BEHIND_BYTES, max(0, size - _BEHIND_BYTES)))
            text = fold(self._read(-KEPT_BYTES))
            dropped = size - KEPT_BYTES
            self._kept = f"[{dropped:,} older bytes are no longer kept]\n{text}" if dropped > 0 else text
            self._untaken = (
                "".join(iter(self._take, "")) + self._decoder.decode(b"", final=True)
                if size - self._taken < KEPT_BYTES
                else self._kept
            )
            os.close(self._fd)
            self._fd = None

    def _take(self) -> str:
        assert self._fd is not None
        data = os.pread(self._fd, _TAKE_BYTES, self._taken)
        self._taken += len(data)
        return self._decoder.decode(data)

    def _read(self, start: int) -> str:
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        start = max(0, size + start) if start < 0 else start
        chunks = []
        while start < size:
            chunk = os.pread(self._fd, size - start, start)
            if not chunk:
                break
            chunks.append(chunk)
            start += len(chunk)
        return b"".join(chunks).decode("utf-8", "replace")


def labelled(outputs: list[RankOutput], rank: int | None) -> str:
    """One rank's text, or every rank's with ``[rank N]`` before each line."""
    if rank is not None:
        return outputs[rank].text()
    lines = []
    for number, output in enumerate(outputs):
        text = output.text()
        lines += [f"[rank {number}] {line}" for line in text.rstrip("\n").split("\n")] if text else []
    return "\n".join(lines) + "\n" if lines else ""
