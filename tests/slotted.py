"""Classes with slots, as notebooks have them: a cell that makes them, and a description that both sides can compare.

Imported by ranks, too.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

CELL = '''
import abc, collections, copy, dataclasses, enum, functools, typing
import attrs

T = typing.TypeVar("T")

class Plain:
    __slots__ = ("loss", "step")
    def __init__(self, loss, step): self.loss, self.step = loss, step

class OneName:
    __slots__ = "loss"

class Documented:
    __slots__ = {"loss": "of the epoch", "step": "of the optimizer"}
    def __init__(self, loss, step): self.loss, self.step = loss, step

class WithDict:
    __slots__ = ("loss", "__dict__")
    def __init__(self, loss, step): self.loss, self.step = loss, step

class WithWeakref:
    __slots__ = ("loss", "__weakref__")
    def __init__(self, loss): self.loss = loss

class Private:
    __slots__ = ("__secret", "_half")
    def __init__(self, secret): self.__secret, self._half = secret, secret / 2
    def told(self): return self.__secret

class Child(Plain):
    __slots__ = ("more",)
    def __init__(self, loss, step, more):
        super().__init__(loss, step)
        self.more = more

class Loose(Plain):
    """Without slots of its own: it has a __dict__."""

class Tight(WithDict):
    __slots__ = ("tight",)

class Node:
    __slots__ = ("name", "next")
    def __init__(self, name): self.name, self.next = name, self

class OwnState:
    __slots__ = ("loss", "step")
    def __init__(self, loss, step): self.loss, self.step = loss, step
    def __getstate__(self): return {"l": self.loss, "s": self.step}
    def __setstate__(self, state): self.loss, self.step = state["l"], state["s"]

class OwnNew:
    __slots__ = ("loss", "step")
    def __new__(cls, loss, step):
        self = super().__new__(cls)
        self.loss, self.step = loss, step
        return self
    def __getnewargs__(self): return self.loss, self.step
    def __getstate__(self): return None

class OwnNewByName:
    __slots__ = ("loss", "step")
    def __new__(cls, *, loss, step=0):
        self = super().__new__(cls)
        self.loss, self.step = loss, step
        return self
    def __getnewargs_ex__(self): return (), {"loss": self.loss}

class OwnReduce:
    __slots__ = ("loss", "step")
    def __init__(self, loss, step): self.loss, self.step = loss, step
    def __reduce__(self): return OwnReduce, (self.loss, self.step)

class OwnReduceWithState:
    __slots__ = ("loss", "step")
    def __reduce_ex__(self, protocol): return OwnReduceWithState, (), (None, {"loss": self.loss, "step": self.step})

class Failure(Exception):
    __slots__ = ("code",)

class FailureWithState(Exception):
    __slots__ = ("code",)
    def __init__(self, text, code):
        super().__init__(text)
        self.code = code
    def __reduce__(self): return FailureWithState, (self.args[0], self.code)

class Box(typing.Generic[T]):
    __slots__ = ("content",)
    def __init__(self, content: T): self.content = content

class IntBox(Box[int]):
    __slots__ = ()

class Shape(abc.ABC):
    __slots__ = ("side",)
    @abc.abstractmethod
    def area(self): ...

class Square(Shape):
    __slots__ = ("name",)
    def area(self): return self.side**2

class Row(list):
    __slots__ = ("name",)

class Table(dict):
    __slots__ = ("name",)

class Label(str):
    __slots__ = ()

class Pair(typing.NamedTuple):
    left: object
    right: object = None

class PairWithMethod(collections.namedtuple("PairWithMethod", "left right")):
    __slots__ = ()
    def both(self): return self.left, self.right

class Named:
    __slots__ = ()
    def told(self): return self.name.lower()

class Mode(Named, enum.Enum):
    TRAIN = "t"
    TEST = "e"

class FromAnnotations(type):
    def __new__(meta, name, bases, namespace):
        annotate = namespace.get("__annotate_func__")  # Python 3.14
        namespace["__slots__"] = tuple(annotate(1) if annotate else namespace.get("__annotations__", ()))
        return super().__new__(meta, name, bases, namespace)

class Annotated(metaclass=FromAnnotations):
    loss: float
    step: int

@dataclasses.dataclass(slots=True)
class Data:
    loss: float
    step: int = 0

@dataclasses.dataclass(frozen=True, slots=True)
class FrozenData:
    loss: float
    step: int = 0
    parts: list = dataclasses.field(default_factory=list, compare=False)

@dataclasses.dataclass(frozen=True, slots=True)
class FrozenChild(FrozenData):
    more: object = None
    def told(self): return FrozenData.__repr__(self)

@dataclasses.dataclass
class HandSlots:
    __slots__ = ("loss", "step")
    loss: float
    step: int

@attrs.define
class Result:
    loss: float
    step: int = 3
    def told(self): return __class__ is type(self)

@attrs.frozen
class FrozenResult:
    loss: float
    step: int
    @property
    def both(self): return self.loss, self.step

@attrs.define
class ChildResult(Result):
    more: object = attrs.field(factory=dict)
    def told(self): return super().told(), self.more

@attrs.define
class Cached:
    side: float
    @functools.cached_property
    def area(self): return self.side**2

@attrs.define(slots=False)
class Unslotted:
    loss: float

def filled(obj, **fields):
    for name, value in fields.items():
        setattr(obj, name, value)
    return obj

def instances():
    half_set = filled(OneName.__new__(OneName))
    cached = Cached(3.0)
    cached.area
    return {
        "plain": Plain(0.5, 10), "unset": Plain.__new__(Plain), "one_name": filled(OneName(), loss=1),
        "nothing": half_set, "documented": Documented(0.5, 10), "with_dict": WithDict(0.5, 10),
        "with_weakref": WithWeakref(0.5), "private": Private(7), "child": Child(0.5, 10, [1]),
        "loose": filled(Loose(0.5, 10), extra=1), "tight": filled(Tight(0.5, 10), tight=2), "node": Node("a"),
        "own_state": OwnState(0.5, 10), "own_new": OwnNew(0.5, 10), "own_new_by_name": OwnNewByName(loss=0.5),
        "own_reduce": OwnReduce(0.5, 10),
        "own_reduce_with_state": filled(OwnReduceWithState(), loss=0.5, step=10),
        "failure": filled(Failure("no"), code=3), "failure_with_state": FailureWithState("no", 3),
        "box": Box([1, 2]), "int_box": IntBox(3), "square": filled(Square(), side=2, name="s"),
        "row": filled(Row([1, 2]), name="r"), "table": filled(Table(a=1), name="t"), "label": Label("x"),
        "pair": Pair(1, [2]), "pair_with_method": PairWithMethod(1, 2), "mode": Mode.TEST,
        "annotated": filled(Annotated(), loss=0.5, step=10), "data": Data(0.5, 10),
        "frozen_data": FrozenData(0.5, 10, [1]), "frozen_child": FrozenChild(0.5, 10, more={"a": 1}),
        "hand_slots": HandSlots(0.5, 10), "result": Result(loss=0.5, step=10),
        "frozen_result": FrozenResult(0.5, 10), "child_result": ChildResult(0.5, 10, {"a": 1}),
        "cached": cached, "unslotted": Unslotted(0.5), "nested": Data(Result(1, 2), [Plain(3, Pair(4, 5))]),
    }
'''


def describe(thing: Any) -> Any:
    """All that is to survive: kinds, contents, every slot and what it holds, and what else the instance can do."""
    return _Describer().of(thing)


class _Describer:
    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []

    def of(self, thing: Any) -> Any:
        if isinstance(thing, (int, float, str, bytes, type(None))) and type(thing).__module__ == "builtins":
            return repr(thing)
        if id(thing) in self._numbers:
            return ["again", self._numbers[id(thing)]]
        self._numbers[id(thing)] = len(self._numbers)
        self._alive.append(thing)
        return [_way_to(type(thing)), self._content(thing), *self._fields(thing)]

    def _content(self, thing: Any) -> Any:
        if isinstance(thing, dict):
            return [[self.of(key), self.of(value)] for key, value in thing.items()]
        if isinstance(thing, (list, tuple)):
            return [self.of(item) for item in thing]
        if isinstance(thing, BaseException):
            return self.of(thing.args)
        return str(thing) if isinstance(thing, str) else ""

    def _fields(self, thing: Any) -> list[Any]:
        if type(thing).__module__ != "__main__":
            return []
        slots = [
            [kind.__name__, name, self.of(getattr(thing, name)) if _is_set(slot, thing) else "unset"]
            for kind in type(thing).__mro__
            for name, slot in sorted(vars(kind).items())
            if isinstance(slot, types.MemberDescriptorType) and kind.__module__ == "__main__"
        ]
        values = getattr(thing, "__dict__", None)
        return [slots, "no __dict__" if values is None else self.of(dict(values)), _can_be_referred_to(thing)]


def _way_to(kind: type) -> list[Any]:
    slots = [vars(base).get("__slots__", "none") for base in kind.__mro__]
    return [
        [base.__name__, str(names) if isinstance(names, (str, tuple, list, dict)) else type(names).__name__]
        for base, names in zip(kind.__mro__, slots)
    ]


def _is_set(slot: Any, thing: Any) -> bool:
    try:
        slot.__get__(thing)
    except AttributeError:
        return False
    return True


def _can_be_referred_to(thing: Any) -> bool:
    try:
        weakref.ref(thing)
    except TypeError:
        return False
    return True
