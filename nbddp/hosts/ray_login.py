"""One login to a node of Ray: ``python ray_login.py SOCKET NAME COMMAND...``, as ``ssh NAME COMMAND`` would be.

Connects its stdin, stdout and stderr to the relay's socket. Imports only the standard library, so it starts at once.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading

SOCKET = "s"
STDOUT, STDERR, EXITED = 1, 2, 3
_LENGTH = 5  # bytes of kind and length
_READ_BYTES = 1 << 20


def encoded(kind: int, data: bytes) -> bytes:
    """Return a message of the relay."""
    return bytes([kind]) + len(data).to_bytes(_LENGTH - 1, "big") + data


def _main(path: str, *words: str) -> int:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        connection.sendall(json.dumps(words).encode() + b"\n")
    except OSError as error:
        print(f"the process that is connected to Ray has ended ({error})", file=sys.stderr)
        return 255

    def feed() -> None:
        try:
            while data := os.read(0, _READ_BYTES):
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        except OSError:  # the other end is gone, which the main thread notices
            pass

    threading.Thread(target=feed, daemon=True).start()
    stream = connection.makefile("rb")
    while len(head := stream.read(_LENGTH)) == _LENGTH:
        data = stream.read(int.from_bytes(head[1:], "big"))
        if head[0] == EXITED:
            return int(data)
        view = memoryview(data)
        while view:
            view = view[os.write(head[0], view) :]
    return 255


if __name__ == "__main__":
    os._exit(_main(*sys.argv[1:]))
