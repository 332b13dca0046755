"""Worker side. The ready-made process group, which steps aside for a function that makes its own."""

from __future__ import annotations

import _thread
import contextlib
import datetime
import functools
import multiprocessing.process
import os
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from nbddp.worker import loopback

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_GLOOS_THREADS = 3  # one for its connections, two for the work
_THREADS_END_S = 1.0

_ready_made: Any = None
# A gloo group that is freed within milliseconds of a backward deadlocks (torch 2.13): ~ProcessGroupGloo holds the
# GIL and waits for the run loop's lock, the run loop holds that and waits for the GIL to free the backward's work.
# That is a tutorial's last line, destroy_process_group() while the DDP model still lives.
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
    """Make the default group on the kernel's store, or without a prefix on the one that a launcher's variables name.

    Its keys have a prefix, so that the store's plain keys stay free for a group of the user's own.
    """
    global _ready_made
    timeout = datetime.timedelta(seconds=timeout_s) if timeout_s is not None else None
    options: dict[str, Any] = {}
    if prefix:
        store = _kernels_store(address, file, world_size)
        if timeout is not None:
            store.set_timeout(timeout)
        options["store"] = PrefixStore(prefix, store)
    else:
        loopback.keep_stores_at_home()  # now: it counts this group, and a second one has other keys
    if backend == "nccl":
        options["device_id"] = device  # NCCL connects now, and barrier() knows its device
    _need_threads()
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        **options,
    )
    _ready_made = dist.group.WORLD


def _need_threads() -> None:
    """Raise RuntimeError if the system has none left for gloo.

    Its constructor (torch 2.13) waits for ever for its first thread when it is refused the second. These leave their
    stacks to the C library, which gives them to gloo's.
    """
    gate = _thread.allocate_lock()
    gate.acquire()
    passed: list[int] = []

    def go_through() -> None:
        with gate:
            passed.append(_thread.get_native_id())

    try:
        for _ in range(_GLOOS_THREADS):
            _thread.start_new_thread(go_through, ())
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}: the system refuses a rank the {_GLOOS_THREADS} threads that gloo needs (by ulimit -v, ulimit -u "
            "or the container's limit of processes)"
        ) from None
    finally:
        gate.release()
    deadline = time.monotonic() + _THREADS_END_S
    while (len(passed) < _GLOOS_THREADS or any(map(_is_there, passed))) and time.monotonic() < deadline:
        time.sleep(0)


def _is_there(thread: int) -> bool:
    return os.path.exists(f"/proc/self/task/{thread}")


def _in_our_file(asked: dict[str, Any]) -> dict[str, Any]:
    """What ``init_process_group`` needs to meet there; nothing where there is no file, or no rank is known."""
    global _groups
    places = {name: asked.get(name, -1) for name in ("rank", "world_size")}
    places = {name: int(os.environ.get(name.upper(), -1)) if place == -1 else place for name, place in places.items()}
    if _file is None or -1 in places.values():
        return {}
    _groups += 1
    # A prefix of its own: a second group finds none of the first one's keys.
    store = PrefixStore(f"group {_groups}", _file_store(_file, places["world_size"]))
    if asked.get("timeout") is not None:
        store.set_timeout(asked["timeout"])
    return {**places, "store": store}


def _file_store(file: int, world_size: int) -> FileStore:
    # Opened anew by each rank, so that the store's lock tells them apart; nobody else can open it.
    return FileStore(f"/proc/self/fd/{file}", world_size)


def _kernels_store(address: tuple[str, int], file: int | None, world_size: int) -> Store:
    if file is not None:
        return _file_store(file, world_size)
    # It is there before any rank: nobody waits for anybody else to connect.
    return TCPStore(*address, world_size, is_master=False, wait_for_workers=False)


def let_users_make_their_own() -> None:
    """Wrap ``init_process_group`` so that a call gets the group it asks for.

    Four of seven public DDP programs call it themselves; with a group already up torch raises
    "trying to initialize the default process group twice".
    """
    original = distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: Any = None, init_method: str | None = None, *args: Any, **kwargs: Any) -> None:
        global _ready_made
        if _ready_made is not None and dist.group.WORLD is _ready_made:
            # A slower rank may still be connecting to it, and would fail if it were freed here.
            _kept_alive.append(_ready_made)
            dist.destroy_process_group()
        _ready_made = None
        if _asks_for_our_store(init_method, kwargs.get("store", args[3] if len(args) > 3 else None)):
            if not args and (found := _in_our_file(kwargs)):
                init_method, kwargs = None, kwargs | found
        else:
            # Else torch's handlers wait for ever for a store that they believe an agent hosts.
            os.environ.pop(AGENT_STORE, None)
        _need_threads()
        original(backend, init_method, *args, **kwargs)
        _kept_alive.append(dist.group.WORLD)

    distributed_c10d.init_process_group = init_process_group
    dist.init_process_group = init_process_group
    _remember_what_is_destroyed()
    loopback.keep_stores_at_home()
    _let_children_host_their_own_store()


def stand_aside_too() -> None:
    """Of a group that came up while the function was unpacked, by an object that needs one: as the ready-made one."""
    global _ready_made
    if _ready_made is None and dist.is_initialized():
        _ready_made = dist.group.WORLD


def _remember_what_is_destroyed() -> None:
    """Wrap ``destroy_process_group``: a group takes along how many collectives there were."""
    original = distributed_c10d.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        global _met_before
        _met_before = has_met()
        original(*args, **kwargs)

    distributed_c10d.destroy_process_group = destroy_process_group
    dist.destroy_process_group = destroy_process_group


def has_met() -> bool | None:
    """Has this rank taken part in a collective, in whatever group of several ranks? None: it was in none of those.

    NCCL does not count sends and receives as such; gloo does.
    """
    groups = list(getattr(distributed_c10d._world, "pg_map", ())) if hasattr(distributed_c10d, "_world") else []
    found = [_has_met_in(group) for group in groups if group.size() > 1]
    return True if _met_before or any(found) else False if found else _met_before


_met_before: bool | None = None  # in groups that are destroyed


def _has_met_in(group: Any) -> bool:
    """By the number of collectives that each of the group's backends has begun (torch 2.6 to 2.13)."""
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return any(backend._get_sequence_number_for_group() for backend in backends)
    except (AttributeError, RuntimeError):  # a backend that does not count: nothing can be said against it
        return True


def _let_children_host_their_own_store() -> None:
    """The rank that a script's own ``mp.spawn`` or ``Process`` starts is in no run of ours."""
    original = multiprocessing.process.BaseProcess.start

    @functools.wraps(original)
    def start(self: Any) -> None:
        with _environ_without_our_store():
            original(self)

    multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign]


@contextlib.contextmanager
def _environ_without_our_store() -> Iterator[None]:
    """What a child finds in its environment.

    With the agent's variable it would wait for ever for a store on the port that it chose itself. On our port, which
    ``os.environ.setdefault("MASTER_PORT", ...)`` leaves as it is, it could host none: it gets a port that is free, the
    same as its siblings.
    """
    before = {name: os.environ.get(name) for name in (AGENT_STORE, "MASTER_ADDR", "MASTER_PORT")}
    os.environ.pop(AGENT_STORE, None)
    if _our_address is not None and before["MASTER_PORT"] == _our_address[1]:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())
    try:
        yield
    finally:
        os.environ.update({name: value for name, value in before.items() if value is not None})


@functools.cache
def _free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def close_group() -> None:
    """End what holds device memory. A gloo group ends with its process (its destroy takes 40 ms)."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend()):
        dist.destroy_process_group()


def remember_stores(host: str, port: int, file: int | None) -> None:
    """The kernel's: the address, to tell its url from others, and the file that serves the same."""
    global _our_address, _file
    _our_address, _file = (host, str(port)), file


_our_address: tuple[str, str] | None = None
_file: int | None = None
_groups = 0  # of the function's own, in the file


def _asks_for_our_store(init_method: str | None, store: Any) -> bool:
    if store is not None:
        return False
    if init_method is not None and urlparse(init_method).scheme != "env":
        return False
    return (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")) == _our_address
