"""Both sides. How the notebook's classes travel: cloudpickle's way, and what that leaves out.

That is the slots of a class, without which its instances would have a ``__dict__`` in a rank, and a state that the
notebook's class cannot take; what the members of an Enum have beside their values; ``cached_property``, which holds a
lock until Python 3.11; and the classes that torch makes for single modules when these are parametrized.
The functions at the end are what the stream calls when it is read.
"""

from __future__ import annotations

import functools
import threading
import types
import typing
from typing import Any

# Private; of cloudpickle 3.1.
from cloudpickle.cloudpickle import _class_setstate, _lookup_class_or_track, _make_skeleton_class, _make_skeleton_enum
from torch.nn.utils import parametrize

_OF_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def complete(kind: type, reduced: Any) -> Any:
    """What cloudpickle reduces a class to, complete."""
    if not isinstance(reduced, tuple):  # by its name
        return reduced
    reduced = _with_its_place(kind, reduced)
    if reduced[0] is _make_skeleton_enum:
        return _with_members(kind, reduced)
    # A NamedTuple makes its own (), and refuses any other.
    if "__slots__" not in vars(kind) or typing.NamedTuple in vars(kind).get("__orig_bases__", ()):
        return reduced
    return _with_slots(kind, reduced) if reduced[0] is _make_skeleton_class else reduced


def _with_its_place(kind: type, reduced: Any) -> Any:
    """What cloudpickle (3.1) reduces a class to, with ``Outer.Inner``, by which pickle finds it again."""
    if len(reduced) < 3:
        return reduced
    function, arguments, (attributes, *more), *setting = reduced
    return function, arguments, ({**attributes, "__qualname__": kind.__qualname__}, *more), *setting


def _with_slots(kind: Any, reduced: Any) -> Any:
    _, (metaclass, name, bases, namespace, *rest), (attributes, *more), *setting = reduced
    names = (kind.__slots__,) if isinstance(kind.__slots__, str) else kind.__slots__
    # What took a slot's name afterwards, a property say: cloudpickle drops it with the slots.
    replaced = {n: vars(kind)[n] for n in names if n in vars(kind) and not isinstance(vars(kind)[n], _OF_SLOTS)}
    arguments = metaclass, name, bases, {**namespace, "__slots__": _slots_of(kind)}, *rest
    return _make_slotted_class, arguments, ({**attributes, **replaced}, *more), *setting


def _slots_of(kind: type) -> tuple[str, ...]:
    """The slots that a class adds. Its ``__slots__`` may be a used iterator, and has private names unmangled."""
    slots = [value for value in vars(kind).values() if isinstance(value, types.MemberDescriptorType)]
    extra = [name for name in ("__dict__", "__weakref__") if isinstance(vars(kind).get(name), _OF_SLOTS)]
    return *sorted({slot.__name__ for slot in slots if slot.__objclass__ is kind}), *extra


def _with_members(kind: Any, reduced: Any) -> Any:
    function, arguments, state, *items, _setstate = reduced
    members = {member.name: vars(member) for member in kind}
    return function, arguments, (state, members), *items, _set_enum_state


def reduce_cached_property(prop: functools.cached_property[Any]) -> Any:
    """How a ``functools.cached_property`` reduces: without its lock, which Python 3.10 and 3.11 give it."""
    if not isinstance(vars(prop).get("lock"), type(threading.RLock())):
        return NotImplemented
    return _with_lock, (type(prop),), {name: value for name, value in vars(prop).items() if name != "lock"}


def is_parametrized(kind: type) -> bool:
    """Did torch make this class for one module, because ``register_parametrization`` was called on it?"""
    return getattr(vars(kind).get("__getstate__"), "__module__", "") == parametrize.__name__


def refuse_parametrized(module: object) -> None:
    """Raise ``TypeError`` if its class pickles in a way of its own, or this torch extends classes in another way."""
    base: Any = type(module).__bases__[0]
    own_way = base.__reduce_ex__ is not object.__reduce_ex__ or base.__reduce__ is not object.__reduce__
    if own_way or not all(hasattr(parametrize, name) for name in _EXTENDING):
        raise TypeError(
            f"this {base.__name__} has parametrizations, with which it does not pickle; pass it without them and "
            "register them inside the function, or pass its state_dict()"
        )


def reduce_parametrized(module: Any) -> Any:
    """How a parametrized module reduces: as one of its class before, whose class torch extends again on arrival."""
    base: Any = type(module).__bases__[0]
    getstate: Any = getattr(base, "__getstate__", None)  # until Python 3.10, object has none
    has_own = getstate is not getattr(object, "__getstate__", None)
    state = getstate(module) if getstate is not None and has_own else vars(module)
    return _parametrized, (base, tuple(module.parametrizations)), state


_EXTENDING = ("_inject_new_class", "_inject_property")  # private; of torch 2.6 to 2.13


# ---------------------------------------------------------------------------- reading


def _with_lock(kind: Any) -> Any:
    prop = kind.__new__(kind)
    prop.lock = threading.RLock()
    return prop


def _parametrized(base: Any, names: tuple[str, ...]) -> Any:
    """Without any state yet."""
    module = base.__new__(base)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _make_slotted_class(metaclass: Any, name: str, bases: Any, namespace: Any, tracker: Any, extra: Any) -> Any:
    kind = _make_skeleton_class(metaclass, name, bases, namespace, None, extra)
    if _slots_of(kind) != namespace["__slots__"]:  # its metaclass makes them of what the class does not have yet
        plainly = functools.partial(type.__new__, metaclass)
        kind = _make_skeleton_class(plainly, name, bases, namespace, None, extra)
    return _lookup_class_or_track(tracker, kind)


def _set_enum_state(kind: Any, state: Any) -> None:
    of_class, members = state
    _class_setstate(kind, of_class)
    for name, attributes in members.items():
        vars(kind[name]).update(attributes)
