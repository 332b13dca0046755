"""Frames on a pipe between two hosts. A frame is a header in JSON and a body of bytes; nothing is pickled.

    [length of header][length of body][header][body]

The pipe passes through other programs: ``ssh`` or ``srun``, and a login shell that may print a greeting. So the remote
side begins with a mark, and everything before the mark is ignored as noise.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import queue
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nbddp.latch import Latch, start_thread

MARK = b"\x00nbddp frames 1\n"
BEATS = 0.2  # a beat is due after this part of the heartbeat timeout
SETTLE_S = 1.0  # after a suspension of both sides, a beat that is overdue arrives within this time
CHUNK = 1 << 20  # bytes of a block in one frame; between two frames the rest can be dropped
_LENGTHS = struct.Struct(">II")
_MAX_HEADER = 64 << 20
_MAX_BODY = 16 << 20
_MAX_NOISE = 1 << 20
_MAX_COPIED = 64 << 10  # up to this size, copying the body costs less than a second write

Header = dict[str, Any]
EncodedFrame = tuple[bytes, ...]


class ProtocolError(Exception):
    """The bytes on the pipe are not frames."""


def encode(header: Header, body: bytes = b"") -> EncodedFrame:
    """Encode one frame, in pieces that are written one after the other."""
    text = json.dumps(header).encode()
    start = _LENGTHS.pack(len(text), len(body)) + text
    return (start, body) if len(body) > _MAX_COPIED else (start + body,)


def _nbytes(frame: EncodedFrame) -> int:
    return sum(map(len, frame))


class Parser:
    """Turns a stream of bytes, cut anywhere, into frames."""

    def __init__(self, *, after_mark: bool = False) -> None:
        self.noise = b""  # the bytes before the mark
        self._marked = not after_mark
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Header, bytes]]:
        """Yield the frames that these bytes complete.

        Raises:
            ProtocolError: the bytes are not a frame, or there is no mark.
        """
        self._buffer += data
        if not self._marked and not self._find_mark():
            return
        while len(self._buffer) >= _LENGTHS.size:
            header, body = _LENGTHS.unpack_from(self._buffer)
            if header > _MAX_HEADER or body > _MAX_BODY:
                raise ProtocolError(f"a frame of {header:,} and {body:,} bytes")
            whole = _LENGTHS.size + header + body
            if len(self._buffer) < whole:
                return
            with memoryview(self._buffer) as view:
                text, content = bytes(view[_LENGTHS.size : whole - body]), bytes(view[whole - body : whole])
            del self._buffer[:whole]
            try:
                decoded = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ProtocolError(str(error)) from error
            if not isinstance(decoded, dict) or not isinstance(decoded.get("kind"), str):
                raise ProtocolError(f"a header without a kind: {text[:100]!r}")
            yield decoded, content

    def _find_mark(self) -> bool:
        before, mark, after = self._buffer.partition(MARK)
        self.noise = bytes(before)
        if not mark:
            if len(before) > _MAX_NOISE:
                raise ProtocolError(f"{len(before):,} bytes without an answer from nbddp")
            return False
        self._buffer, self._marked = bytearray(after), True
        return True


class BlockFrames:
    """The bytes of a block as frames, read when they are sent, followed by more frames.

    Each header has ``at``, the offset of the piece, and ``nbytes``, the size of the block. The first piece is at 0;
    later pieces that are holes in the block (the parts of a storage that no tensor uses) are left out.

    Attributes:
        progress: called with the number of bytes that have been taken so far.
    """

    def __init__(self, fd: int, nbytes: int, *, then: Sequence[Header] = (), start: int = 0, **header: Any) -> None:
        """
        Args:
            start: offset of the first piece that is sent, unless there is a hole.
        """
        self.progress: Callable[[int], None] = lambda _: None
        self._dropped = False
        self._sent = False
        self._lock = threading.Lock()
        self._then = then
        self._fd = -1
        self._fd = os.dup(fd)  # the owner of the block may close its file descriptor before all is sent
        self._nbytes = nbytes
        self._start = start
        self._header = header

    def __iter__(self) -> Iterator[EncodedFrame]:
        at = self._next_data(self._start) // CHUNK * CHUNK if self._start else 0
        while at < self._nbytes:
            if self._dropped:
                return
            header = {**self._header, "at": at, "nbytes": self._nbytes}
            yield encode(header, os.pread(self._fd, min(CHUNK, self._nbytes - at), at))
            at = self._next_data(at + CHUNK) // CHUNK * CHUNK
            self.progress(min(at, self._nbytes))
        with self._lock:
            self._sent = not self._dropped
        if self._sent:
            yield from map(encode, self._then)

    def _next_data(self, at: int) -> int:
        """Return the offset of the next data that is not a hole; ``at`` itself where the system cannot tell."""
        try:
            return os.lseek(self._fd, at, os.SEEK_DATA)
        except OSError as error:
            return self._nbytes + CHUNK if error.errno == errno.ENXIO else at

    def drop(self) -> bool:
        """Send no more of the block. Returns whether the frames that follow it are dropped, too."""
        with self._lock:
            self._dropped = True
            return not self._sent

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class Sender:
    """Sends frames on its own thread, so that callers never wait for a slow or broken pipe; sends beats when idle.

    Attributes:
        backlog: bytes that are queued.
        beat_s: idle time before a beat.
    """

    def __init__(self, fd: int, beat_s: float, beat: Callable[[], Header], name: str) -> None:
        self.backlog = 0
        self._fd = fd
        self.beat_s = beat_s
        self._beat = beat
        self._queue: queue.SimpleQueue[tuple[int, Iterable[EncodedFrame]] | None] = queue.SimpleQueue()
        self._first: collections.deque[tuple[Header, EncodedFrame]] = collections.deque()
        self._lock = threading.Lock()
        self._over = Latch()
        start_thread(self._run, name, lambda _: self._over.open())

    def send(self, header: Header, body: bytes = b"") -> None:
        """Queue one frame."""
        frame = self._encoded(header, body)
        self._queue.put((_nbytes(frame), (frame,)))

    def send_first(self, header: Header, body: bytes = b"") -> None:
        """Queue one frame ahead of those from :meth:`send` and :meth:`send_all`, also between two pieces of a block."""
        self._first.append((header, self._encoded(header, body)))
        self.wake()

    def wake(self) -> None:
        """Have the thread look for frames of :meth:`send_first`, and at ``beat_s``."""
        self._queue.put((0, ()))

    def drop_first(self, kind: str) -> None:
        """Drop the frames of this kind that wait ahead of others, except the newest of each rank."""
        waiting = []
        with contextlib.suppress(IndexError):  # the sender's thread takes frames, too
            while True:
                waiting.append(self._first.popleft())
        newest = {header["rank"]: i for i, (header, _) in enumerate(waiting) if header["kind"] == kind}
        for i, (header, frame) in enumerate(waiting):
            if header["kind"] == kind and newest[header["rank"]] != i:
                self._subtract(_nbytes(frame))
            else:
                self._first.append((header, frame))
        self.wake()

    def _encoded(self, header: Header, body: bytes) -> EncodedFrame:
        frame = encode(header, body)
        with self._lock:
            self.backlog += _nbytes(frame)
        return frame

    def send_all(self, frames: Iterable[EncodedFrame]) -> None:
        """Queue frames that are made when it is their turn."""
        self._queue.put((0, frames))

    def close(self, timeout_s: float) -> None:
        """Send the queued frames, for at most ``timeout_s``, and end the thread."""
        self._queue.put(None)
        self._over.wait(timeout_s)

    def _run(self) -> None:
        try:
            while True:
                try:
                    item = self._queue.get(timeout=self.beat_s)
                except queue.Empty:
                    item = 0, (encode(self._beat()),)
                self._write_first()
                if item is None:
                    return
                self._write_all(*item)
                item = None  # a payload's block is not kept while this thread waits for more
        except (OSError, ValueError):  # the pipe is broken: the reader of the other pipe notices that as well
            return
        finally:
            self._over.open()

    def _write_all(self, nbytes: int, frames: Iterable[EncodedFrame]) -> None:
        for frame in frames:
            self._write(frame)
            self._write_first()
        self._subtract(nbytes)

    def _write_first(self) -> None:
        for _ in range(len(self._first)):  # later arrivals must wait, or a block would never be finished
            try:
                _, frame = self._first.popleft()
            except IndexError:  # drop_first() has taken it
                return
            self._write(frame)
            self._subtract(_nbytes(frame))

    def _subtract(self, nbytes: int) -> None:
        with self._lock:
            self.backlog -= nbytes

    def _write(self, frame: EncodedFrame) -> None:
        for piece in frame:
            view = memoryview(piece)
            while view:
                view = view[os.write(self._fd, view) :]
