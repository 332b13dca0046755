"""Before ranks start on several hosts: listens for the other hosts, tries to reach them, measures the connections."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from nbddp.agent.listener import Listener

_CONNECT_S = 5.0
_MEASURE_S = 0.1
_REPLY_S = 5.0
_PINGS = 5
_PIECE = bytes(64 << 10)
_BUFFERED = 256 << 10  # in the system: what a slow connection has to carry after the measurement
_PING, _STREAM = b"p", b"s"
_NUMBER = 8  # bytes

Found = tuple[str, float, "float | None"]


def listen(address: str, token: str, size: int) -> Listener:
    """Return a listener that answers the other hosts of this run, which know the token, on one address of this host."""
    return Listener(address, lambda connection: _answer(connection, token.encode()), size, "nbddp-look")


def _answer(connection: socket.socket, token: bytes) -> None:
    connection.settimeout(_REPLY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _read(connection, len(token)) != token:
        return
    while (order := _read(connection, 1)) == _PING:
        connection.sendall(_PING)
    if order == _STREAM:
        connection.sendall(b"".join(map(_encoded, _count(connection))))


def look(peers: Sequence[tuple[str, str, int, bool]], token: str) -> tuple[list[Found], list[tuple[str, str]]]:
    """Try to reach all peers at once, then measure one connection after the other.

    Args:
        peers: name, address and port, and whether the rate is measured.

    Returns:
        name, latency in seconds and bytes per second of those reached; name and reason of the others.
    """
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(max(1, len(peers)), "nbddp-look") as pool:
        tried = list(pool.map(_connect, peers))
        failed = [(peer[0], one) for peer, one in zip(peers, tried) if isinstance(one, str)]
        found: list[Found] = []
        for (name, _, _, with_rate), one in zip(peers, tried):
            if isinstance(one, socket.socket):
                stack.enter_context(one)
                if any(isinstance(each, str) for each in tried):
                    continue  # no ranks will start; and the others have waited too long for this host
                try:
                    found.append((name, *_measured(one, token, with_rate)))
                except OSError as error:
                    failed.append((name, f"the connection broke ({error})"))
        return found, failed


def _connect(peer: tuple[str, str, int, bool]) -> socket.socket | str:
    _, address, port, _ = peer
    try:
        return socket.create_connection((address, port), timeout=_CONNECT_S)
    except OSError as error:
        return str(error.strerror or error)


def _measured(connection: socket.socket, token: str, with_rate: bool) -> tuple[float, float | None]:
    connection.settimeout(_REPLY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFERED)
    connection.sendall(token.encode())
    latencies = []
    for _ in range(_PINGS):
        began = time.monotonic()
        connection.sendall(_PING)
        if _read(connection, 1) != _PING:
            raise OSError("no answer")
        latencies.append(time.monotonic() - began)
    return min(latencies), _rate(connection) if with_rate else None


def _rate(connection: socket.socket) -> float:
    """Return the bytes per second that arrive at the other end."""
    connection.sendall(_STREAM)
    until = time.monotonic() + _MEASURE_S
    while time.monotonic() < until:
        connection.sendall(_PIECE)
    connection.shutdown(socket.SHUT_WR)
    reply = _read(connection, 2 * _NUMBER)
    nbytes, nanoseconds = (int.from_bytes(reply[at : at + _NUMBER], "big") for at in (0, _NUMBER))
    return nbytes / max(nanoseconds, 1) * 1e9


def _count(connection: socket.socket) -> tuple[int, int]:
    """Read to the end of the stream. Returns its bytes without those of the first read, and the nanoseconds since."""
    buffer = bytearray(_BUFFERED)
    connection.recv_into(buffer)
    began, nbytes = time.monotonic_ns(), 0
    while got := connection.recv_into(buffer):
        nbytes += got
    return nbytes, time.monotonic_ns() - began


def _encoded(number: int) -> bytes:
    return number.to_bytes(_NUMBER, "big")


def _read(connection: socket.socket, nbytes: int) -> bytes:
    """Return this many bytes, or fewer at the end of the connection."""
    buffer = bytearray(nbytes)
    done = 0
    while done < nbytes and (got := connection.recv_into(memoryview(buffer)[done:])):
        done += got
    return bytes(buffer[:done])
