"""Opens a rank's default process group; a group that the user's function opens itself replaces it."""

import datetime
import functools
import inspect
import os
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from nbddp.messages import Place, Settings

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torch's env:// is then a client of the store at MASTER_ADDR


class Groups:
    """This rank's default groups, one after the other.

    Attributes:
        failed: the last one could not be opened.
    """

    def __init__(self, settings: Settings, place: Place, device: torch.device) -> None:
        self._settings, self._place, self._device = settings, place, device
        self._ready_made: Any = None
        self.failed = False
        self._pid = os.getpid()
        self._used = False  # in groups that have been destroyed
        # A gloo group that is freed within milliseconds of a backward hangs (torch 2.13): its destructor holds the GIL.
        self._kept_alive: list[Any] = []

    def open(self, number: int = 0) -> None:
        """Open the default group of this number, with all ranks. One that is open is left for it."""
        settings, backend = self._settings, self._settings.backend or "gloo"
        self.failed = True
        if dist.is_initialized():
            self._leave()
        timeout_s, store = settings.pg_timeout_s, PrefixStore(f"nbddp {number}", self._store())
        timeout = datetime.timedelta(seconds=timeout_s) if timeout_s is not None else None
        options: dict[str, Any] = {"device_id": self._device} if backend == "nccl" else {}  # NCCL connects now
        dist.init_process_group(
            backend, store=store, rank=self._place.rank, world_size=settings.world_size, timeout=timeout, **options
        )
        self._ready_made, self.failed = dist.group.WORLD, False

    def _store(self) -> Store:
        if not self._place.folder:  # a job
            return next(dist.rendezvous("env://"))[0] if self._settings.world_size > 1 else HashStore()  # type: ignore[attr-defined]
        if self._settings.nnodes == 1:  # needs no name and no port
            return FileStore(os.path.join(self._place.folder, "store"), self._settings.world_size)
        assert self._settings.store is not None
        # Only a server uses libuv, and some builds of torch have none.
        return TCPStore(*self._settings.store[:2], is_master=False, wait_for_workers=False, use_libuv=False)

    def _leave(self) -> None:
        self._kept_alive.append(dist.group.WORLD)  # to free it here would fail a slower rank that still connects to it
        dist.destroy_process_group()

    def let_users_open_their_own(self) -> None:
        """Give a call of ``init_process_group`` the group that it asks for: most public programs make one."""
        init, destroy = c10d.init_process_group, c10d.destroy_process_group
        host, port, free_port = self._settings.store or ("", 0, 0)

        @functools.wraps(init)
        def init_process_group(backend: Any = None, init_method: str | None = None, *args: Any, **kwargs: Any) -> None:
            given = inspect.signature(init).bind(backend, init_method, *args, **kwargs).arguments
            self._check(given.get("rank", -1), given.get("world_size", -1))
            if self._ready_made is not None and dist.group.WORLD is self._ready_made:
                self._leave()
            is_ours = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) == (host, str(free_port))
            if is_ours and init_method in (None, "env://"):
                # Not for long: processes that this rank starts host their own store at MASTER_PORT.
                os.environ.update({_AGENT_STORE: "True", "MASTER_PORT": str(port)})
            try:
                init(backend, init_method, *args, **kwargs)
            finally:
                if is_ours:
                    os.environ.pop(_AGENT_STORE, None)
                    os.environ["MASTER_PORT"] = str(free_port)
            self._kept_alive.append(dist.group.WORLD)

        @functools.wraps(destroy)
        def destroy_process_group(*args: Any, **kwargs: Any) -> None:
            self._used = self.used()
            destroy(*args, **kwargs)

        for module in (c10d, dist):
            module.init_process_group, module.destroy_process_group = init_process_group, destroy_process_group  # type: ignore[attr-defined]

    def _check(self, rank: int, world_size: int) -> None:
        """Raise ValueError for a group that would wait forever: a rank or the number of ranks was typed."""
        mine, ranks = self._place.rank, self._settings.world_size
        if ranks == 1 or os.getpid() != self._pid:
            return  # processes that this rank has started may be in the group
        if world_size > ranks or (world_size >= 0 and max(rank, 0) >= world_size):
            raise ValueError(
                f"init_process_group(world_size={world_size}) in a run of {ranks} ranks: write nbddp.world_size(), or "
                "leave world_size and rank out"
            )
        if rank not in (-1, mine) and world_size in (-1, ranks):
            raise ValueError(
                f"init_process_group(rank={rank}) on rank {mine}: write nbddp.rank(), or leave rank and world_size out"
            )

    def used(self) -> bool:
        """Return whether this rank has taken part in a collective."""
        try:
            return self._used or any(collectives_begun().values())
        except (AttributeError, RuntimeError):  # private; a backend that does not count gets the benefit of the doubt
            return True

    def close(self) -> None:
        """Destroy NCCL's group of several ranks. Others end with the process: to destroy them takes 40 to 460 ms."""
        if self._settings.world_size > 1 and dist.is_initialized() and "nccl" in str(dist.get_backend()):
            dist.destroy_process_group()


def collectives_begun() -> dict[str, int]:
    """Return how many collectives this rank has begun, by group. Where all ranks agree, nobody waits for anybody."""
    groups: Any = c10d._world.pg_names.items() if dist.is_initialized() else ()
    return {name: g._get_backend(g._device_types[0])._get_sequence_number_for_group() for g, name in groups}
