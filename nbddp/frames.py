"""Both ends of a pipe between two hosts. A frame is a head in JSON and a body of bytes; nothing here is a pickle.

    [length of head][length of body][head][body]

Whoever reads it may be on a machine that the writer logged in to, but what lies between are other people's
programs: login shells that greet, ``ssh``, ``srun``. So the far end begins with a mark, and all before it is noise.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import queue
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nbddp.waiting import Latch, start_thread

MARK = b"\x00nbddp frames 1\n"
BEATS = 0.2  # of the heartbeat's time: so often each side is heard
CHUNK = 1 << 20  # of what is large: between two it can be dropped
_LENGTHS = struct.Struct(">II")
_MOST_HEAD = 64 << 20
_MOST_BODY = 16 << 20
_MOST_NOISE = 1 << 20
_COPIED = 64 << 10  # one more copy is cheaper than one more write
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031

Head = dict[str, Any]
Frame = tuple[bytes, ...]


class Garbled(Exception):
    """What came over the pipe are no frames."""


def encode(head: Head, body: bytes = b"") -> Frame:
    """One frame, in pieces that are written one after the other."""
    text = json.dumps(head).encode()
    start = _LENGTHS.pack(len(text), len(body)) + text
    return (start, body) if len(body) > _COPIED else (start + body,)


def _nbytes(frame: Frame) -> int:
    return sum(map(len, frame))


class Parser:
    """Bytes in, frames out, wherever they were cut."""

    def __init__(self, *, after_mark: bool = False) -> None:
        self.noise = b""  # what came before the mark
        self._marked = not after_mark
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Head, bytes]]:
        """The frames that are complete with these bytes.

        Raises:
            Garbled: this is no frame, or there is no mark.
        """
        self._buffer += data
        if not self._marked and not self._find_mark():
            return
        while len(self._buffer) >= _LENGTHS.size:
            head, body = _LENGTHS.unpack_from(self._buffer)
            if head > _MOST_HEAD or body > _MOST_BODY:
                raise Garbled(f"a frame of {head:,} and {body:,} bytes")
            whole = _LENGTHS.size + head + body
            if len(self._buffer) < whole:
                return
            with memoryview(self._buffer) as view:
                text, content = bytes(view[_LENGTHS.size : whole - body]), bytes(view[whole - body : whole])
            del self._buffer[:whole]
            yield _decoded(text), content

    def _find_mark(self) -> bool:
        before, mark, after = self._buffer.partition(MARK)
        if not mark:
            if len(before) > _MOST_NOISE:
                raise Garbled(f"{len(before):,} bytes without an answer from nbddp")
            self.noise = bytes(before)
            return False
        self.noise, self._buffer, self._marked = bytes(before), bytearray(after), True
        return True


def _decoded(text: bytes) -> Head:
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Garbled(str(error)) from error
    if not isinstance(head, dict) or not isinstance(head.get("kind"), str):
        raise Garbled(f"a head without a kind: {text[:100]!r}")
    return head


class BlockFrames:
    """A block's bytes as frames, read when they are sent, and what is to follow them.

    Each head tells ``at``, the offset of the piece, and ``nbytes``, the whole size. The first piece is at 0; later ones
    that are holes in the block (what no tensor sees of its storage) are left out.
    """

    def __init__(self, fd: int, nbytes: int, *, then: Sequence[Head] = (), **head: Any) -> None:
        self._wanted = True
        self._sent = False
        self._lock = threading.Lock()
        self._then = then
        self._fd = -1
        self._fd = os.dup(fd)  # whoever owns the block may close it meanwhile
        self._nbytes = nbytes
        self._head = head

    def __iter__(self) -> Iterator[Frame]:
        at = 0
        while at < self._nbytes:
            if not self._wanted:
                return
            head = {**self._head, "at": at, "nbytes": self._nbytes}
            yield encode(head, os.pread(self._fd, min(CHUNK, self._nbytes - at), at))
            at = self._next_data(at + CHUNK) // CHUNK * CHUNK
        with self._lock:
            self._sent = self._wanted
        if self._sent:
            yield from map(encode, self._then)

    def _next_data(self, at: int) -> int:
        """Where there is something again, from ``at`` on; ``at`` itself where the system cannot tell."""
        try:
            return os.lseek(self._fd, at, os.SEEK_DATA)
        except OSError as error:
            return self._nbytes + CHUNK if error.errno == errno.ENXIO else at

    def drop(self) -> bool:
        """It is not wanted any more. Returns whether what was to follow will not be sent."""
        with self._lock:
            self._wanted = False
            return not self._sent

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def widen(fd: int) -> None:
    """Let a pipe hold more; where the user's limit is used up, the default size does."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE_BYTES)


class Sender:
    """Sends frames on a thread of its own, so that nobody waits for a slow or broken pipe; a beat when it is idle.

    Attributes:
        backlog: bytes that wait.
        beat_s: how long it is idle before a beat.
    """

    def __init__(self, fd: int, beat_s: float, beat: Callable[[], Head], name: str) -> None:
        self.backlog = 0
        self._fd = fd
        self.beat_s = beat_s
        self._beat = beat
        self._queue: queue.SimpleQueue[tuple[int, Iterable[Frame]] | None] = queue.SimpleQueue()
        self._first: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = Latch()
        start_thread(self._run, name, lambda _: self._over.open())

    def send(self, head: Head, body: bytes = b"") -> None:
        """Queue one frame."""
        frame = self._encoded(head, body)
        self._queue.put((_nbytes(frame), (frame,)))

    def send_first(self, head: Head, body: bytes = b"") -> None:
        """Queue one frame before all that are not sent so, also between two pieces of a block."""
        self._first.put(self._encoded(head, body))
        self._queue.put((0, ()))  # for whoever waits there

    def _encoded(self, head: Head, body: bytes) -> Frame:
        frame = encode(head, body)
        with self._lock:
            self.backlog += _nbytes(frame)
        return frame

    def send_all(self, frames: Iterable[Frame]) -> None:
        """Queue frames that are made when it is their turn."""
        self._queue.put((0, frames))

    def close(self, timeout_s: float) -> None:
        """Send what waits, for at most so long, and end the thread."""
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
                nbytes, frames = item
                for frame in frames:
                    self._write(frame)
                    self._write_first()
                self._has_sent(nbytes)
        except (OSError, ValueError):  # the pipe is gone: whoever reads the other one sees it, too
            return
        finally:
            self._over.open()

    def _write_first(self) -> None:
        for _ in range(self._first.qsize()):  # not those that come meanwhile: the block shall get on, too
            frame = self._first.get_nowait()
            self._write(frame)
            self._has_sent(_nbytes(frame))

    def _has_sent(self, nbytes: int) -> None:
        with self._lock:
            self.backlog -= nbytes

    def _write(self, frame: Frame) -> None:
        for piece in frame:
            view = memoryview(piece)
            while view:
                view = view[os.write(self._fd, view) :]
