"""Names of shared memory and semaphores that have to be removed if this rank is killed: a list in the run's folder."""

import contextlib
import os
from multiprocessing import resource_tracker
from pathlib import Path


def keep_list(folder: str) -> None:
    """Have multiprocessing write what it registers into a file, and start no process for it."""
    path = os.path.join(folder, "tracked")

    def note_pid() -> None:
        with contextlib.suppress(OSError), open(path, "a") as file:
            file.write(f"PID:{os.getpid()}:torch\n")

    os.register_at_fork(after_in_child=note_pid)
    resource_tracker._resource_tracker._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)  # type: ignore[attr-defined]
    note_pid()


def remove_rest(folder: str) -> None:
    """Remove, in the notebook's process, what ranks that were killed have left."""
    left, pids = set[tuple[str, str]](), set[str]()
    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, "tracked"), errors="replace") as file:
        for line in file:
            command, _, rest = line.strip().partition(":")
            name, _, kind = rest.rpartition(":")
            if command == "PID":
                pids.add(name)
            else:
                (left.add if command == "REGISTER" else left.discard)((name, kind))
    for name, kind in left:
        with contextlib.suppress(OSError, KeyError):
            resource_tracker._CLEANUP_FUNCS[kind](name)  # type: ignore[attr-defined]
    for path in Path("/dev/shm").glob("torch_*_*"):  # tensors, sent between processes: named for microseconds
        if (pid := path.name.split("_")[1]) in pids and not _runs(pid):
            with contextlib.suppress(OSError):
                path.unlink()


def _runs(pid: str) -> bool:
    """Return whether there is such a process; another one may have got the number."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
