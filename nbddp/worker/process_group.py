"""Opens a rank's default process group, and replaces it if the user's function opens its own."""

from __future__ import annotations

import _thread
import contextlib
import datetime
import functools
import multiprocessing.process
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from nbddp import wire
from nbddp.worker import agreement, group_sockets, user_stores

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_GLOO_THREADS = 3  # one for its connections, two for the work
_THREADS_END_S = 1.0

_ready_made: Any = None
# A gloo group that is freed within milliseconds of a backward deadlocks (torch 2.13): ~ProcessGroupGloo holds the
# GIL and waits for the run loop's lock; the run loop holds that lock and waits for the GIL to free the backward's work.
# Tutorials end with such a line: destroy_process_group() while the DDP model is still alive.
_kept_alive: list[Any] = []


def open_group(
    *,
    backend: str,
    rank: int,
    world_size: int,
    device: torch.device,
    address: tuple[str, int],
    file: int | None,
    prefix: str,
    timeout_s: float | None,
) -> None:
    """Open the default group on the notebook kernel's store, or without a prefix on the store of a launcher.

    The prefix leaves the store's plain keys to a group that the user's function opens.
    """
    global _ready_made
    timeout = datetime.timedelta(seconds=timeout_s) if timeout_s is not None else None
    options: dict[str, Any] = {}
    if prefix:
        store = _file_store(file, world_size) if file is not None else _tcp_store(address, world_size)
        if timeout is not None:
            store.set_timeout(timeout)
        options["store"] = PrefixStore(prefix, store)
    else:
        user_stores.listen_on_loopback()  # before this group, so that it counts and a second one gets other keys
    if backend == "nccl":
        options["device_id"] = device  # NCCL connects now, and barrier() knows its device
    _require_threads()
    with _without_gloos_line():
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, **options)
    _ready_made = dist.group.WORLD


@contextlib.contextmanager
def _without_gloos_line() -> Iterator[None]:
    """Drop gloo's line on stdout, "[Gloo] Rank 0 is connected to 1 peer ranks": torch 2.8 prints it, 2.11 does not."""
    if torch.__version__ >= (2, 11):  # type: ignore[operator]
        yield
        return
    sys.stdout.flush()
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def open_group_of(job: wire.Job, device: torch.device, file: int | None, number: int = 0) -> None:
    """Open the job's default group; a session's next one has a number, and so keys of its own."""
    assert job.backend is not None
    open_group(
        backend=job.backend,
        rank=job.rank,
        world_size=job.world_size,
        device=device,
        address=(job.store_host, job.store_port),
        file=file,
        prefix=f"{job.store_prefix} {number}" if number else job.store_prefix,
        timeout_s=job.pg_timeout_s,
    )


def replace_group(job: wire.Job, device: torch.device, number: int) -> None:
    """Leave all groups, and open the session's group with this number."""
    before = dist.group.WORLD
    if dist.is_initialized():
        _leave_all_groups()
    _kept_alive[:] = [before]  # and free those before it, whose last backward is long over
    group_sockets.forget()
    hook = sys.excepthook  # torch puts its own around it with each group, and never takes one away
    open_group_of(job, device, _file, number)
    sys.excepthook = hook


def _leave_all_groups() -> None:
    global _met_before
    abort = getattr(distributed_c10d, "_abort_process_group", None)  # private; torch 2.13
    if abort is not None and uses_nccl():
        _met_before = has_met()
        abort()  # to destroy the groups waits for collectives that other ranks never joined
    else:
        dist.destroy_process_group()


def uses_nccl() -> bool:
    """Return whether the default group has NCCL, alone or for some devices."""
    return dist.is_initialized() and "nccl" in str(dist.get_backend())


def abort_nccl() -> None:
    """Release this rank from a collective of NCCL. Called on any thread; the groups are of no use afterwards.

    An aborted collective leaves the device, and what waits for the device goes on: ``x.item()``, for example.
    """
    if not uses_nccl():
        return
    for group in list(getattr(distributed_c10d._world, "pg_map", ())):
        if "nccl" in str(dist.get_backend(group)) and hasattr(group, "abort"):  # private; torch 2.13
            group.abort()


def _require_threads() -> None:
    """Raise RuntimeError if the system does not allow the threads that gloo needs.

    gloo's constructor (torch 2.13) waits forever for its first thread if the second cannot be started. The threads
    started here leave their stacks to the C library, which reuses them for gloo's.
    """
    gate = _thread.allocate_lock()
    gate.acquire()
    started: list[int] = []

    def wait_at_gate() -> None:
        with gate:
            started.append(_thread.get_native_id())

    try:
        for _ in range(_GLOO_THREADS):
            _thread.start_new_thread(wait_at_gate, ())
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}: the system does not let a rank start the {_GLOO_THREADS} threads that gloo needs "
            "(ulimit -v, ulimit -u, or the container's limit of processes)"
        ) from None
    finally:
        gate.release()
    deadline = time.monotonic() + _THREADS_END_S
    while len(started) < _GLOO_THREADS or any(os.path.exists(f"/proc/self/task/{thread}") for thread in started):
        if time.monotonic() >= deadline:
            return
        time.sleep(0)


def _options_for_our_store(asked: dict[str, Any]) -> dict[str, Any]:
    """Options that make ``init_process_group`` use our store; empty if torch finds it as it finds torchrun's.

    That is so on other hosts, except in a session: what its first call opens and destroys leaves keys to the second.
    """
    global _groups
    ranks = {name: asked.get(name, -1) for name in ("rank", "world_size")}
    ranks = {name: int(os.environ.get(name.upper(), -1)) if value == -1 else value for name, value in ranks.items()}
    if (_file is None and not _stays) or -1 in ranks.values():
        return {}
    _groups += 1
    # With a prefix for each group, so that a second group does not find the first one's keys.
    size = ranks["world_size"]
    ours = _file_store(_file, size) if _file is not None else _tcp_store(_our_address, size)
    store = PrefixStore(f"group {_groups}", ours)
    if asked.get("timeout") is not None:
        store.set_timeout(asked["timeout"])
    return {**ranks, "store": store}


def _file_store(file: int, world_size: int) -> FileStore:
    # Each rank opens the file again, so that the store's lock separates the ranks; no other user can open it.
    return FileStore(f"/proc/self/fd/{file}", world_size)


def _tcp_store(address: tuple[str, Any], world_size: int) -> Store:
    # It exists before any rank, so no rank waits for the others to connect.
    host, port = address
    return TCPStore(host, int(port), world_size, is_master=False, wait_for_workers=False)


def wrap_init_process_group() -> None:
    """Wrap ``init_process_group`` so that a user's call gets the group it asks for.

    Four of seven public DDP programs call it themselves; with a group already up torch raises
    "trying to initialize the default process group twice".
    """
    original = distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: Any = None, init_method: str | None = None, *args: Any, **kwargs: Any) -> None:
        global _ready_made
        if _ready_made is not None and dist.group.WORLD is _ready_made:
            # Freeing the group here would fail a slower rank that is still connecting to it.
            _kept_alive.append(_ready_made)
            dist.destroy_process_group()
        _ready_made = None
        if _asks_for_our_store(init_method, kwargs.get("store", args[3] if len(args) > 3 else None)):
            if not args and (options := _options_for_our_store(kwargs)):
                init_method, kwargs = None, kwargs | options
        else:
            # Otherwise torch's handlers wait forever for a store that they expect an agent to host.
            os.environ.pop(AGENT_STORE, None)
        _require_threads()
        original(backend, init_method, *args, **kwargs)
        _kept_alive.append(dist.group.WORLD)
        agreement.group_is_open()

    distributed_c10d.init_process_group = init_process_group
    dist.init_process_group = init_process_group
    _wrap_destroy_process_group()
    user_stores.listen_on_loopback()
    _wrap_process_start()


def adopt_group() -> None:
    """Treat a group that an object opened while the function was unpacked like the ready-made one."""
    global _ready_made
    if _ready_made is None and dist.is_initialized():
        _ready_made = dist.group.WORLD


def _wrap_destroy_process_group() -> None:
    """Keep the answer of :func:`has_met` before a group is destroyed, since the group counts its collectives."""
    original = distributed_c10d.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        global _met_before
        _met_before = has_met()
        original(*args, **kwargs)

    distributed_c10d.destroy_process_group = destroy_process_group
    dist.destroy_process_group = destroy_process_group


def has_met() -> bool | None:
    """Has this rank taken part in a collective of several ranks, in any group? None: it was in no such group.

    gloo counts sends and receives as collectives; NCCL does not.
    """
    groups = list(getattr(distributed_c10d._world, "pg_map", ())) if hasattr(distributed_c10d, "_world") else []
    found = [_has_met_in(group) for group in groups if group.size() > 1]
    return True if _met_before or any(found) else False if found else _met_before


_met_before: bool | None = None  # in groups that have been destroyed


def _has_met_in(group: Any) -> bool:
    """Has any of the group's backends begun a collective? (torch 2.6 to 2.15)"""
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return any(backend._get_sequence_number_for_group() for backend in backends)
    except (AttributeError, RuntimeError):  # a backend that does not count gets the benefit of the doubt
        return True


def _wrap_process_start() -> None:
    """Start the user's processes without this run's store, so that a script's own ``mp.spawn`` can host another one.

    With the agent's variable, the child would wait forever for a store on the port that it chose itself. Our port,
    which ``os.environ.setdefault("MASTER_PORT", ...)`` does not replace, is in use: all children get the same free one.
    """
    original = multiprocessing.process.BaseProcess.start

    @functools.wraps(original)
    def start(self: Any) -> None:
        before = {name: os.environ.get(name) for name in (AGENT_STORE, "MASTER_ADDR", "MASTER_PORT")}
        os.environ.pop(AGENT_STORE, None)
        if _our_address[1] and before["MASTER_PORT"] == _our_address[1]:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())
        try:
            original(self)
        finally:
            os.environ.update({name: value for name, value in before.items() if value is not None})

    multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign]


@functools.cache
def _free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def close_group() -> None:
    """Destroy a group that holds device memory. A gloo group ends with its process (destroying it takes 40 ms)."""
    if uses_nccl():
        dist.destroy_process_group()


def remember_stores(job: wire.Job, file: int | None) -> None:
    """Remember the address of the run's store, to recognise it, and the file that serves as a store."""
    global _our_address, _file, _stays
    _our_address, _file, _stays = (job.store_host, str(job.store_port)), file, job.stays


_our_address: tuple[str, str] = ("", "")
_file: int | None = None
_stays = False  # this rank is a session's
_groups = 0  # opened by the user's function in the file


def _asks_for_our_store(init_method: str | None, store: Any) -> bool:
    if store is not None:
        return False
    if init_method is not None and urlparse(init_method).scheme != "env":
        return False
    return (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")) == _our_address
