"""This host's part in a chain: fetches a payload from the host before it, and passes each piece on to the next one."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from nbddp.agent.incoming import Incoming
from nbddp.agent.listener import Listener
from nbddp.agent.secured import read, secure
from nbddp.hosts.frames import CHUNK, Header
from nbddp.latch import start_thread

KINDS = ("fetch", "piece", "pieces end")
_CONNECT_S = 5.0
_SILENCE_S = 10.0  # of the other side, after which it counts as gone
_BEAT_S = 1.0  # without a piece to send
_PROGRESS_S = 0.25  # between two reports to the notebook kernel
_BACKLOG = 8
_START = struct.Struct(">Q")  # where the fetching side wants to begin
_PIECE = struct.Struct(">QI")  # offset and size; size 0 is a beat, or behind the last piece the end


class Link:
    """This host's part in one chain.

    Attributes:
        number: of the chain.
    """

    def __init__(self, order: Header, incoming: Incoming, report: Callable[[Header], None]) -> None:
        """
        Args:
            order: the notebook kernel's, which begins the chain.
            incoming: the payload, for which the notebook kernel or another host sends the pieces.
            report: sends a frame to the notebook kernel.
        """
        self.number: int = order["number"]
        self._secret = bytes.fromhex(order["secret"])
        self._incoming = incoming
        self._send = report
        self._closed = False
        self._lock = threading.Lock()
        self._source: socket.socket | None = None
        self._listener: Listener | None = None
        if order["serves"]:
            with contextlib.suppress(OSError):  # port 0: the notebook kernel sends the payload to the next host itself
                self._listener = Listener(order["address"], self._serve, _BACKLOG, "nbddp-serve")
            self._report("serves", port=self._listener.port if self._listener is not None else 0)

    def carry_out(self, order: Header, body: bytes) -> None:
        """Carry out an order of the notebook kernel's about this chain, one of ``KINDS``."""
        if order["kind"] == "piece":
            self._incoming.write(body, order["at"])
        elif order["kind"] == "pieces end":
            self._finish()
        else:
            address = order["address"], order["port"]
            start_thread(lambda: self._fetch(address), "nbddp-fetch", lambda error: self._report_failed(error))

    def close(self) -> None:
        """Fetch and pass on nothing more."""
        with self._lock:
            self._closed, source = True, self._source
        if source is not None:
            _shut(source)
        if self._listener is not None:
            self._listener.close()
            self._listener = None  # which refers to this link, and so to the payload's memory

    def _report(self, kind: str, **fields: object) -> None:
        self._send({"kind": kind, "number": self.number, **fields})

    def _report_failed(self, error: Exception) -> None:
        self._report("fetch failed", at=self._incoming.next_at, why=str(error))

    def _finish(self) -> None:
        self._incoming.finish()
        self._report("has payload")

    # ------------------------------------------------------------------ on threads of their own

    def _fetch(self, address: tuple[str, int]) -> None:
        try:
            with socket.create_connection(address, timeout=_CONNECT_S) as connection:
                with self._lock:
                    self._source = connection
                    if self._closed:
                        return
                with secure(connection, self._secret, serves=False) as source:
                    self._fetch_from(source)
        except OSError as error:
            if not self._closed:
                self._report_failed(error)
            return
        self._finish()

    def _fetch_from(self, source: socket.socket) -> None:
        source.settimeout(_SILENCE_S)
        source.sendall(_START.pack(self._incoming.next_at))
        reported_at = 0.0
        for at, piece in _pieces_from(source, self._incoming.nbytes):
            self._incoming.write(piece, at)
            if time.monotonic() - reported_at > _PROGRESS_S:
                reported_at = time.monotonic()
                self._report("fetching", done=at + len(piece))

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(_CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with secure(connection, self._secret, serves=True) as peer:
            start = bytearray(_START.size)
            read(peer, memoryview(start))
            peer.settimeout(_SILENCE_S)
            for at, piece in self._incoming.pieces(_START.unpack_from(start)[0], _BEAT_S):
                peer.sendall(_PIECE.pack(at, len(piece)))
                peer.sendall(piece)
            peer.sendall(_PIECE.pack(self._incoming.nbytes, 0))


def _pieces_from(source: socket.socket, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """Yield offset and bytes of the pieces until the end; the bytes are valid until the next one.

    Raises:
        OSError: the connection ends before, or is silent, or what arrives is not a piece.
    """
    header, buffer = bytearray(_PIECE.size), memoryview(bytearray(CHUNK))
    while True:
        read(source, memoryview(header))
        at, size = _PIECE.unpack_from(header)
        if size > CHUNK or at + size > nbytes:
            raise OSError(f"a piece of {size:,} bytes at {at:,} of {nbytes:,}")
        if size:
            read(source, buffer[:size])
            yield at, buffer[:size]
        elif at == nbytes:
            return


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
