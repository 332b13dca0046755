"""Looks at and changes the names of a rank that stays: what ``Session`` asks its ranks to do."""

from __future__ import annotations

import functools
import gc
import hashlib
import io
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from nbddp.worker import collectives, context, main_module, regroup

_LARGEST = 12
_PREDEFINED = ("nbddp", "torch", "dist", "rank", "world_size", "device")  # of every cell


@dataclass(frozen=True)
class Name:
    """A name on one rank.

    Attributes:
        kind: its type's name.
        shape: of a tensor or array; () otherwise.
        dtype, device: of a tensor or array, or of a model's parameters; "" otherwise.
        nbytes: memory of its tensors or array; None if not known.
        digest: equal on ranks that have an equal value; None if that is not known.
    """

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    nbytes: int | None = None
    digest: int | None = None

    @property
    def text(self) -> str:
        """``Tensor 3 × 2 float32, 24 B, cuda:1``."""
        shape = " × ".join(map(str, self.shape))
        kind = " ".join(filter(None, [self.kind, shape, self.dtype]))
        return ", ".join(filter(None, [kind, size_text(self.nbytes), self.device]))


def size_text(nbytes: int | None) -> str:
    """``1.2 MB``; "" for None."""
    if nbytes is None:
        return ""
    size = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


@dataclass(frozen=True)
class OnRanks:
    """Calls a function on some ranks of a session, and does nothing on the others."""

    ranks: Sequence[int]
    fn: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs) if context.rank() in self.ranks else None


def nothing() -> None:
    """Do nothing: the first call of a session."""


def assign(values: Mapping[str, Any]) -> None:
    """Bind these names in ``__main__``."""
    _main().update(values)


def assign_where_missing(values: Mapping[str, Any]) -> None:
    """Bind those of the names that this rank does not have."""
    _main().update((name, value) for name, value in values.items() if name not in _main())


def fetch(name: str) -> Any:
    """Return the value of a name."""
    return _value_of(name)


def free(names: Sequence[str]) -> None:
    """Delete names, and give their memory back."""
    for name in names:
        _value_of(name)
    for name in names:
        del _main()[name]
    _give_back()


def reset() -> None:
    """Delete all names."""
    main_module.install()
    _give_back()


def names() -> list[Name]:
    """Describe the names that cells and functions have bound on this rank, with digests."""
    users = [(name, value) for name, value in sorted(_main().items()) if _is_of_the_user(name, value)]
    return [replace(_described(name, value), digest=_digest(value)) for name, value in users]


def held() -> tuple[tuple[str, str], ...]:
    """Return the names with the largest tensors, each with a description: ``Linear, 1.2 MB, cuda:0``."""
    described = [_described(name, value) for name, value in list(_main().items()) if _is_of_the_user(name, value)]
    large = sorted((each for each in described if each.nbytes is not None), key=lambda each: -(each.nbytes or 0))
    return tuple((each.name, each.text) for each in large[:_LARGEST])


def complete(text: str) -> list[str]:
    """Return the names, or attributes after the last dot, that begin as this text does: ``mod``, ``model.we``."""
    path, dot, begin = text.rpartition(".")
    if not dot:
        found = [name for name, value in _main().items() if _is_of_the_user(name, value)]
    else:
        first, *rest = path.split(".")
        try:
            found = dir(functools.reduce(getattr, rest, _main()[first]))
        except (KeyError, AttributeError):
            return []
    hidden = not begin.startswith("_")
    fitting = [name for name in found if name.startswith(begin) and not (hidden and name.startswith("_"))]
    return sorted(f"{path}{dot}{name}" for name in fitting)


def digest(name: str) -> int | None:
    """Return a number that is equal on ranks with an equal value; None if the value cannot be compared."""
    return _digest(_value_of(name))


def sync(name: str, src: int) -> None:
    """Give every rank the value of rank ``src``: a model's parameters and buffers, a tensor, or any other object."""
    value = _value_of(name)
    if isinstance(value, torch.nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            dist.broadcast(tensor.data, src)
    elif isinstance(value, torch.Tensor):
        dist.broadcast(value.data, src)
    else:
        _main()[name] = collectives.broadcast(value, src)


def _main() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


def _value_of(name: str) -> Any:
    try:
        return _main()[name]
    except KeyError:
        raise NameError(f"name {name!r} is not defined on rank {context.rank()}", name=name) from None


def _is_of_the_user(name: str, value: Any) -> bool:
    return not name.startswith("_") and name not in _PREDEFINED and not isinstance(value, types.ModuleType)


def _described(name: str, value: Any) -> Name:
    kind = type(value).__name__
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        dtype, device = (str(tensors[0].dtype), str(tensors[0].device)) if tensors else ("", "")
        return Name(name, kind, (), dtype.removeprefix("torch."), device, nbytes)
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return Name(name, kind, tuple(value.shape), dtype, str(value.device), value.nbytes)
    if isinstance(value, np.ndarray):
        return Name(name, kind, value.shape, str(value.dtype), "cpu", value.nbytes)
    return Name(name, kind)


def _digest(value: Any) -> int | None:
    if isinstance(value, torch.nn.Module):
        return regroup.fingerprint(value)
    if callable(value):
        return None  # the ranks' functions and classes are equal, but not what cloudpickle makes of them
    stream = io.BytesIO()
    try:
        _DigestPickler(stream).dump(value)
    except Exception:  # whatever a user's __reduce__ raises
        return None
    return int.from_bytes(hashlib.sha256(stream.getvalue()).digest()[:8], "big")


class _DigestPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Replaces tensors by numbers, because torch's own pickles of equal tensors differ."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return str, (f"{tuple(obj.shape)} {obj.dtype} {regroup.sum_of_bits(obj.detach())}",)
        return super().reducer_override(obj)


def _give_back() -> None:
    gc.collect()
    if context.device().type == "cuda":
        torch.cuda.empty_cache()
