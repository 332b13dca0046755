"""Describes where the ranks are: their stacks in the user's own lines, and one summary line."""

from __future__ import annotations

import importlib.util
import itertools
import linecache
import operator
import os
import re
import site
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from nbddp.launch.dumps import Frame
from nbddp.tracebacks import is_our_file, library_of

_CELL = re.compile(r"[/\\]ipykernel_\d+[/\\]|^<ipython-input|^<stdin>|^<string>")
# Installed and generated files are not the user's; a cell's own file may lie in any temporary folder.
_TORCH = importlib.util.find_spec("torch")
_INSTALLED = (
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    site.getusersitepackages() + os.sep,
    *([os.path.dirname(_TORCH.origin) + os.sep] if _TORCH is not None and _TORCH.origin else []),
)
_GENERATED = re.compile(r"^<|[/\\]torchinductor_")
_COLLECTIVES_FILE = os.path.join("torch", "distributed", "distributed_c10d.py")
# fmt: off
_COLLECTIVES = frozenset((
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "init_process_group", "monitored_barrier", "new_group",
    "recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send", "send_object_list", "split_group",
))
# fmt: on
_BACKWARD_FILE, _BACKWARD = os.path.join("torch", "autograd", "graph.py"), "_engine_run_backward"
_DDP_FILE = os.path.join("torch", "nn", "parallel", "distributed.py")
_DDP_FUNCTIONS = {
    "__init__": "DDP's constructor",
    "_pre_forward": "DDP's forward",
    "_post_forward": "DDP's forward",
    "_sync_buffers": "DDP's forward",
}


@dataclass(frozen=True)
class Location:
    """Where one rank is.

    Attributes:
        state: "called" (in the function), "awaited" (not started yet), "setup", "unpack", "finished", "failed", "left"
            (by sys.exit), "ended", "silent" (it did not answer) or "outside" (the call is for other ranks).
        frames: outermost first, without nbddp's; empty unless the state is "called" or "failed".
        step: the highest step that the rank has logged, -1 before the first.
        error: the error of a failed rank, on one line.
    """

    rank: int
    state: str
    frames: tuple[Frame, ...] = ()
    step: int = -1
    error: str = ""

    @property
    def collective(self) -> str:
        """The collective of torch in which the rank waits for the others, e.g. "all_reduce"; "" if it does not."""
        for file, _, function in self.frames:
            if file.endswith(_COLLECTIVES_FILE) and function in _COLLECTIVES:
                return function
        return ""

    @property
    def exchange(self) -> str:
        """The part of DDP, if any, that exchanges gradients or buffers; the rank may or may not wait in it."""
        for file, _, function in self.frames:
            if file.endswith(_DDP_FILE) and function in _DDP_FUNCTIONS:
                return _DDP_FUNCTIONS[function]
        if self.frames and self.frames[-1].function == _BACKWARD and self.frames[-1].file.endswith(_BACKWARD_FILE):
            return "backward"
        return ""

    @property
    def waiting_in(self) -> str:
        """The collective or exchange in which the rank may wait for the others."""
        return self.collective or self.exchange

    @property
    def place(self) -> str:
        """The user's innermost line: "train, line 14"; with the name of the file if that is not a cell."""
        if not self.frames:
            return ""
        main_file = self.frames[0].file  # a script may itself be an installed file

        def is_users(file: str) -> bool:
            if file == main_file or _CELL.search(file):
                return True
            return not (file.startswith(_INSTALLED) or _GENERATED.search(file))

        libraries = library_of([frame.file for frame in self.frames])
        users = [frame for frame, library in zip(self.frames, libraries) if not library and is_users(frame.file)]
        file, line, function = (users or self.frames)[-1]
        name = "" if _CELL.search(file) else os.path.basename(file)
        return ", ".join(part for part in (function.replace("<module>", ""), name, f"line {line}") if part)


def of_traceback(tb: TracebackType | None) -> tuple[Frame, ...]:
    """Return an exception's frames, outermost first, without nbddp's."""
    frames = []
    while tb is not None:
        code = tb.tb_frame.f_code
        if not is_our_file(code.co_filename):
            frames.append(Frame(code.co_filename, tb.tb_lineno, code.co_name))
        tb = tb.tb_next
    return tuple(frames)


def report(locations: Sequence[Location], stalled: bool = False) -> str:
    """Return the summary line, then each stack, most recent call last; ranks with the same stack share it."""
    parts = [summary(locations, stalled)]
    for same in _grouped(locations, lambda each: (each.state, each.frames)):
        first = same[0]
        part = f"{_ranks(same, 0)} {_activity(first, len(same))}"
        if first.frames:
            here = " here" if first.state == "called" and not first.waiting_in else ""
            part += f"{here} (most recent call last)\n{stack(first.frames)}"
        parts.append(part)
    return "\n\n".join(parts)


def summary(locations: Sequence[Location], stalled: bool = False) -> str:
    """``rank 1 has finished after step 120; ranks 0, 2 and 3 wait in all_reduce after step 120 (train, line 14)``.

    Args:
        stalled: no rank makes progress: a likely reason for the wait is added.
    """
    groups = _grouped(locations, lambda each: (_activity(each, 2), each.step, each.place))
    parts = [f"{_ranks(same, len(locations))} {_activity(same[0], len(same))}{_details(same[0])}" for same in groups]
    return "; ".join(parts) + (_likely_reason(locations) if stalled else "")


def _activity(location: Location, count: int) -> str:
    """Return what ``count`` ranks at this location do, as a predicate."""
    has, is_, waits = ("has", "is", "waits") if count == 1 else ("have", "are", "wait")
    if location.state == "called":
        if location.collective:
            return f"{waits} in {location.collective}"
        return f"{is_} in {location.exchange}" if location.exchange else is_
    if location.state == "failed" and location.waiting_in:
        return f"gave up in {location.waiting_in}"
    return {
        "finished": f"{has} finished",
        "failed": f"{has} failed ({location.error})",
        "left": f"{has} left by sys.exit",
        "ended": f"{has} ended",
        "awaited": f"{has} not been started yet",
        "setup": f"{is_} setting {'itself' if count == 1 else 'themselves'} up",
        "unpack": f"{'unpacks' if count == 1 else 'unpack'} the function and its data",
        "silent": f"{'gives' if count == 1 else 'give'} no answer",
        "outside": f"{'takes' if count == 1 else 'take'} no part in this call",
    }[location.state]


def _details(location: Location) -> str:
    step = f" after step {location.step:,}" if location.step >= 0 else ""
    if location.state == "called" and not location.waiting_in:
        return f" in {location.place or 'the function'}{step}"
    return step + (f" ({location.place})" if location.place else "")


def _likely_reason(locations: Sequence[Location]) -> str:
    """Return why some ranks wait for others that will not join them; "" if that is not known."""
    finished = [each for each in locations if each.state == "finished"]
    outside = [each for each in locations if each.state == "outside"]
    waiting = [each for each in locations if each.waiting_in]
    if not waiting or len(finished) + len(outside) + len(waiting) < len(locations):
        return ""  # a rank is late or has ended, which the summary shows
    if outside:
        return (
            f". A collective of all ranks waits for {_ranks(outside, 0)}, too: call it on all ranks, or give it a "
            f"group: group = dist.new_group({[each.rank for each in waiting]}), on all ranks, in an earlier call"
        )
    steps = {each.step for each in locations if each.step >= 0}
    if finished and (len(steps) > 1 or any(each.exchange for each in waiting)):
        return (
            f". Most likely {_ranks(finished, 0)} had fewer batches than the others: an uneven number of batches per "
            "rank (nbddp.loader evens it out; DistributedSampler, drop_last=True or torch's Join do it by hand)"
        )
    if finished or len({(each.waiting_in, each.place) for each in waiting}) > 1:
        return ". Every rank has to call the same collectives in the same order; uneven numbers of batches break that"
    return ""


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


def _grouped(locations: Sequence[Location], key: Callable[[Location], object]) -> list[list[Location]]:
    groups: dict[object, list[Location]] = {}
    for location in locations:
        groups.setdefault(key(location), []).append(location)
    return list(groups.values())


def _ranks(same: Sequence[Location], world_size: int) -> str:
    ranks = [location.rank for location in same]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == world_size:
        return f"all {world_size} ranks" if world_size > 2 else "both ranks"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
