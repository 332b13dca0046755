"""Says where the ranks are: one line that sums up, then each stack in the user's own lines; and notices a stall."""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbddp.kernel.crew import Crew
from nbddp.kernel.rank_state import RankState
from nbddp.process import dumps
from nbddp.text import first_line, ranks_text
from nbddp.tracebacks import users_innermost

STALL_AFTER_S = 60.0  # without progress, and again each time it has lasted twice as long
_STANDS_S = 2.0  # without progress, until a likely reason is said
_RECHECK_S = 0.2
_CELL = re.compile(r"/ipykernel_\d+/|^<ipython-input|^<stdin>|^<string>")
_MODULE = re.compile("<module>|<cell line: .*>")
_COLLECTIVES_FILE = os.path.join("torch", "distributed", "distributed_c10d.py")
_COLLECTIVE = re.compile(
    r"all_\w+|barrier|batch_isend_irecv|broadcast\w*|gather\w*|init_process_group|monitored_barrier|new_group|"
    r"recv\w*|reduce\w*|scatter\w*|send\w*|split_group"
)
_WORKER_FILE = os.path.join("torch", "utils", "data", "_utils", "worker.py")
_SAVES = re.compile(r"torch/serialization\.py:save$|/safetensors/torch\.py:save|:save_(pretrained|checkpoint|model)$")
_BACKWARD_FILE, _BACKWARD = os.path.join("torch", "autograd", "graph.py"), "_engine_run_backward"
_DDP_FILE = os.path.join("torch", "nn", "parallel", "distributed.py")
_DDP_FUNCTIONS = {"__init__", "_pre_forward", "_post_forward", "_sync_buffers"}


@dataclass(frozen=True)
class Location:
    """Where one rank is.

    Attributes:
        state: "running" (in the function), "setup", "unpack", "finished", "failed", "left" (by sys.exit), "ended",
            "silent" (it did not answer) or "outside" (the order is for other ranks).
        frames: outermost first, without nbddp's; empty unless the state is "running" or "failed".
        step: the highest step that the rank has logged, -1 before the first.
        error: the error of a failed rank, on one line.
        left_after: of a finished rank, as in its Report.
    """

    rank: int
    state: str
    frames: tuple[dumps.Frame, ...] = ()
    step: int = -1
    error: str = ""
    left_after: int = 0

    @property
    def collective(self) -> str:
        """The collective of torch in which the rank waits for the others, e.g. "all_reduce"; "" if it does not."""
        return next(filter(_COLLECTIVE.fullmatch, self._functions_of(_COLLECTIVES_FILE)), "")

    @property
    def exchange(self) -> str:
        """The part of DDP, if any, that exchanges gradients or buffers; the rank may or may not wait in it."""
        if of_ddp := [function for function in self._functions_of(_DDP_FILE) if function in _DDP_FUNCTIONS]:
            return "DDP's constructor" if of_ddp[0] == "__init__" else "DDP's forward"
        if self.frames and self.frames[-1].function == _BACKWARD and self.frames[-1].file.endswith(_BACKWARD_FILE):
            return "backward"
        return ""

    @property
    def waiting_in(self) -> str:
        """The collective or exchange in which the rank may wait for the others."""
        return self.collective or self.exchange

    @property
    def saves(self) -> bool:
        """Whether the rank writes a file of weights."""
        return any(_SAVES.search(f"{frame.file}:{frame.function}") for frame in self.frames)

    @property
    def in_a_worker(self) -> bool:
        """Whether the frames are those of a DataLoader worker for which the rank waits."""
        return bool(self._functions_of(_WORKER_FILE))

    def _functions_of(self, file: str) -> list[str]:
        return [frame.function for frame in self.frames if frame.file.endswith(file)]

    @property
    def place(self) -> str:
        """The user's innermost line: "train, line 14"; with the name of the file if that is not a cell."""
        if not self.frames:
            return ""
        file, line, function = self.frames[users_innermost([frame.file for frame in self.frames])]
        name = "" if _CELL.search(file) else os.path.basename(file)
        return ", ".join(part for part in (_MODULE.sub("", function), name, f"line {line}") if part)


class Locator:
    """Finds out where the ranks of an order are, on the thread that follows it.

    Attributes:
        hang: what is known about a stall; "" while there is none.
    """

    def __init__(self, crew: Crew, asked: Sequence[RankState]) -> None:
        self._crew, self._asked = crew, {rank.number for rank in asked}
        self._due_s = STALL_AFTER_S
        self.hang = ""

    def locate(self, wait_s: float = 1.0) -> list[Location]:
        """Return where each rank is; it takes that long if one of them does not answer."""
        found, steps = self._crew.stacks(wait_s), self._crew.steps()
        return [self._location(rank, found.get(rank.number, ""), steps[rank.number]) for rank in self._crew.ranks]

    def report(self) -> str:
        """Return the line that sums up, with a likely reason for a wait if no rank moves; and each stack.

        Most recent call last; ranks with the same stack share it.
        """
        found = self.locate()
        parts = [summary(found, stalled=self._stands(found))]
        for same in _grouped(found, lambda each: (each.state, each.frames)):
            first = same[0]
            part = f"{_ranks(same, 0)} {_activity(first, len(same))}"
            if first.frames:
                here = " here" if first.state == "running" and not first.waiting_in else ""
                part += f"{here} (most recent call last)\n{dumps.stack(first.frames)}"
            parts.append(part)
        return "\n\n".join(parts)

    def summary(self, wait_s: float) -> str:
        """Return the line that sums up, with a likely reason if nothing has moved for a while."""
        found = self.locate(wait_s)
        return summary(found, stalled=self._stands(found, wait_s))

    def _stands(self, found: Sequence[Location], *wait_s: float) -> bool:
        if time.monotonic() < self._crew.moved_at + _STANDS_S:
            return False
        time.sleep(_RECHECK_S)
        return self.locate(*wait_s) == found

    def look_for_a_stall(self) -> None:
        """Say in ``hang`` where the ranks are, if nothing has been logged or printed for long."""
        quiet_s = time.monotonic() - self._crew.moved_at
        if quiet_s < STALL_AFTER_S:
            self._due_s, self.hang = STALL_AFTER_S, ""
        elif quiet_s >= self._due_s:
            self._due_s = 2 * quiet_s
            self.hang = f"Nothing has been logged or printed for {quiet_s:.0f} s: {self.report()}"

    def _location(self, rank: RankState, dump: str, step: int) -> Location:
        if rank.number not in self._asked:
            return Location(rank.number, "outside", step=step)
        if failure := rank.failure:
            state = "left" if failure.code is not None else "failed"
            text = failure.text if failure.text.startswith(failure.kind) else f"{failure.kind}: {failure.text}"
            return Location(rank.number, state, tuple(map(dumps.Frame._make, failure.frames)), step, first_line(text))
        if rank.over:
            if rank.report is None:
                return Location(rank.number, "ended", step=step)
            return Location(rank.number, "finished", step=step, left_after=rank.report.left_after)
        if not rank.interruptible:
            return Location(rank.number, "unpack" if rank.ready else "setup")
        return Location(rank.number, "running" if dump else "silent", dumps.main_thread(dump), step)


def summary(locations: Sequence[Location], stalled: bool = False) -> str:
    """``rank 1 finished after step 120; ranks 0, 2, and 3 are waiting in all_reduce after step 120 (train, line 14)``.

    Args:
        stalled: no rank makes progress: a likely reason for the wait is added.
    """
    groups = _grouped(locations, lambda each: (_activity(each, 2), each.step, each.place))
    parts = [f"{_ranks(same, len(locations))} {_activity(same[0], len(same))}{_details(same[0])}" for same in groups]
    return "; ".join(parts) + (_likely_reason(locations) if stalled else "")


def _activity(location: Location, count: int) -> str:
    """Return what ``count`` ranks at this location do, as a predicate."""
    is_ = "is" if count == 1 else "are"
    if location.state == "running":
        if location.collective:
            return f"{is_} waiting in {location.collective}"
        return f"{is_} in {location.exchange}" if location.exchange else is_
    if location.state == "failed" and location.waiting_in:
        return f"failed in {location.waiting_in}"
    return {
        "failed": f"failed ({location.error})",
        "left": "called sys.exit",
        "setup": f"{is_} still starting up",
        "unpack": f"{is_} unpacking the function and its data",
        "silent": f"{is_} not responding",
        "outside": f"{is_} not part of this call",
    }.get(location.state, location.state)


def _details(location: Location) -> str:
    step = f" after step {location.step:,}" if location.step >= 0 else ""
    if location.state == "running" and not location.waiting_in:
        place = location.place or "your function"
        if location.in_a_worker:
            return f" waiting for a DataLoader worker, which is {'at' if place.startswith('line ') else 'in'} {place}"
        return f" {'at' if place.startswith('line ') else 'in'} {place}{',' * bool(step)}{step}"
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
            f". A collective over all ranks also waits for {_ranks(outside, 0)}: call it on all ranks, or pass it a "
            f"group that all ranks created earlier: dist.new_group({[each.rank for each in waiting]})"
        )
    if left := [each for each in finished if each.left_after]:
        where = f"(break or return) after batch {left[0].left_after:,}"
        return (
            f". Most likely, {_ranks(left, 0)} left the loop early {where}. All ranks have to leave it "
            "after the same batch: decide together with nbddp.all_reduce(float(stop), 'max')"
        )
    steps = {each.step for each in locations if each.step >= 0}
    if finished and (len(steps) > 1 or any(each.exchange for each in waiting)):
        return (
            f". Most likely, {_ranks(finished, 0)} had fewer batches than the others. nbddp.loader without exact=True "
            "gives every rank the same number. With another loader, use DistributedSampler, drop_last=True, or "
            "nbddp.join(model)"
        )
    if finished or len({(each.waiting_in, each.place) for each in waiting}) > 1:
        return ". Every rank has to call the same collectives in the same order; uneven numbers of batches break that"
    return ""


def _grouped(locations: Sequence[Location], key: Callable[[Location], object]) -> list[list[Location]]:
    groups: dict[object, list[Location]] = {}
    for location in locations:
        groups.setdefault(key(location), []).append(location)
    return list(groups.values())


def _ranks(same: Sequence[Location], world_size: int) -> str:
    if len(same) == world_size > 1:
        return f"all {world_size} ranks" if world_size > 2 else "both ranks"
    return ranks_text([location.rank for location in same])
