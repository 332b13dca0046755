"""The table of ranks in numbers and words for every view: a row per rank, a heading per host."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from nbddp.history.history import History, RankProgress
from nbddp.panel.view import RankStatus, Status
from nbddp.text import plain

_SILENT_S = 5.0  # a rank is called silent after this time, if it is also longer than ten of its steps
_SILENT_STEPS = 10
_SLOW = 1.5  # times the median step time
_BEHIND_S = 1.0  # ranks report at slightly different times: only a larger distance, as time, counts as behind
_WORST_FIRST = ("failed", "stopped", "starting", "running", "finished")
_HOST_CHARS = 255
_LOST_HOST = "lost"  # the heading of ranks whose host was lost


@dataclass(frozen=True)
class Row:
    """A row of the table; ``note`` is a problem of the rank ("slow", "3 steps behind", "silent for 12 s") or "".

    Or where it has stopped in the debugger.
    """

    rank: int
    device: str
    state: str
    note: str
    step: int | None
    step_seconds: float | None
    memory_bytes: int | None
    gpu_bytes: int | None
    gpu_total: int | None
    host: str


def rows(status: Status, history: History, now: float) -> list[Row]:
    """One row per rank. ``now``: unix time."""
    times = [rank.step_seconds for rank in history.ranks if rank.step_seconds]
    usual = statistics.median_low(times) if len(times) > 1 else None
    furthest = max((rank.step for rank in history.ranks), default=-1)
    found = []
    for rank in status.ranks:
        progress = history.ranks[rank.rank]
        row = Row(
            rank=rank.rank,
            device=plain(rank.device),
            state=rank.state,
            note=_note(rank, progress, usual, furthest, now) if rank.state == "running" else "",
            step=progress.step if progress.step >= 0 else None,
            step_seconds=progress.step_seconds,
            memory_bytes=rank.memory_bytes,
            gpu_bytes=rank.gpu_bytes,
            gpu_total=rank.gpu_total,
            host=_shown_host(rank),
        )
        found.append(row)
    return found


def _note(rank: RankStatus, progress: RankProgress, usual: float | None, furthest: int, now: float) -> str:
    if rank.debugger:
        return plain(f"debugger: {rank.debugger}")
    if not progress.advanced_at:
        return ""  # a rank that logs nothing is not stuck
    silent = now - (progress.arrived_at or progress.advanced_at)
    if silent > max(_SILENT_S, _SILENT_STEPS * (progress.step_seconds or 0.0)):
        return f"silent for {silent:.0f} s"
    if progress.step >= 0 and (furthest - progress.step) * (progress.step_seconds or 0.0) > _BEHIND_S:
        return f"{furthest - progress.step:,} steps behind"
    if usual and progress.step_seconds and progress.step_seconds > _SLOW * usual:
        return "slow"
    return ""


@dataclass(frozen=True)
class Host:
    """A heading in the table, with a summary of the ranks under it.

    Attributes:
        ranks: the host's ranks, in order.
        state: the worst state of these ranks.
        step: the lowest step of these ranks, None before the first.
        note: problems of these ranks: "rank 3 silent for 12 s, and 1 more"; "" for none.
    """

    name: str
    ranks: list[int]
    state: str
    step: int | None
    note: str


def hosts(rows: list[Row]) -> list[Host]:
    """The hosts of a run on several, in the order of their ranks; empty if all ranks are on one machine."""
    by_host: dict[str, list[Row]] = {}
    if any(row.host for row in rows):
        for row in rows:
            by_host.setdefault(row.host, []).append(row)
    found = []
    for name, there in by_host.items():
        steps = [row.step for row in there if row.step is not None]
        noted = [f"rank {row.rank} {row.note}" for row in there if row.note]
        note = f"{noted[0]}, and {len(noted) - 1} more" if len(noted) > 1 else "".join(noted)
        worst = min((row.state for row in there), key=_WORST_FIRST.index)
        found.append(Host(name or _LOST_HOST, [row.rank for row in there], worst, min(steps, default=None), note))
    return found


def on_host(status: Status, rank: int | None) -> str:
    """``rank 3 on gpu2``; "" if the run is on one machine."""
    host = next((_shown_host(each) for each in status.ranks if each.rank == rank), "")
    return f"rank {rank} on {host}" if host else ""


def _shown_host(rank: RankStatus) -> str:
    return plain(rank.host)[:_HOST_CHARS]
