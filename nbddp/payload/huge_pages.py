"""A tmpfs with huge pages, of our own, for large blocks: they are written and mapped at a third of a memfd's cost."""

import contextlib
import functools
import os
import subprocess

FROM_NBYTES = 64 << 20  # a smaller block isn't worth the 20 ms that it takes to make the tmpfs
# Without a limit of its own, and not where Linux refuses memory beforehand: a write to a mapping would be a SIGBUS.
_MOUNT = (
    "[ $(cat /proc/sys/vm/overcommit_memory) != 2 ] && "
    "mount -t tmpfs -o huge=within_size,mode=700,size=0 nbddp /mnt && echo ready && read _"
)


def open_file() -> int | None:
    """Return a new file without a name; None where no such file system may be made."""
    with contextlib.suppress(OSError):
        if (folder := _folder()) is not None:
            return os.open(f"/proc/self/fd/{folder}", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    return None


@functools.cache
def _folder() -> int | None:
    """Mount it in a namespace of its own, where nobody else sees it; it lives as long as this descriptor."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _MOUNT]
    with contextlib.suppress(OSError):
        quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, start_new_session=True, **quiet) as process:  # type: ignore[call-overload]
            if process.stdout.readline() == b"ready\n":
                return os.open(f"/proc/{process.pid}/root/mnt", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return None
