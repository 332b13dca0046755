"""Kernel side. Where the ranks are: their stacks in the reader's own lines, and one line that sums them up."""

from __future__ import annotations

import importlib.util
import itertools
import linecache
import operator
import os
import re
import site
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from nbddp.tracebacks import is_our_file, library_of

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+(?P<name> \[.*\])? \(most recent call first\):")
_CRASH = re.compile(r"^Fatal Python error: .*$", re.MULTILINE)
# Where every worker's main thread begins: nothing in it is the reader's.
_PLUMBING = re.compile(r"multiprocessing[/\\](spawn|process|forkserver|popen_\w+)\.py$|^<frozen|^<string>$")
_CELL = re.compile(r"[/\\]ipykernel_\d+[/\\]|^<ipython-input|^<stdin>|^<string>")
# What is installed or generated is not the reader's; a cell's own file may lie in any temporary folder.
_TORCH = importlib.util.find_spec("torch")
_INSTALLED = (
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    site.getusersitepackages() + os.sep,
    *([os.path.dirname(_TORCH.origin) + os.sep] if _TORCH is not None and _TORCH.origin else []),
)
_GENERATED = re.compile(r"^<|[/\\]torchinductor_")
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
# fmt: off
_NAMES = frozenset((
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "init_process_group", "monitored_barrier", "new_group",
    "recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send", "send_object_list", "split_group",
))
# fmt: on
_BACKWARD = (os.path.join("torch", "autograd", "graph.py"), "_engine_run_backward")
_DDP = os.path.join("torch", "nn", "parallel", "distributed.py")
_DDP_PARTS = {
    "__init__": "DDP's constructor",
    "_pre_forward": "DDP's forward",
    "_post_forward": "DDP's forward",
    "_sync_buffers": "DDP's forward",
}


class Frame(NamedTuple):
    """One call on a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Where:
    """Where one rank is.

    Attributes:
        state: "called" (in the function), "setup", "unpack", "finished", "failed", "left" (by sys.exit), "ended" or
            "silent" (it gives no answer).
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
        """torch's collective in which it waits for the other ranks: "all_reduce"; "" if it does not."""
        for file, _, function in self.frames:
            if file.endswith(_COLLECTIVES) and function in _NAMES:
                return function
        return ""

    @property
    def exchange(self) -> str:
        """What it is in that DDP exchanges gradients or buffers in; "" for none. Whether it waits cannot be seen."""
        for file, _, function in self.frames:
            if file.endswith(_DDP) and function in _DDP_PARTS:
                return _DDP_PARTS[function]
        if self.frames and self.frames[-1].function == _BACKWARD[1] and self.frames[-1].file.endswith(_BACKWARD[0]):
            return "backward"
        return ""

    @property
    def meeting(self) -> str:
        """What it may wait in for the others, in one word or two."""
        return self.collective or self.exchange

    @property
    def place(self) -> str:
        """The reader's innermost line: "train, line 14"; with the file's name when it is no cell."""
        if not self.frames:
            return ""
        libraries = library_of([frame.file for frame in self.frames])
        begins_in = self.frames[0].file  # a script may itself be an installed file
        theirs = [f for f, lib in zip(self.frames, libraries) if not lib and (f.file == begins_in or _is_theirs(f))]
        file, line, function = (theirs or self.frames)[-1]
        name = "" if _CELL.search(file) else os.path.basename(file)
        return ", ".join(part for part in (function.replace("<module>", ""), name, f"line {line}") if part)


def _is_theirs(frame: Frame) -> bool:
    if _CELL.search(frame.file):
        return True
    return not (frame.file.startswith(_INSTALLED) or _GENERATED.search(frame.file))


# ---------------------------------------------------------------------------- reading


def main_thread(dump: str) -> tuple[Frame, ...]:
    """Of faulthandler's dump, the frames of a rank's main thread, outermost first; none of ours."""
    threads = _threads(dump)
    # The main thread is the one that began in multiprocessing; faulthandler writes it last.
    for frames in reversed(threads):
        if any(_PLUMBING.search(frame.file) for frame in frames):
            return _readers(frames)
    return tuple(reversed(threads[-1])) if len(threads) == 1 else ()  # of very many threads the main one is left out


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


def _readers(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Without multiprocessing's and ours, outermost first."""
    theirs = [f for f in frames if not _PLUMBING.search(f.file) and not is_our_file(f.file)]
    return tuple(reversed(theirs))


def crash(dump: str) -> str:
    """What faulthandler wrote when the process crashed, with the reader's frames alone; "" if it did not crash."""
    *_, last = [None, *_CRASH.finditer(dump)]
    if last is None:
        return ""
    threads = _threads(dump[last.end() :])
    frames = _readers(threads[0]) if threads else ()  # the thread that crashed; one of C++ has none
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames or main_thread(dump)]
    return "\n".join([last[0], *(["Most recent call last:", *lines] if lines else [])]) + "\n"


def split_crash(output: str) -> tuple[str, tuple[Frame, ...]]:
    """A rank's last lines of output, and the frames of the :func:`crash` that they end with."""
    *_, last = [None, *_CRASH.finditer(output)]
    if last is None:
        return output, ()
    frames = filter(None, map(_frame, output[last.end() :].splitlines()))
    return output[: last.start()], tuple(frames)


def is_whole(dump: str) -> bool:
    """Has the rank written all of it? It ends where its process began, or is cut by faulthandler."""
    last = dump.rstrip("\n").rpartition("\n")[2]
    return dump.endswith("\n") and (last.startswith('  File "<string>"') or last.strip() == "...")


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


def report(wheres: Sequence[Where], still: bool = False) -> str:
    """The line that sums up, then each stack, most recent call last; ranks at the same place share one."""
    stacks = [_stack(same) for same in _grouped(wheres, lambda w: (w.state, w.frames))]
    return "\n\n".join([summary(wheres, still), *stacks])


def summary(wheres: Sequence[Where], still: bool = False) -> str:
    """``rank 1 has finished after step 120; ranks 0, 2 and 3 wait in all_reduce after step 120 (train, line 14)``.

    ``still``: nothing moves any more, so that who waits in vain waits for a reason, which is told if it is likely.
    """
    groups = _grouped(wheres, lambda w: (_does(w, 2), w.step, w.place))
    parts = [f"{_names(same, len(wheres))} {_does(same[0], len(same))}{_details(same[0])}" for same in groups]
    return "; ".join(parts) + (_cause(wheres) if still else "")


def _does(where: Where, count: int) -> str:
    has, is_, waits = ("has", "is", "waits") if count == 1 else ("have", "are", "wait")
    if where.state == "called":
        if where.collective:
            return f"{waits} in {where.collective}"
        return f"{is_} in {where.exchange}" if where.exchange else is_
    if where.state == "failed" and where.meeting:
        return f"gave up in {where.meeting}"
    return {
        "finished": f"{has} finished",
        "failed": f"{has} failed ({where.error})",
        "left": f"{has} left by sys.exit",
        "ended": f"{has} ended",
        "setup": f"{is_} setting {'itself' if count == 1 else 'themselves'} up",
        "unpack": f"{'unpacks' if count == 1 else 'unpack'} the function and its data",
        "silent": f"{'gives' if count == 1 else 'give'} no answer",
    }[where.state]


def _details(where: Where) -> str:
    step = f" after step {where.step:,}" if where.step >= 0 else ""
    if where.state == "called" and not where.meeting:
        return f" in {where.place or 'the function'}{step}"
    return step + (f" ({where.place})" if where.place else "")


def _cause(wheres: Sequence[Where]) -> str:
    """The likely one, where some wait for others that are not coming."""
    finished = [w for w in wheres if w.state == "finished"]
    waiting = [w for w in wheres if w.meeting]
    if not waiting or len(finished) + len(waiting) < len(wheres):
        return ""  # one is late, or gone: that is said already
    steps = {w.step for w in wheres if w.step >= 0}
    if finished and (len(steps) > 1 or any(w.exchange for w in waiting)):
        return (
            f". Most likely {_names(finished, 0)} had fewer batches than the others: an uneven number of batches per "
            "rank (nbddp.loader evens it out; DistributedSampler, drop_last=True or torch's Join do it by hand)"
        )
    if finished or len({(w.meeting, w.place) for w in waiting}) > 1:
        return ". Every rank has to call the same collectives in the same order; uneven numbers of batches break that"
    return ""


def _stack(same: Sequence[Where]) -> str:
    first, who = same[0], _names(same, 0)
    does = _does(first, len(same))
    if not first.frames:
        return f"{who} {does}"
    head = f"{who} {does}{'' if first.meeting or first.state != 'called' else ' here'} (most recent call last)"
    return f"{head}\n{stack(first.frames)}"


def stack(frames: Sequence[Frame]) -> str:
    """With the lines of code, outermost first; those of libraries folded, but for the last."""
    lines: list[str] = []
    libraries = library_of([frame.file for frame in frames])
    libraries[-1:] = [""]
    for library, group in itertools.groupby(zip(libraries, frames), key=operator.itemgetter(0)):
        members = [frame for _, frame in group]
        if library and len(members) > 1:
            lines.append(f"  [{len(members)} frames in {library}]")
            continue
        for frame in members:
            lines += _told(frame)
    return "\n".join(lines)


def _told(frame: Frame) -> list[str]:
    linecache.checkcache(frame.file)  # a module may have been edited since
    source = linecache.getline(frame.file, frame.line).strip()
    return [f'  File "{frame.file}", line {frame.line}, in {frame.function}', *([f"    {source}"] if source else [])]


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
