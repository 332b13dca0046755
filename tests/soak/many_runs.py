"""Many runs in one kernel: its memory, fds, threads, semaphores and files, and its fork server's, stay as they are."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.faults.kernels import DriverKernel

SETTLED = 50  # runs after which nothing may grow any more
KERNEL_BYTES = 12 << 20  # a Run that is over keeps nothing; malloc's arenas are never quite still
SERVER_BYTES = 6 << 20


@dataclass(frozen=True)
class Held:
    """What a kernel and its fork server hold.

    Attributes:
        kernel_bytes, server_bytes: of memory, their own (USS).
        kernel_pss, server_pss: and their part of what they share.
        segments: entries of /dev/shm, semaphores among them.
        files: in the temporary folder, sockets included.
    """

    kernel_bytes: int
    server_bytes: int
    kernel_pss: int
    server_pss: int
    kernel_fds: int
    server_fds: int
    threads: int
    segments: int
    files: int


def held(kernel: DriverKernel) -> Held:
    server = kernel.fork_server()
    assert server is not None
    of_kernel, of_server = (psutil.Process(pid).memory_full_info() for pid in (kernel.pid, server))
    return Held(
        kernel_bytes=of_kernel.uss,
        server_bytes=of_server.uss,
        kernel_pss=of_kernel.pss,
        server_pss=of_server.pss,
        kernel_fds=len(os.listdir(f"/proc/{kernel.pid}/fd")),
        server_fds=len(os.listdir(f"/proc/{server}/fd")),
        threads=psutil.Process(kernel.pid).num_threads(),
        segments=len(list(Path(f"/proc/{kernel.pid}/root/dev/shm").iterdir())),
        files=len(list(kernel.seen("tmp").rglob("*"))),
    )


# What a notebook does: trainings, some with DataLoader workers, results, output, failures, stops.
PROGRAMS = ["plain", "workers", "collective", "payload", "failing", "uneven", "swallow", "restarts", "spawned", "plain"]


def do_runs(kernel: DriverKernel, first: int, last: int) -> None:
    for number in range(first, last):
        program = PROGRAMS[number % len(PROGRAMS)]
        run = {"program": program, "nprocs": 2, "token": number, "seconds": 0.02}
        kernel.tell(do="case", case={"runs": [run]})
        kernel.read(30)
        outcome = kernel.read(60)["outcomes"][0]
        right = outcome.get("error") == "RankError" if program == "failing" else outcome.get("good")
        assert right, outcome
        (kernel.seen("snapshots") / f"{number}.pt").unlink(missing_ok=True)


def growth(before: Held, after: Held) -> list[str]:
    """What has grown beyond its tolerance."""
    wrong = []
    for name, old in asdict(before).items():
        more = asdict(after)[name] - old
        limit = {"kernel_bytes": KERNEL_BYTES, "kernel_pss": KERNEL_BYTES}.get(name, 0)
        limit = {"server_bytes": SERVER_BYTES, "server_pss": SERVER_BYTES}.get(name, limit)
        # The part of shared pages falls to whoever is left when ranks end: not a growth of one's own.
        if more > limit and not name.endswith("pss"):
            wrong.append(f"{name}: {old} -> {old + more}; it may grow by {limit}")
    return wrong


def main(runs: int) -> list[str]:
    kernel = DriverKernel("shared")
    try:
        kernel.wait_until_ready()
        settled = min(SETTLED, runs // 2)
        do_runs(kernel, 0, settled)
        before = held(kernel)
        do_runs(kernel, settled, runs)
        after = held(kernel)
    finally:
        kernel.close()
    print(f"{'':14}{f'{settled} runs':>14}{f'{runs} runs':>14}")
    for name, old in asdict(before).items():
        print(f"{name:14}{old:14,}{asdict(after)[name]:14,}")
    return growth(before, after)
