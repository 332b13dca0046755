"""Holds the output of the ranks: by rank, with progress bars folded, in bounded memory."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import tempfile
import threading

from nbddp.text import fold

KEPT_BYTES = 4 << 20  # per rank, once the run is over; until then all of it is in the rank's file
_TAKE_BYTES = 64 << 10
_MAX_LAG_BYTES = 128 << 10  # a reader further behind than this skips to the end


def open_output() -> int:
    """Open a file without a name for one rank's output, to which the rank appends."""
    with tempfile.TemporaryFile() as file:
        fd = os.dup(file.fileno())
    # The rank, its children and C code share this flag through the fd, so that no write overwrites another.
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


class RankOutput:
    """The output of one rank, read from its file until ``close()``, which keeps the newest part."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        self._lock = threading.Lock()
        self._taken = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._kept = ""
        self._untaken = ""
        self._size, self._tail = 0, b""  # the size and the last bytes of the closed file

    def fileno(self) -> int:
        """Return the file descriptor that the rank prints to."""
        assert self._fd is not None, "the run is over"
        return self._fd

    def note(self, line: str) -> bool:
        """Append a line of nbddp's own to the rank's output. Returns False if the run is over."""
        return self.append(f"[{line}]\n")

    def append(self, lines: str) -> bool:
        """Append whole lines to the rank's output; they are lost, like the rank's own, if the disk is full.

        Returns:
            False if the run is over.
        """
        with self._lock:
            if self._fd is None:
                return False
            size = os.fstat(self._fd).st_size
            unfinished = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
            with contextlib.suppress(OSError):
                os.write(self._fd, f"{chr(10) * unfinished}{lines}".encode())
            return True

    def take(self) -> str:
        """Return the output since the last call, at most 64 KiB at a time; ``""`` if there is none."""
        with self._lock:
            if self._fd is None:
                text, self._untaken = self._untaken, ""
                return text
            return self._take()

    def since(self, position: int, limit: int) -> tuple[str, int, bool]:
        """Return at most ``limit`` bytes from this position, for a reader independent of :meth:`take`.

        Returns:
            the text, the position after it, and whether nothing was skipped: a reader too far behind skips to the end.
        """
        with self._lock:
            size = os.fstat(self._fd).st_size if self._fd is not None else self._size
            follows = 0 <= size - position <= _MAX_LAG_BYTES
            if not follows:
                position = max(0, size - limit)
            if self._fd is not None:
                data = os.pread(self._fd, limit, position)
            else:
                start = max(0, position - (size - len(self._tail)))
                data = self._tail[start : start + limit]
        # A character of which only a part has been written is left for the next call.
        text, used = codecs.utf_8_decode(data, "replace", False)
        return text, position + used, follows

    def text(self) -> str:
        """Return the whole output, folded; after the end of the run its newest 4 MiB."""
        with self._lock:
            return fold(self._read(0)) if self._fd is not None else self._kept

    def last_lines(self, count: int) -> str:
        """Return the newest lines, folded."""
        with self._lock:
            text = self._read(-64 << 10) if self._fd is not None else self._kept
        return "\n".join(fold(text).rstrip("\n").split("\n")[-count:])

    def close(self) -> None:
        """Keep the newest part of the output and close the file, after the rank has ended."""
        with self._lock:
            if self._fd is None:
                return
            size = os.fstat(self._fd).st_size
            self._size, self._tail = size, os.pread(self._fd, _MAX_LAG_BYTES, max(0, size - _MAX_LAG_BYTES))
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
    """Return one rank's output, or that of all ranks with ``[rank N]`` before each line."""
    if rank is not None:
        return outputs[rank].text()
    lines = []
    for number, output in enumerate(outputs):
        text = output.text()
        lines += [f"[rank {number}] {line}" for line in text.rstrip("\n").split("\n")] if text else []
    return "\n".join(lines) + "\n" if lines else ""
