"""Kernel side. faulthandler's dumps of the ranks, as tracebacks of the reader's own lines."""

from __future__ import annotations

import linecache
import re

from nbddp.tracebacks import is_our_file

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+(?P<name> \[.*\])? \(most recent call first\):")
# Where every worker's main thread begins: nothing in it is the reader's.
_PLUMBING = re.compile(r"multiprocessing[/\\](spawn|process|forkserver|popen_\w+)\.py$|^<frozen|^<string>$")


def main_thread(dump: str) -> list[tuple[str, int, str]]:
    """The frames of a rank's main thread, outermost first: file name, line, function; none of ours."""
    threads: list[list[tuple[str, int, str]]] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append((frame["file"], int(frame["line"]), frame["function"]))
    # The main thread is the one that began in multiprocessing; faulthandler writes it last.
    for frames in reversed(threads):
        if any(_PLUMBING.search(file) for file, _, _ in frames):
            kept = [f for f in frames if not _PLUMBING.search(f[0]) and not is_our_file(f[0])]
            return kept[::-1]
    return threads[-1][::-1] if threads else []


def render(rank: int, dump: str, state: str) -> str:
    """One rank's stack as text, most recent call last."""
    frames = main_thread(dump)
    if not frames:
        return f"rank {rank}: {state}"
    lines = [f"rank {rank}: {state} (most recent call last)"]
    for file, line, function in frames:
        lines.append(f'  File "{file}", line {line}, in {function}')
        if source := linecache.getline(file, line).strip():
            lines.append(f"    {source}")
    return "\n".join(lines)
