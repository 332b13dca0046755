"""Both sides. Files in memory, without a name, that lie in huge pages.

A ``memfd`` gets pages of 4 kB where /sys/kernel/mm/transparent_hugepage/shmem_enabled is "never", as it is nearly
everywhere. A tmpfs asks for huge ones by an option of its own, and a user namespace lets everybody make a tmpfs: the
program ``tmpfs.py`` does, and sends it here as a file descriptor. It is mounted nowhere: nobody else sees it, and it
ends with the last descriptor.

Where the system refuses that, as in most containers, there are no such files, and blocks are memfds.

Measured, 1 GiB to four processes that read all of it, ms: written 82-138 instead of 345-430, read 130 instead of 320,
given back 3 instead of 127.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
from multiprocessing.spawn import get_executable
from pathlib import Path

_PATIENCE_S = 10.0
_PROGRAM = Path(__file__).with_name("tmpfs.py")
_FD = struct.Struct("i")

_begun = threading.Event()
_directories: list[int] = []
_numbers = itertools.count()


def begin() -> None:
    """Make the file system in the background, once; whoever opens a file before it is there gets none."""
    if not _begun.is_set() and sys.platform == "linux" and not getattr(sys, "frozen", False):
        _begun.set()
        with contextlib.suppress(RuntimeError):  # the system has no thread to give
            threading.Thread(target=_make, name="nbddp-huge-files", daemon=True).start()


def open_file(name: str) -> int | None:
    """A new, empty file. Returns its fd, or None where there can be none."""
    for directory in _directories:
        with contextlib.suppress(OSError):  # this process is another user's by now
            path = f"{name.replace(os.sep, '-')[:200]}-{os.getpid()}-{next(_numbers)}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
            os.unlink(path, dir_fd=directory)  # the name stays, for those who look at /proc/PID/fd
            return fd
    return None


def _make() -> None:
    with contextlib.suppress(Exception):  # a help, which nothing depends on
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                maker = subprocess.Popen(
                    [get_executable(), "-I", "-S", _PROGRAM, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in a terminal is not for it
                )
            try:
                ours.settimeout(_PATIENCE_S)
                # Not socket.recv_fds, which forgets the flag.
                _, sent, *_ = ours.recvmsg(1, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC)
                _directories.extend(_FD.unpack(fd)[0] for *_, fd in sent)
            finally:
                maker.kill()
                maker.wait()
