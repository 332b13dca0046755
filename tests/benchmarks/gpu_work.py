"""The code that a rank runs on a CUDA device."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

WAYS = ("no logging", "nbddp.log(loss=loss)", "loss.item()")
# What blocks the host until the device is done: the last two only when the host's memory is not pinned.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def all_reduce_on_gpu(path):
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    with open(path, "a") as file:
        file.write(f"{time.monotonic()} 0\n")


def launch_bound(way, steps):
    """Seconds for each step, and how often 200 steps wait for the device."""
    x = torch.rand(64, device="cuda")
    _loop(way, x, 50)
    torch.cuda.synchronize()
    began = time.perf_counter()
    _loop(way, x, steps)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / steps
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        _loop(way, x, 200)
    events = {event.key: event.count for event in profile.key_averages()}
    # The profiler itself synchronises once, when it stops.
    waits = sum(events.get(name, 0) for name in WAITS)
    return seconds, max(0, waits - 1)


def _loop(way, x, steps):
    import nbddp

    for _ in range(steps):
        loss = ((x * 1.01 + 0.1).sin() * x).sum()
        if way == WAYS[1]:
            nbddp.log(loss=loss)
        elif way == WAYS[2]:
            loss.item()


def transfer(mapped):
    """Bytes per second to the device, by where they lie."""
    places = {"mapped from the notebook": mapped, "pageable": mapped.clone(), "pinned": mapped.pin_memory()}
    for tensor in places.values():
        tensor.to("cuda")  # the first one sets up
    return {name: _speed(tensor) for name, tensor in places.items()}


def _speed(tensor):
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        tensor.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    return 5 * tensor.nbytes / (time.perf_counter() - began)
