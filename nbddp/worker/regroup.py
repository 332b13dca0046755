"""Joins a new process group after a failure in a session, and puts the living DDP models into it."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from nbddp import wire
from nbddp.text import in_a_line
from nbddp.worker import context, process_group

_models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def remember_models() -> None:
    """From now on remember every DDP model of this process."""
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _models.add(self)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def join_group(job: wire.Job, number: int) -> wire.Regrouped:
    """Leave all groups and join the session's group of this number, for which all ranks have to come."""
    void = tuple(_names_of(dist.ProcessGroup, DeviceMesh))
    try:
        if job.backend is not None:
            process_group.replace_group(job, context.device(), number)
            for model in list(_models):
                _put_into_new_group(model)
        return wire.Regrouped(void, fingerprints())  # reads the device, which may have failed
    except Exception as error:  # a rank that is not in the group is lost; the notebook kernel says so
        return wire.Regrouped(void, {}, in_a_line(error))


def _put_into_new_group(model: Any) -> None:
    """Give a DDP model the default group, and a new reducer, which is bound to its group."""
    before, model.process_group = model.process_group, dist.group.WORLD
    with _same_buckets(model):
        model.__setstate__(model.__getstate__())
    for hook, state in model._comm_hooks:
        dist._register_comm_hook(model.reducer, dist.group.WORLD if state is before else state, hook)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _same_buckets(model: Any) -> Iterator[None]:
    """Let a new reducer begin with the buckets of the old one, which were ordered after its first backward pass.

    Otherwise its first sums are rounded in another order, and differ in the last bit from an uninterrupted training's.
    """
    parameters, _ = model._build_params_for_reducer()
    index = {id(parameter): number for number, parameter in enumerate(parameters)}
    buckets = [[index[id(p)] for p in bucket.parameters()] for bucket in model.reducer._get_zeros_like_grad_buckets()]
    original: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]

    def assignment(*args: Any, **kwargs: Any) -> tuple[list[list[int]], list[int]]:
        _, limits = original(*args, **kwargs)
        return buckets[::-1], [limits[0]] * len(buckets)

    dist._compute_bucket_assignment_by_size = assignment  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = original  # type: ignore[attr-defined]


def fingerprints() -> dict[str, int]:
    """Return a number for each DDP model, by its name in ``__main__`` or its class: equal if all its tensors are."""
    main = sys.modules["__main__"].__dict__
    names = {id(value): name for name, value in main.items() if isinstance(value, DistributedDataParallel)}
    return {names.get(id(model), type(model.module).__name__): fingerprint(model) for model in list(_models)}


def fingerprint(model: torch.nn.Module) -> int:
    """Return a number that is equal for models whose tensors are equal to the bit.

    The buffers of a DDP model count only if it does not broadcast rank 0's before each forward pass: those of
    BatchNorm differ between ranks, and only rank 0's matter.
    """
    follows_rank_0 = isinstance(model, DistributedDataParallel) and model.broadcast_buffers
    found = 0
    for tensor in (*model.parameters(), *(() if follows_rank_0 else model.buffers())):
        found = hash((found, sum_of_bits(tensor.detach())))
    return found


def sum_of_bits(tensor: torch.Tensor) -> int:
    """Return the sum of the tensor's bits as integers; 0 for one without values."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return 0
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return int(real.contiguous().view(as_integers).sum(dtype=torch.int64))


def _names_of(*kinds: type) -> Iterator[str]:
    for name, value in list(sys.modules["__main__"].__dict__.items()):
        if isinstance(value, kinds) and value is not dist.group.WORLD:
            yield name
