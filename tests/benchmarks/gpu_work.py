"""The code that a rank runs on a CUDA device."""

from __future__ import annotations

import time

import torch

WAYS = ("no logging", "nbddp.log(loss=loss)", "loss.item()")
# What blocks the host until the device is done: the last two only when the host's memory is not pinned.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def launch_bound(way, steps):
    """Seconds for each step, and how often 200 steps wait for the device."""
    import nbddp

    x = torch.rand(64, device=nbddp.device())
    _loop(way, x, 50)
    _wait_for_the_device()
    began = time.perf_counter()
    _loop(way, x, steps)
    _wait_for_the_device()
    seconds = (time.perf_counter() - began) / steps
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        _loop(way, x, 200)
    events = {event.key: event.count for event in profile.key_averages()}
    # The profiler itself synchronises once, when it stops.
    waits = sum(events.get(name, 0) for name in WAITS)
    return seconds, max(0, waits - 1)


def _wait_for_the_device():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


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
    import nbddp

    places = {"mapped from the notebook": mapped, "pageable": mapped.clone()}
    if nbddp.device().type == "cuda":
        places["pinned"] = mapped.pin_memory()
    for tensor in places.values():
        _copy(tensor)  # the first one sets up
    return {name: _speed(tensor) for name, tensor in places.items()}


def _copy(tensor):
    import nbddp

    return tensor.to(nbddp.device(), non_blocking=True, copy=True)


def _speed(tensor):
    _wait_for_the_device()
    began = time.perf_counter()
    for _ in range(5):
        _copy(tensor)
    _wait_for_the_device()
    return 5 * tensor.nbytes / (time.perf_counter() - began)
