"""In the fork server. What the kernel asks of it beside our own imports; told before anything else is imported."""

from __future__ import annotations

path: list[str] = []  # the kernel's sys.path
modules: list[str] = []
memory = mark = ""  # where its stderr is to go meanwhile, a file of the kernel's and that one's name; "": where it goes


def note(sys_path: list[str], names: list[str], file: str, its_name: str) -> None:
    """Called by the server's program."""
    global memory, mark
    path[:], modules[:] = sys_path, names
    memory, mark = file, its_name
