"""Measures how long an end takes (an error, an interrupt, the kernel's death) and a restart after a rank's death."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from tests.benchmarks.kernel import CellFailed, Kernel, Stamps, prepared, stamps
from tests.benchmarks.measure import Table
from tests.benchmarks.peers import Peer
from tests.benchmarks.settings import Settings

RANKS = 4
LIMIT_S = 20.0  # a peer that has not ended then does not end
OTHERS = ("in a collective", "asleep")


def failure(settings: Settings) -> list[Table]:
    """From the raise on the last rank to the traceback in the cell, the others in a collective or asleep."""
    ranks = _ranks(settings)
    table = Table(
        f"From a raise on 1 of {ranks} ranks to the traceback in the cell", columns=OTHERS, corner="the others are"
    )

    def figures(peer: Peer, kernel: Kernel, file: Stamps) -> None:
        for others in OTHERS:
            if table.failed(peer.name, others):
                continue
            file.clear()
            source = peer.cell("raise_in", str(ranks - 1), repr(file.path), repr(others), nprocs=ranks)
            try:
                done = kernel.end_of(kernel.begin(source), LIMIT_S)
            except CellFailed as error:
                table.fail(peer.name, error, others)
                raise
            # torchrun's is in the output of a command, which shows when that is over.
            table.add(peer.name, (done.error_at or done.ended) - file.last(), others)

    _each(settings, table, figures, ranks)
    settings.show(table)
    return [table]


def stop(settings: Settings) -> list[Table]:
    """From an interrupt to the idle kernel, and to the last rank gone; the ranks are in Python code."""
    ranks = _ranks(settings)
    table = Table(f"From an interrupt to the end, {ranks} ranks", columns=("kernel idle", "ranks gone"))

    def figures(peer: Peer, kernel: Kernel, file: Stamps) -> None:
        begun, pids = _going(peer, kernel, file, ranks)
        interrupted = time.monotonic()
        kernel.interrupt()
        kernel.end_of(begun, LIMIT_S)
        table.add(peer.name, time.monotonic() - interrupted, "kernel idle")
        if peer.once:
            table.fail(peer.name, "kept", "ranks gone")
        else:
            table.add(peer.name, _until_gone(pids) - interrupted, "ranks gone")

    _each(settings, table, figures, ranks)
    settings.show(table)
    return [table]


def death(settings: Settings) -> list[Table]:
    """From SIGKILL to the kernel to the last of its ranks gone."""
    ranks = _ranks(settings)
    table = Table(f"From the kernel's SIGKILL to the last of {ranks} ranks gone")

    def figures(peer: Peer, kernel: Kernel, file: Stamps) -> None:
        _, pids = _going(peer, kernel, file, ranks)
        kernel.started()  # for the end of what stays
        killed = time.monotonic()
        kernel.kill()
        table.add(peer.name, _until_gone(pids) - killed)

    _each(settings, table, figures, ranks, anew=True)
    settings.show(table)
    return [table]


def restart(settings: Settings) -> list[Table]:
    """From a rank's SIGKILL to the first step that is resumed from a snapshot, where one restart is allowed."""
    table = Table("From a rank's death to the first resumed step, 2 ranks")
    peers = [peer for peer in settings.peers if peer.restarts]

    def figures(peer: Peer, kernel: Kernel, file: Stamps) -> None:
        file.clear()
        snapshot = file.path + ".pt"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(snapshot)
        kernel.cell(peer.cell("resume", repr(file.path), repr(snapshot), "True", nprocs=2, how="restarts"))
        died = max(at for at, words in file.lines() if words[1:] == ["1", "2", "first"])
        resumed = [at for at, words in file.lines() if words[3] == "resumed"]
        if not resumed:
            raise CellFailed("it did not resume")
        table.add(peer.name, min(resumed) - died)

    _each(settings, table, figures, 2, peers=peers, how="restarts")
    settings.show(table)
    return [table]


def _ranks(settings: Settings) -> int:
    return (settings.ranks or [RANKS])[0]


def _each(
    settings: Settings,
    table: Table,
    figures: Callable[[Peer, Kernel, Stamps], None],
    ranks: int,
    *,
    anew: bool = False,
    peers: list[Peer] | None = None,
    how: str = "call",
) -> None:
    """Once per round and candidate, in its kernel after a first run; in a new one each round if it does not last."""
    settings.keep(table)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(stamps())
        kernels: dict[str, Kernel] = {}
        for _ in range(settings.rounds):
            for peer in settings.peers if peers is None else peers:
                if any(table.failed(peer.name, column) for column in table.columns if column != "ranks gone"):
                    continue
                try:
                    if anew:
                        with prepared(peer, ranks) as kernel:
                            figures(peer, kernel, file)
                    else:
                        if peer.name not in kernels:
                            kernels[peer.name] = stack.enter_context(prepared(peer, ranks))
                        figures(peer, kernels[peer.name], file)
                except Exception as error:  # a peer's
                    table.fail(peer.name, error, _first_without(table, peer.name))


def _first_without(table: Table, name: str) -> object:
    return next((column for column in table.columns if table.median(name, column) is None), table.columns[0])


def _going(peer: Peer, kernel: Kernel, file: Stamps, ranks: int):  # type: ignore[no-untyped-def]
    """A run under way: the cell, and its ranks' processes."""
    file.clear()
    begun = kernel.begin(peer.cell("go_on", repr(file.path), nprocs=ranks))
    file.wait_for(ranks)
    time.sleep(0.2)
    return begun, [int(words[0]) for _, words in file.lines()]


def _until_gone(pids: list[int]) -> float:
    """When the last of these processes was gone; a zombie that nobody has waited for is."""
    deadline = time.monotonic() + LIMIT_S
    while left := [pid for pid in pids if _is_alive(pid)]:
        if time.monotonic() > deadline:
            raise CellFailed(f"{len(left)} of {len(pids)} ranks stay")
        time.sleep(0.002)
    return time.monotonic()


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
