"""Kernel side. Where the ranks are: their stacks in the reader's own lines, and one line that sums them up."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from nbddp.tracebacks import is_our_file

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+(?P<name> \[.*\])? \(most recent call first\):")
# Where every worker's main thread begins: nothing in it is the reader's.
_PLUMBING = re.compile(r"multiprocessing[/\\](spawn|process|forkserver|popen_\w+)\.py$|^<frozen|^<string>$")
# A cell's own file may lie in any temporary folder; an installed package lies in one of these.
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_NO_COLLECTIVES = ("wrapper", "new_group", "destroy_process_group")  # functions there that are on the way only
_BACKWARD = (os.path.join("torch", "autograd", "graph.py"), "_engine_run_backward")
_DDP = os.path.join("torch", "nn", "parallel", "distributed.py")


class Frame(NamedTuple):
    """One call on a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Where:
    """Where one rank is.

    Attributes:
        state: "called" (in the function), "setup", "unpack", "finished", "failed", "ended" or "silent" (it gives
            no answer).
        frames: outermost first, none of ours; empty unless called or failed.
        step: the highest that it has logged, -1 before the first.
        error: of a failed one, on one line.
    """

    rank: int
    state: str
    frames: tuple[Frame, ...] = ()
    step: int = -1
    error: str = ""

    @property
    def collective(self) -> str:
        """What it waits in for the other ranks, as the reader calls it: "all_reduce", "backward"; "" if it does not."""
        for file, _, function in self.frames:
            if file.endswith(_COLLECTIVES) and not function.startswith("_") and function not in _NO_COLLECTIVES:
                return function
            if file.endswith(_BACKWARD[0]) and function == _BACKWARD[1]:
                return "backward"
            if file.endswith(_DDP) and function in ("_pre_forward", "_sync_buffers", "_post_forward"):
                return "DDP's forward"
        return ""

    @property
    def place(self) -> str:
        """The reader's innermost line: "train, line 14"; with the file's name when it is no cell."""
        if not self.frames:
            return ""
        theirs = [frame for frame in self.frames if not frame.file.startswith(_INSTALLED)]
        file, line, function = theirs[-1] if theirs else self.frames[-1]
        name = "" if _is_cell(file) else os.path.basename(file)
        return ", ".join(part for part in (function.replace("<module>", ""), name, f"line {line}") if part)


def _is_cell(file: str) -> bool:
    return file.startswith("<") or "ipykernel_" in file


# ---------------------------------------------------------------------------- reading


def main_thread(dump: str) -> tuple[Frame, ...]:
    """Of faulthandler's dump, the frames of a rank's main thread, outermost first; none of ours."""
    threads: list[list[Frame]] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    # The main thread is the one that began in multiprocessing; faulthandler writes it last.
    for frames in reversed(threads):
        if any(_PLUMBING.search(frame.file) for frame in frames):
            return tuple(f for f in reversed(frames) if not _PLUMBING.search(f.file) and not is_our_file(f.file))
    return tuple(reversed(threads[-1])) if threads else ()


def is_whole(dump: str) -> bool:
    """Has the rank written all of it? It ends where its process began, or is cut by faulthandler."""
    last = dump.rstrip("\n").rpartition("\n")[2]
    return dump.endswith("\n") and (last.startswith('  File "<string>"') or last == "  ...")


def of_traceback(tb: TracebackType | None) -> tuple[Frame, ...]:
    """An exception's frames, outermost first; none of ours."""
    frames = []
    while tb is not None:
        code = tb.tb_frame.f_code
        if not is_our_file(code.co_filename):
            frames.append(Frame(code.co_filename, tb.tb_lineno, code.co_name))
        tb = tb.tb_next
    return tuple(frames)


# ---------------------------------------------------------------------------- telling


def report(wheres: Sequence[Where]) -> str:
    """The line that sums up, then each stack, most recent call last; ranks at the same place share one."""
    return "\n\n".join([summary(wheres), *(_stack(same) for same in _grouped(wheres, lambda w: (w.state, w.frames)))])


def summary(wheres: Sequence[Where]) -> str:
    """``rank 1 has finished after step 120; ranks 0, 2 and 3 wait in all_reduce after step 120 (train, line 14)``."""
    groups = _grouped(wheres, lambda w: (_does(w, 2), w.step, w.place))
    parts = [f"{_names(same, len(wheres))} {_does(same[0], len(same))}{_details(same[0])}" for same in groups]
    return "; ".join(parts) + _cause(wheres)


def _does(where: Where, count: int) -> str:
    one = count == 1
    if where.state == "called":
        if where.collective:
            return f"{'waits' if one else 'wait'} in {where.collective}"
        return "is" if one else "are"
    if where.state == "failed" and where.collective:
        return f"gave up in {where.collective}"
    has, is_ = ("has", "is") if one else ("have", "are")
    return {
        "finished": f"{has} finished",
        "failed": f"{has} failed ({where.error})",
        "ended": f"{has} ended",
        "setup": f"{is_} setting {'itself' if one else 'themselves'} up",
        "unpack": f"{'unpacks' if one else 'unpack'} the function and its data",
        "silent": f"{'gives' if one else 'give'} no answer",
    }[where.state]


def _details(where: Where) -> str:
    step = f" after step {where.step:,}" if where.step >= 0 else ""
    if where.state == "called" and not where.collective:
        return f" in {where.place or 'the function'}{step}"
    return step + (f" ({where.place})" if where.place else "")


def _cause(wheres: Sequence[Where]) -> str:
    """The likely one, where ranks wait for others that are not coming."""
    waiting = [w for w in wheres if w.collective]
    beyond = [w for w in wheres if w.state in ("finished", "failed") and not w.collective] + [
        w for w in waiting if (w.collective, w.place) != (waiting[0].collective, waiting[0].place)
    ]
    if not waiting or not beyond or len(waiting) + len(beyond) < len(wheres):
        return ""
    if len({w.step for w in wheres if w.step >= 0}) > 1:
        return (
            ". The ranks have taken different numbers of steps: most likely they have uneven numbers of batches "
            "(nbddp.loader evens them out; DistributedSampler, drop_last=True or torch's Join do it by hand)"
        )
    return ". Every rank has to call the same collectives in the same order; uneven numbers of batches break that"


def _stack(same: Sequence[Where]) -> str:
    first = same[0]
    who = _names(same, 0)
    if not first.frames:
        return f"{who}: {_does(first, len(same))}"
    what = _does(first, len(same)) + (" here" if first.state == "called" and not first.collective else "")
    lines = [f"{who}: {what} (most recent call last)"]
    for file, line, function in first.frames:
        lines.append(f'  File "{file}", line {line}, in {function}')
        if source := linecache.getline(file, line).strip():
            lines.append(f"    {source}")
    return "\n".join(lines)


def _grouped(wheres: Iterable[Where], key: object) -> list[list[Where]]:
    groups: dict[object, list[Where]] = {}
    for where in wheres:
        groups.setdefault(key(where), []).append(where)  # type: ignore[operator]
    return list(groups.values())


def _names(same: Sequence[Where], of: int) -> str:
    ranks = [where.rank for where in same]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == of:
        return f"all {of} ranks" if of > 2 else "both ranks"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
