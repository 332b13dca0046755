"""``wrap``, ``join`` and ``accumulate``: a model over the ranks, with torch's own tools."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# Private, of torch 2.6 to 2.15: DDP's own constructor calls them.
from torch.distributed.utils import _sync_module_states, _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel

from nbddp.worker import context
from nbddp.worker.exchange import require_group

_BUCKET_NBYTES = 250 << 20  # DDP's own value
_accumulated: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


def wrap(model: torch.nn.Module, **ddp: Any) -> torch.nn.Module:
    """Move the model to this rank's device and, with several ranks, wrap it in ``DistributedDataParallel``.

    Data is not moved: batches stay on the CPU until you write ``x.to(nbddp.device())``.

    Args:
        **ddp: options of ``torch.nn.parallel.DistributedDataParallel``, e.g. ``find_unused_parameters``.

    Returns:
        The DDP module (the model itself is its ``.module``), or the model itself if there is one rank or
        no parameter requires a gradient. In either case all ranks have rank 0's parameters and buffers.
    """
    device = context.device()
    model = model.to(device)
    if context.world_size() == 1:
        return model
    require_group("wrap")
    if not any(p.requires_grad for p in model.parameters()):
        # Broadcast as DDP's constructor does, because a randomly initialised frozen model differs on each rank.
        if tensors := [*model.parameters(), *model.buffers()]:
            group: Any = dist.group.WORLD
            _verify_param_shape_across_processes(group, tensors)
            _sync_module_states(model, group, _BUCKET_NBYTES, 0, ())
        return model
    if device.type != "cpu":
        ddp.setdefault("device_ids", [device])
    return DistributedDataParallel(model, **ddp)


@contextlib.contextmanager
def join(model: torch.nn.Module) -> Iterator[None]:
    """Let ranks have different numbers of batches: ``with nbddp.join(model): for batch in batches: ...``.

    A rank that has no more batches takes part in the others' all-reduces with zeros until all are through, and gets the
    final weights. Gradients are divided by the number of all ranks, also when some have finished: torch's own ``Join``,
    whose limits hold. Your own collectives in the block still wait for every rank.

    Args:
        model: as :func:`wrap` returns it. A model that is not in DDP needs nothing.
    """
    model = _uncompiled(model)
    with model.join() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def accumulate(model: torch.nn.Module, k: int, *, last: bool = False) -> Iterator[bool]:
    """One of ``k`` micro-batches whose gradients are added up: forward and backward stand in the block.

    ::

        for x, y in batches:
            with nbddp.accumulate(model, 4) as complete:
                loss_fn(model(x), y).backward()
            if complete:
                optimizer.step()
                optimizer.zero_grad()

    The ranks exchange gradients once per ``k`` blocks. After the last one the gradients are the mean over the
    micro-batches, as of one batch of all their samples, if the micro-batches are equally large and the loss is a mean.

    Args:
        model: as :func:`wrap` returns it, in DDP or not.
        k: number of micro-batches, the same on all ranks.
        last: True: this is the last one, even if there were fewer than ``k``, e.g. at the end of the data. It has to be
            the same block on all ranks.

    Yields:
        Whether the micro-batches are complete after this block.

    Raises:
        ValueError: ``k`` is not a whole number from 1 on.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"accumulate() takes a whole number of micro-batches from 1 on, not {k!r}")
    model = _uncompiled(model)
    number = _accumulated.get(model, 0) + 1
    complete = last or number >= k
    alone = contextlib.nullcontext() if complete or not isinstance(model, DistributedDataParallel) else model.no_sync()
    _accumulated[model] = 0  # after an exception, whose gradients nobody wants, the micro-batches begin anew
    with alone:
        yield complete
    _accumulated[model] = 0 if complete else number
    if complete and number > 1:
        for gradient in [p.grad for p in model.parameters() if p.grad is not None]:
            gradient.div_(number)


def _uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module that ``torch.compile`` was given."""
    found = getattr(model, "_orig_mod", model)
    assert isinstance(found, torch.nn.Module)
    return found
