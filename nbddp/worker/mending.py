"""After a failure: leaves collectives that others won't join, and makes DDP models usable again."""

import contextlib
import functools
import os
import socket
import traceback
import weakref
from collections.abc import Mapping
from typing import Any

from torch._C._distributed_c10d import _register_comm_hook
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from nbddp.helpers.model import accumulated, uncompiled

_INET = (socket.AF_INET, socket.AF_INET6)
_BOUND_TO_GROUPS = {"ProcessGroup", "DeviceMesh", "FullyShardedDataParallel", "FSDPModule", "ZeroRedundancyOptimizer"}
_Sockets = set[tuple[int, str]]  # descriptor and name

_sockets: _Sockets = set()  # of process groups
models: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of DDP, and what their reducers got


def remember() -> None:
    """From now on, remember the connections of each process group, and each DDP model."""
    make, init = c10d._new_process_group_helper, DistributedDataParallel._ddp_init_helper

    @functools.wraps(make)
    def making(*args: Any, **kwargs: Any) -> Any:
        before = _open_sockets()
        try:
            return make(*args, **kwargs)
        finally:
            _sockets.update(_open_sockets() - before)

    @functools.wraps(init)
    def initializing(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        init(model, *args, **kwargs)  # type: ignore[no-untyped-call]
        models[model] = args

    # Not DDP's __init__ itself, whose warnings name the file of the function that called it.
    c10d._new_process_group_helper, DistributedDataParallel._ddp_init_helper = making, initializing  # type: ignore[assignment, method-assign]


def release(_: object = None) -> None:
    """Leave a collective that others won't join: gloo ends it when its connections are shut for reading."""
    for fd, _name in _sockets & _open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
            # gloo aborts without its listener
            if each.family in _INET and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                each.shutdown(socket.SHUT_RD)


def end_loaders_of(error: BaseException) -> None:
    """End the DataLoader workers of loops that the error has left.

    Its traceback, which the debugger may want, keeps them; and when it's freed, torch may wait 5 s for each of them.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in list(frame.f_locals.values()):
            if isinstance(value, _MultiProcessingDataLoaderIter) and not getattr(value, "_persistent_workers", True):
                for worker in getattr(value, "_workers", ()):  # its __init__ may have failed
                    worker.terminate()


def state() -> dict[str, int]:
    """Return what must be the same on all ranks, besides the number of their collectives."""
    return {
        "micro-batches": sum(accumulated.values()),
        # The last forward had a no_sync() or no_grad(): the next one broadcasts no buffers.
        "unsynced": sum(
            not each.require_forward_param_sync for each in models if each.broadcast_buffers and each.modules_buffers
        ),
    }


def mend(names: Mapping[str, Any], before: Any, *, replaced: bool) -> list[str]:
    """Give DDP models a reducer that isn't in the middle of a backward pass.

    Args:
        names: of the user.
        before: the default group that was left after the failure.
        replaced: this failure ended a group, since ranks were apart.

    Returns:
        The names of what can't go on. It raises when it's used.
    """
    known, cannot = list(c10d._world.pg_map), set()
    if replaced:
        accumulated.clear()
    for model in list(models):
        model.require_backward_grad_sync = True
        model.require_forward_param_sync = replaced or model.require_forward_param_sync
        model._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]
        group = model.process_group
        if group is before and before is not None and group not in known:
            group = c10d.group.WORLD
        if group not in known or (group is not model.process_group and _has_state(model)):
            cannot.add(model)
            del models[model]
            model._remove_autograd_hooks()  # or they'd reduce the gradients of a model of the same parameters, too
            model.register_forward_pre_hook(_refuse, prepend=True)
        elif group is model.process_group and (not model.static_graph or _has_state(model)):
            model._update_process_group(group)  # all ranks are at the same point
        else:
            _renew(model, group)
    bound = [value for value in names.values() if _BOUND_TO_GROUPS & {cls.__name__ for cls in type(value).__mro__}]
    stuck = {*map(id, cannot), *(id(value) for value in bound if value not in known)}
    named = {name: id(uncompiled(value) if isinstance(value, Module) else value) for name, value in names.items()}
    unnamed = {f"the DDP model of {type(model.module).__name__}" for model in cannot if id(model) not in named.values()}
    return sorted({*(name for name, each in named.items() if each in stuck), *unnamed})


def _renew(model: Any, group: Any) -> None:
    """Give a DDP model a new reducer with the initial layout: other ranks may have reordered their buckets already."""
    model._remove_autograd_hooks()  # something may keep the old reducer, as torch.compile does
    parameters, sparse, names, _ = models[model]
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]  # since then, perhaps for a while
    for parameter in frozen:
        parameter.requires_grad_(True)
    model.process_group = group
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    for parameter in frozen:
        parameter.requires_grad_(False)
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = False
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    for hook, _ in model._comm_hooks:
        _register_comm_hook(model.reducer, None, hook)


def _refuse(*_: Any) -> None:
    raise RuntimeError("A failure ended this DDP model's process group: create it again, and its optimizer")


def _has_state(model: Any) -> bool:
    """Return whether a new reducer can't take over its communication hook: one with a state, or a built-in one."""
    built_in = not model._comm_hooks and model._get_ddp_logging_data().get("comm_hook")
    return bool(built_in) or any(state is not None for _, state in model._comm_hooks)


def _open_sockets() -> _Sockets:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (name := os.readlink(f"/proc/self/fd/{fd}")).startswith("socket:"):
                found.add((int(fd), name))
    return found
