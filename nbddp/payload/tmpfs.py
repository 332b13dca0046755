"""Creates a tmpfs with huge pages in a process with a single thread, sends it through a socket, and exits.

In a user namespace every user can create a tmpfs, but only a process with a single thread may enter one. This program
imports nothing from nbddp.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000  # linux/sched.h
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # Linux 5.2, the same number on every architecture that torch has
_SET_STRING, _CREATE = 1, 6  # linux/mount.h, as are these:
_CLOSE_ON_EXEC = 1
_NO_SUID, _NO_DEVICES, _NO_EXEC = 2, 4, 8


def main(channel: int) -> None:
    """Send a new tmpfs, as a file descriptor of its mount, through the Unix socket ``channel``. Raises OSError."""
    user, group = os.geteuid(), os.getegid()
    # If the system does not allow a user namespace, root can create the tmpfs without one.
    if ctypes.CDLL(None).unshare(_CLONE_NEWUSER | _CLONE_NEWNS) == 0:
        for name, text in ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    context = _call(_FSOPEN, b"tmpfs", _CLOSE_ON_EXEC)
    # within_size: a page that would reach beyond the file's end is a small one (Linux up to 5.15 may round up by one
    # page). size=0: no limit but the machine's memory.
    for key, value in (b"huge", b"within_size"), (b"size", b"0"), (b"nr_inodes", b"0"), (b"mode", b"0700"):
        _call(_FSCONFIG, context, _SET_STRING, key, value, 0)
    _call(_FSCONFIG, context, _CREATE, None, None, 0)
    mount = _call(_FSMOUNT, context, _CLOSE_ON_EXEC, _NO_SUID | _NO_DEVICES | _NO_EXEC)
    with socket.socket(fileno=channel) as sender:
        socket.send_fds(sender, [b"."], [mount])


def _call(number: int, *args: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    values = (ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value) for value in args)
    result = int(libc.syscall(ctypes.c_long(number), *values))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}")
    return result


if __name__ == "__main__":
    main(int(sys.argv[1]))
