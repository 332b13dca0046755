"""Redirects everything that this rank prints, from Python, C or a subprocess, to one file for its whole life.

It's a file and not a pipe, so a rank never waits for the notebook to read, and nothing is lost when the rank dies.
"""

import atexit
import contextlib
import faulthandler
import io
import os
import signal
import sys
import threading

STACKS_SIGNAL: int = signal.SIGRTMIN + 7
_KEPT_CHARS = 10_000

_stacks = -1  # the file that requests for stacks are answered in
_printed = io.StringIO()  # what went through sys.stdout since the last order; at least _KEPT_CHARS of it


class _Stdout(io.TextIOWrapper):
    def write(self, text: str) -> int:
        if _printed.tell() < _KEPT_CHARS:
            _printed.write(text)
        return super().write(text)


def redirect(fd: int, stacks: int) -> None:
    """Put stdout and stderr into the file ``fd``, and the stacks of all threads into ``stacks`` on each signal."""
    for number, name, kind in ((1, "stdout", _Stdout), (2, "stderr", io.TextIOWrapper)):
        os.dup2(fd, number)
        raw = io.FileIO(number, "w", closefd=False)
        stream = kind(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
        vars(sys).update({name: stream, f"__{name}__": stream})
    os.close(fd)
    global _stacks
    _stacks = stacks
    signal.signal(STACKS_SIGNAL, _dump_stacks)
    answer_stacks()
    os.register_at_fork(after_in_child=lambda: faulthandler.enable(file=2))  # the notebook reads of ranks only


def printed() -> str:
    """Return the beginning of what went through ``sys.stdout`` since :func:`forget_printed`."""
    return _printed.getvalue()[:_KEPT_CHARS]


def forget_printed() -> None:
    """Begin again."""
    global _printed
    _printed = io.StringIO()


def answer_stacks() -> None:
    """Let faulthandler answer requests for stacks, even during a C call or in a collective, and report crashes.

    Code that saves and restores all handlers, as every Lightning Trainer does, takes both away. Python's handler, which
    it restores, answers then as soon as the main thread runs Python code again.
    """
    faulthandler.unregister(STACKS_SIGNAL)  # else register() takes it for still installed
    faulthandler.register(STACKS_SIGNAL, file=_stacks, all_threads=True, chain=False)
    faulthandler.disable()  # the same
    faulthandler.enable(file=_stacks)


def _dump_stacks(*_: object) -> None:
    faulthandler.dump_traceback(_stacks, all_threads=True)
    answer_stacks()


def finish() -> None:
    """Do what Python does at its end, but free no objects: wait for threads, call the exit handlers, flush."""
    threading._shutdown()  # type: ignore[attr-defined]  # before the exit handlers: executors end their processes here
    atexit._run_exitfuncs()
    flush()


def flush() -> None:
    """Write Python's buffers to the file."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # the user's code replaced or closed it
            stream.flush()
