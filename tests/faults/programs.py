"""What the ranks run while faults are applied; every program ends by itself with a value that can be checked."""

from __future__ import annotations

from typing import Any

BIG = 50_000_000  # float32 numbers: 200 MB
FLOOD_LINES = 15_000  # of 1000 bytes, by each rank
ENDLESS_S = 300.0

# A cell. ``token`` tells one case's values from another's.
CELL = f"""
import ctypes, itertools, os, resource, time, nbddp, torch

class Slow(torch.utils.data.Dataset):
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.full((100,), float(i))

def hold_the_gil(seconds):
    "In C, without a look at signals: a second lock of a mutex that is locked."
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    until = time.time() + seconds
    spec = (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9))
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, spec)

def steps(seconds): return max(1, int(seconds / 0.01))

def plain(token, seconds):
    total = 0.0
    for step in nbddp.progress(range(steps(seconds))):
        time.sleep(0.01)
        total = nbddp.reduce(1.0, "sum")
        nbddp.log(loss=1 / (step + 1), total=total)
        nbddp.log({{"mean": float(nbddp.rank())}}, reduce="mean")
        if step % 5 == 0: print("step", step)
    return token, nbddp.rank(), total

def workers(token, seconds):
    count, seen = max(8, int(seconds / 0.002)), 0
    for batch in torch.utils.data.DataLoader(Slow(count), batch_size=4, num_workers=2):
        seen += len(batch)
    return token, nbddp.rank(), seen - count

def gil(token, seconds):
    if nbddp.rank() == token % nbddp.world_size(): hold_the_gil(seconds)
    nbddp.barrier()
    return token, nbddp.rank(), "held"

def swallow(token, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            time.sleep(0.02)
        except BaseException:
            pass
    return token, nbddp.rank(), "swallowed"

def collective(token, seconds):
    if nbddp.rank() == token % nbddp.world_size(): time.sleep(seconds)
    return token, nbddp.rank(), nbddp.reduce(1.0, "sum")

def payload(token, seconds, data):
    time.sleep(seconds)
    return token, nbddp.rank(), float(data[::1000].sum())

def result(token, seconds):
    time.sleep(seconds)
    big = nbddp.rank() == token % nbddp.world_size()
    return token, nbddp.rank(), torch.full(({BIG},), float(token)) if big else "small"

def flood(token, seconds):
    for i in range({FLOOD_LINES}): print(f"{{i:06d}}" + "x" * 994)
    time.sleep(seconds)
    return token, nbddp.rank(), "flooded"

def uneven(token, seconds):
    if nbddp.rank() != token % nbddp.world_size(): time.sleep(seconds)
    return token, nbddp.rank(), "uneven"

def failing(token, seconds):
    time.sleep(min(seconds, 1.0))
    if nbddp.rank() == token % nbddp.world_size(): raise ValueError(f"by itself {{token}}")
    nbddp.barrier()

def restarts(token, seconds, path):
    state = nbddp.load_snapshot(path)
    for step in range(state["step"] if state else 0, steps(seconds)):
        time.sleep(0.01)
        nbddp.reduce(1.0)
        nbddp.log(loss=float(step), step=step)
        if step % 5 == 4: nbddp.save_snapshot(path, step=step + 1)
    return token, nbddp.rank(), steps(seconds)

def spawned(rank, token, seconds):
    print("rank", rank, token)
    time.sleep(seconds)

def snapshots(token, seconds, path):
    for step in range(steps(seconds)):
        nbddp.save_snapshot(path, step=step, data=torch.full((100_000,), float(step)))
        nbddp.barrier()
        time.sleep(0.01)
    return token, nbddp.rank(), "saved"

def hog(token, seconds, how, limit):
    kept = []
    if nbddp.rank() == token % nbddp.world_size():
        time.sleep(seconds)
        if limit:
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + limit, resource.RLIM_INFINITY))
        while len(kept) < 400:
            if how == "torch": kept.append(torch.ones(5_000_000))
            elif how == "bytes": kept.append(b"x" * 20_000_000)
            else: kept.append([float(i) for i in range(600_000)])
    nbddp.barrier()
    return token, nbddp.rank(), "fed"

def nothing(token): return token
"""


def good(program: str, nprocs: int, token: int, seconds: float, values: list[Any]) -> bool:
    """Is that what each rank had to return?"""
    rests = [value[2] for value in values]
    if [value[:2] for value in values] != [(token, rank) for rank in range(nprocs)]:
        return False
    if program == "result":
        big = rests.pop(token % nprocs)
        return len(big) == BIG and bool(big[0] == big[-1] == token) and rests == ["small"] * (nprocs - 1)
    expected: Any = {
        "plain": float(nprocs),
        "workers": 0,
        "gil": "held",
        "swallow": "swallowed",
        "collective": float(nprocs),
        "payload": BIG / 1000,
        "flood": "flooded",
        "uneven": "uneven",
        "restarts": max(1, int(seconds / 0.01)),
        "snapshots": "saved",
        "hog": "fed",
    }[program]
    return rests == [expected] * nprocs
