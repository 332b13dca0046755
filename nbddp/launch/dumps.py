"""Parses faulthandler's dumps of a rank's threads, written on request or in a crash, into frames."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from nbddp.tracebacks import is_our_file

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+(?P<name> \[.*\])? \(most recent call first\):")
_CRASH = re.compile(r"^Fatal Python error: .*$", re.MULTILINE)
# The files in which every worker's main thread begins; none of them is the user's.
_PLUMBING = re.compile(r"multiprocessing[/\\](spawn|process|forkserver|popen_\w+)\.py$|^<frozen|^<string>$")


class Frame(NamedTuple):
    """One call on a stack."""

    file: str
    line: int
    function: str


def main_thread(dump: str) -> tuple[Frame, ...]:
    """Return the frames of a rank's main thread in faulthandler's dump, outermost first, without nbddp's."""
    threads = _threads(dump)
    # The main thread is the one that began in multiprocessing; faulthandler writes it last.
    for frames in reversed(threads):
        if any(_PLUMBING.search(frame.file) for frame in frames):
            return _user_frames(frames)
    return tuple(reversed(threads[-1])) if len(threads) == 1 else ()  # faulthandler left the main thread out


def _threads(dump: str) -> list[list[Frame]]:
    threads: list[list[Frame]] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _frame(line)):
            threads[-1].append(frame)
    return threads


def _frame(line: str) -> Frame | None:
    found = _FRAME.match(line)
    return Frame(found["file"], int(found["line"]), found["function"]) if found else None


def _user_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the frames without multiprocessing's and nbddp's, outermost first."""
    return tuple(f for f in reversed(frames) if not _PLUMBING.search(f.file) and not is_our_file(f.file))


def crash(dump: str) -> str:
    """Return faulthandler's report of a crash with only the user's frames; "" if the process did not crash."""
    *_, last = [None, *_CRASH.finditer(dump)]
    if last is None:
        return ""
    threads = _threads(dump[last.end() :])
    frames = _user_frames(threads[0]) if threads else ()  # of the thread that crashed; a C++ thread has none
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames or main_thread(dump)]
    return "\n".join([last[0], *(["Most recent call last:", *lines] if lines else [])]) + "\n"


def split_crash(output: str) -> tuple[str, tuple[Frame, ...]]:
    """Split a rank's last lines of output into the output and the frames of the :func:`crash` at its end."""
    *_, last = [None, *_CRASH.finditer(output)]
    if last is None:
        return output, ()
    frames = filter(None, map(_frame, output[last.end() :].splitlines()))
    return output[: last.start()], tuple(frames)


def is_whole(dump: str) -> bool:
    """Return whether a dump is complete: it ends where the process began, or where faulthandler cut it."""
    last = dump.rstrip("\n").rpartition("\n")[2]
    return dump.endswith("\n") and (last.startswith('  File "<string>"') or last.strip() == "...")
