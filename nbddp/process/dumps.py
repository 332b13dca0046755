"""Parses faulthandler's dumps of a rank's threads, written on request or in a crash, into frames; and shows frames."""

import itertools
import linecache
import operator
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from nbddp.tracebacks import is_our_file, library_of

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+( \[.*\])? \(most recent call first\):")
_CRASH = re.compile(r"^Fatal Python error: .*$", re.MULTILINE)
# The files in which every rank's main thread begins; none of them is the user's.
_PLUMBING = re.compile(r"multiprocessing/(spawn|process|forkserver|popen_\w+)\.py$|^<frozen|^<string>$")
_WAITING = re.compile(r"torch/utils/data/dataloader\.py$")
_FETCHING = re.compile(r"torch/utils/data/_utils/fetch\.py$")
_IPYTHON = f"{os.sep}IPython{os.sep}"  # runs a cell


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


def waits_for_a_worker(dump: str) -> bool:
    """Return whether a rank's main thread waits for a batch of a DataLoader worker."""
    return any(_WAITING.search(frame.file) and frame.function == "_try_get_data" for frame in main_thread(dump))


def computes_a_batch(dump: str) -> bool:
    """Return whether this is the dump of a DataLoader worker that isn't waiting for an order."""
    return any(_FETCHING.search(frame.file) for frame in main_thread(dump))


def is_whole(dump: str) -> bool:
    """Return whether a dump is complete: it ends where the process began, or where faulthandler cut it."""
    last = dump.rstrip("\n").rpartition("\n")[2]
    return dump.endswith("\n") and (last.startswith('  File "<string>"') or last.strip() == "...")


def crash(dump: str) -> str:
    """Return faulthandler's report of a crash with only the user's frames; "" if the process did not crash."""
    *_, last = [None, *_CRASH.finditer(dump)]
    if last is None:
        return ""
    _, current, rest = dump[last.end() :].partition("Current thread 0x")  # that crashed; a C++ thread has no frames
    threads = _threads(current + rest)
    frames = _user_frames(threads[0]) if threads else ()
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames or main_thread(dump)]
    return "\n".join([last[0], *(["Most recent call last:", *lines] if lines else [])]) + "\n"


def split_crash(output: str) -> tuple[str, str]:
    """Split a rank's output into what it has printed, and the :func:`stack` of the :func:`crash` at its end."""
    *_, last = [None, *_CRASH.finditer(output)]
    if last is None:
        return output, ""
    return output[: last.start()], stack([*filter(None, map(_frame, output[last.end() :].splitlines()))])


def stack(frames: Sequence[Frame]) -> str:
    """Return a stack as text, outermost first, with the lines of code; library frames are folded except the last."""
    lines: list[str] = []
    libraries = library_of([frame.file for frame in frames])
    libraries[-1:] = [""]
    for library, group in itertools.groupby(zip(libraries, frames), key=operator.itemgetter(0)):
        members = [frame for _, frame in group]
        if library and len(members) > 1:
            lines.append(f"  [{len(members)} frames in {library}]")
            continue
        for file, line, function in members:
            lines.append(f'  File "{file}", line {line}, in {function}')
            linecache.checkcache(file)  # a module may have been edited since
            if source := linecache.getline(file, line).strip():
                lines.append(f"    {source}")
    return "\n".join(lines)


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
    """Return the frames without multiprocessing's, nbddp's, and IPython's that run a cell; outermost first."""
    users = [f for f in reversed(frames) if not _PLUMBING.search(f.file) and not is_our_file(f.file)]
    return tuple(itertools.dropwhile(lambda frame: _IPYTHON in frame.file, users))
