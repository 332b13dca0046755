"""In the fork server. What the kernel wants imported beside our own; it is told before anything else is imported."""

from __future__ import annotations

modules: list[str] = []
path: list[str] = []  # the kernel's sys.path


def note(names: list[str], sys_path: list[str]) -> None:
    modules[:], path[:] = names, sys_path
