"""Completes how cloudpickle pickles the notebook's classes.

cloudpickle leaves out a class's slots: in a rank its instances would have a ``__dict__``, and the notebook's class
could not set their state. It also leaves out attributes of an Enum's members other than their values, and annotations
(see ``hints.py``). It fails for ``cached_property``, which holds a lock until Python 3.11, and for the class that
torch creates for a single module when the module is parametrized. The stream calls the functions at the end when it is
read.
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

from nbddp.payload import hints

_SLOT_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_PARAMETRIZING = ("_inject_new_class", "_inject_property")  # private; of torch 2.6 to 2.15


def complete(kind: Any, reduced: Any) -> Any:
    """Complete what cloudpickle (3.1) reduces a class to."""
    if not isinstance(reduced, tuple):  # pickled by name
        return reduced
    if len(reduced) >= 3:  # with the qualified name, Outer.Inner, by which pickle finds the class again
        function, arguments, (attributes, *more), *setting = reduced
        attributes = {**attributes, "__qualname__": kind.__qualname__, **hints.of_class(kind)}
        reduced = function, arguments, (attributes, *more), *setting
    if reduced[0] is _make_skeleton_enum:
        function, arguments, state, *items, _setstate = reduced
        members = {member.name: vars(member) for member in kind}
        return function, arguments, (state, members), *items, _set_enum_state
    # A NamedTuple sets its __slots__ to () itself, and refuses any given ones.
    if "__slots__" not in vars(kind) or typing.NamedTuple in vars(kind).get("__orig_bases__", ()):
        return reduced
    if reduced[0] is not _make_skeleton_class:
        return reduced
    _, (metaclass, name, bases, namespace, *rest), (attributes, *more), *setting = reduced
    names = (kind.__slots__,) if isinstance(kind.__slots__, str) else kind.__slots__
    # An attribute that has replaced a slot, e.g. a property: cloudpickle drops it with the slots.
    replaced = {n: vars(kind)[n] for n in names if n in vars(kind) and not isinstance(vars(kind)[n], _SLOT_DESCRIPTORS)}
    arguments = metaclass, name, bases, {**namespace, "__slots__": _slots_of(kind)}, *rest
    return _make_slotted_class, arguments, ({**attributes, **replaced}, *more), *setting


def _slots_of(kind: type) -> tuple[str, ...]:
    """The slots that a class adds. Its ``__slots__`` may be a used iterator, and holds private names unmangled."""
    slots = [value for value in vars(kind).values() if isinstance(value, types.MemberDescriptorType)]
    extra = [name for name in ("__dict__", "__weakref__") if isinstance(vars(kind).get(name), _SLOT_DESCRIPTORS)]
    return *sorted({slot.__name__ for slot in slots if slot.__objclass__ is kind}), *extra


def reduce_cached_property(prop: functools.cached_property[Any]) -> Any:
    """Reduce a ``functools.cached_property`` without the lock that it has in Python 3.10 and 3.11."""
    if not isinstance(vars(prop).get("lock"), type(threading.RLock())):
        return NotImplemented
    return _with_lock, (type(prop),), {name: value for name, value in vars(prop).items() if name != "lock"}


def is_parametrized(kind: type) -> bool:
    """Did torch create this class for one module, in ``register_parametrization``?"""
    return getattr(vars(kind).get("__getstate__"), "__module__", "") == parametrize.__name__


def refuse_parametrized(module: object) -> None:
    """Raise ``TypeError`` if the module's own class defines how it pickles, or if this torch parametrizes otherwise."""
    base: Any = type(module).__bases__[0]
    reduces_itself = base.__reduce_ex__ is not object.__reduce_ex__ or base.__reduce__ is not object.__reduce__
    if reduces_itself or not all(hasattr(parametrize, name) for name in _PARAMETRIZING):
        raise TypeError(
            f"this {base.__name__} has parametrizations, with which it does not pickle; pass it without them and "
            "register them inside the function, or pass its state_dict()"
        )


def reduce_parametrized(module: Any) -> Any:
    """Reduce a parametrized module to one of its original class, which is parametrized again when it is read."""
    base: Any = type(module).__bases__[0]
    getstate: Any = getattr(base, "__getstate__", None)  # object has one since Python 3.11
    has_own = getstate is not getattr(object, "__getstate__", None)
    state = getstate(module) if getstate is not None and has_own else vars(module)
    return _parametrized, (base, tuple(module.parametrizations)), state


# ---------------------------------------------------------------------------- reading


def _with_lock(kind: Any) -> Any:
    prop = kind.__new__(kind)
    prop.lock = threading.RLock()
    return prop


def _parametrized(base: Any, names: tuple[str, ...]) -> Any:
    """A parametrized module without state."""
    module = base.__new__(base)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _make_slotted_class(metaclass: Any, name: str, bases: Any, namespace: Any, tracker: Any, extra: Any) -> Any:
    kind = _make_skeleton_class(metaclass, name, bases, namespace, None, extra)
    if _slots_of(kind) != namespace["__slots__"]:  # the metaclass derives slots from attributes that are set later
        plainly = functools.partial(type.__new__, metaclass)
        kind = _make_skeleton_class(plainly, name, bases, namespace, None, extra)
    return _lookup_class_or_track(tracker, kind)


def _set_enum_state(kind: Any, state: Any) -> None:
    class_state, members = state
    _class_setstate(kind, class_state)
    for name, attributes in members.items():
        vars(kind[name]).update(attributes)
