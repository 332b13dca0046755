"""In a process of its own, of one thread: makes a tmpfs with huge pages, sends it through a socket, and ends.

Only a process of one thread may enter a user namespace, which lets everybody make a tmpfs. Imports nothing of nbddp's.
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
    _enter_a_user_namespace()
    with socket.socket(fileno=channel) as sender:
        socket.send_fds(sender, [b"."], [_new_tmpfs()])


def _enter_a_user_namespace() -> None:
    """Where it is refused, the mount still succeeds for root."""
    libc = ctypes.CDLL(None)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS) == 0:
        for name, text in ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _new_tmpfs() -> int:
    context = _call(_FSOPEN, b"tmpfs", _CLOSE_ON_EXEC)
    # Pages that would reach beyond a file's end are small ones (Linux up to 5.15 may round up by one). As large as
    # there is memory.
    for key, value in (b"huge", b"within_size"), (b"size", b"0"), (b"nr_inodes", b"0"), (b"mode", b"0700"):
        _call(_FSCONFIG, context, _SET_STRING, key, value, 0)
    _call(_FSCONFIG, context, _CREATE, None, None, 0)
    return _call(_FSMOUNT, context, _CLOSE_ON_EXEC, _NO_SUID | _NO_DEVICES | _NO_EXEC)


def _call(number: int, *args: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *map(_argument, args)))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}")
    return result


def _argument(value: int | bytes | None) -> ctypes.c_long | ctypes.c_char_p:
    return ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value)


if __name__ == "__main__":
    main(int(sys.argv[1]))
