"""Finds the folders that may hold the user's own modules, and decides which of them are safe on another machine."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator


def users(path: Iterable[str]) -> list[str]:
    """The absolute folders on ``path`` that exist and do not belong to this Python or its packages; no duplicates."""
    pythons = {os.path.realpath(prefix) + os.sep for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    found = dict.fromkeys(os.path.realpath(folder or os.curdir) for folder in path)
    return [folder for folder in found if os.path.isdir(folder) and not (folder + os.sep).startswith(tuple(pythons))]


def without_installed(folders: Iterable[str]) -> list[str]:
    """The folders that do not hold installed packages, such as those of ``pip install --user``."""
    return [folder for folder in folders if not {"site-packages", "dist-packages"} & set(folder.split(os.sep))]


def first(folders: Iterable[str], path: Iterable[str]) -> list[str]:
    """``path`` with those of the folders that exist here in front: as in the notebook, they hide installed modules."""
    there = [folder for folder in folders if os.path.isdir(folder)]
    return [*there, *(folder for folder in path if folder not in there)]


def identity(folder: str) -> str:
    """Return a text that is the same on all machines that mount this folder; "" if there is no such folder.

    The time of the last change cannot be set by whoever makes another folder at that path.
    """
    with contextlib.suppress(OSError):
        status = os.stat(folder)
        return f"{status.st_ino} {status.st_ctime_ns}"
    return ""


def refusal(folder: str, notebooks: str) -> str:
    """Return why a folder of the notebook's machine is not used on this one; "" if it may be used.

    It is used if it is the notebook's own, on a shared file system, or if nobody else could have put anything there.

    Args:
        notebooks: its :func:`identity` on the notebook's machine.
    """
    if not os.path.isdir(folder):
        return "does not exist"
    if notebooks and identity(folder) == notebooks:
        return ""
    for path in _above(folder):
        status = os.lstat(path)
        if status.st_uid not in (0, os.geteuid()):
            return f"is not safe: {path} belongs to {_user(status.st_uid)}"
        if _others_may_write(status, inside=path != os.path.realpath(folder)):
            return f"is not safe: other users may write to {path}"
    return ""


def _above(folder: str) -> Iterator[str]:
    """The folder and all above it, by the path as given, which may lead over links, and by the real one."""
    for path in dict.fromkeys((os.path.abspath(folder), os.path.realpath(folder))):
        while True:
            yield path
            if path == (path := os.path.dirname(path)):
                break


def _others_may_write(status: os.stat_result, *, inside: bool) -> bool:
    """Whether others may write, or ``inside`` a folder such as /tmp replace what belongs to this user."""
    if stat.S_ISLNK(status.st_mode) or (inside and status.st_mode & stat.S_ISVTX):
        return False
    by_group = status.st_mode & stat.S_IWGRP and not _is_of_one_user(status.st_gid)
    return bool(status.st_mode & stat.S_IWOTH or by_group)


def _is_of_one_user(gid: int) -> bool:
    """Whether a group is root's or this user's alone, as many Linux systems make one for each user."""
    import grp  # not on Windows

    if gid == 0:
        return True
    with contextlib.suppress(KeyError):
        group, user = grp.getgrgid(gid), _user(os.geteuid())
        return group.gr_name == user and set(group.gr_mem) <= {user}
    return False


def _user(uid: int) -> str:
    import pwd  # not on Windows

    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"
