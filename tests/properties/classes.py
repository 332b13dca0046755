"""Any class that a notebook might define, as the source of a cell that also makes instances of it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

# Content of the roots that have one; the others are filled by their fields alone.
_ROOTS = {
    "object": "", "list": "[1, 'a']", "dict": "{'a': 1}", "str": "'text'", "int": "7", "tuple": "(1, [2])",
    "Exception": "'why'", "abc.ABC": "", "typing.Generic[T]": "", "typing.Protocol": "",
}  # fmt: skip
_SIZED = ("int", "tuple")  # which have no room for slots of a subclass
_FORMS = ["({},)", "[{}]", "iter([{}])", "dict.fromkeys([{}], 'what it is')"]
_DECORATORS = [
    "dataclasses.dataclass(slots=True)", "dataclasses.dataclass(frozen=True, slots=True)", "dataclasses.dataclass",
    "attrs.define", "attrs.frozen", "attrs.define(slots=False)", "attrs.define(weakref_slot=False, eq=False)",
]  # fmt: skip
_STATES = {
    "its own state": """
    def __getstate__(self): return {"fields": fields_of(self)}
    def __setstate__(self, state): set_fields(self, state["fields"])""",
    "a tuple of them": """
    def __getstate__(self): return tuple(fields_of(self).items()), None
    def __setstate__(self, state): set_fields(self, dict(state[0]))""",
    "reduce": """
    def __reduce__(self): return make, (type(self), *content_of(self)), fields_of(self), None, None, set_fields""",
    "reduce_ex": """
    def __reduce_ex__(self, protocol): return make, (type(self), *content_of(self)), (None, fields_of(self))""",
    "new": """
    def __new__(cls, *args, extra=None): return make(cls, *args)
    def __getnewargs_ex__(self): return content_of(self), {"extra": 3}""",
    "no state": """
    def __getnewargs__(self): return content_of(self)
    def __getstate__(self): return None""",
}

PREAMBLE = """
import abc, dataclasses, typing
import attrs
T = typing.TypeVar("T")

def root_of(kind):
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")
def make(kind, *content):
    root = root_of(kind)
    obj = root.__new__(kind, *content)
    if root is list: obj.extend(*content)
    if root is dict: obj.update(*content)
    return obj
def content_of(obj):
    root = root_of(type(obj))
    return obj.args if root is Exception else () if root is object else (root(obj),)
def fields_of(obj):
    names = {name for base in type(obj).__mro__ for name in vars(base).get("drawn", ())}
    return {name: getattr(obj, name) for name in sorted(names) if hasattr(obj, name)}
def set_fields(obj, fields):
    for name, value in fields.items():
        object.__setattr__(obj, name, value)
def instance(kind, *content, others=(), **fields):
    obj = make(kind, *content)
    set_fields(obj, {name: obj if value == "itself" else others[-1] if value == "another" and others else value
                     for name, value in fields.items()})
    return obj
"""


@st.composite
def cells(draw: st.DrawFn) -> str:
    """A cell that defines classes and a list of their instances, ``instances``."""
    source, made = "", []
    for number in range(draw(st.integers(1, 3))):
        define = draw(st.sampled_from([_drawn_by_hand, _drawn_by_hand, _decorated]))
        body, expressions = draw(define(f"K{number}"))
        source += body
        made += expressions
    return source + "instances = []\n" + "".join(f"instances.append({expression})\n" for expression in made)


@st.composite
def _drawn_by_hand(draw: st.DrawFn, name: str) -> Any:
    root = draw(st.sampled_from(list(_ROOTS)))
    source, base, names = "", root, []
    has_dict = root == "Exception"
    free = set() if root in (*_SIZED, "str", "Exception") else {"__dict__", "__weakref__"}
    for level in range(draw(st.integers(1, 3))):
        own = draw(st.lists(st.sampled_from(["x", "y", "_z", "__secret"]), unique=True, max_size=3))
        own = [f"{field}{level}" for field in own]
        slots = draw(st.sampled_from(["slots", "slots", "slots", "no slots"]))
        source += f"class {name}_{level}({base}):\n"
        if slots == "slots" and not (own and root in _SIZED):
            more = draw(st.sampled_from([[], [], *([field] for field in sorted(free))]))
            free -= set(more)
            has_dict |= "__dict__" in more
            source += f"    __slots__ = {_slots(draw, own + more)}\n"
        else:
            free, has_dict = set(), True
        names += [f"_{name}_{level}{field}" if field.startswith("__") else field for field in own]
        source += f"    drawn = {names[-len(own) :] if own else []}\n"
        if draw(st.integers(0, 2)) == 0:
            source += draw(st.sampled_from(list(_STATES.values()))).lstrip("\n") + "\n"
        base = f"{name}_{level}"
    expressions = []
    for _ in range(draw(st.integers(1, 2))):
        fields = draw(st.lists(st.sampled_from(names + ["extra"] * has_dict), unique=True)) if names else []
        values = ", ".join(f"{field}={_value(draw)}" for field in fields)
        content = f"{_ROOTS[root]}, " * bool(_ROOTS[root])
        expressions.append(f"instance({base}, {content}others=instances, {values})")
    return source, expressions


def _slots(draw: st.DrawFn, names: list[str]) -> str:
    if len(names) == 1 and not names[0].startswith("__") and draw(st.booleans()):  # cloudpickle drops such a string
        return repr(names[0])
    if not names:
        return draw(st.sampled_from(["()", "[]"]))
    return draw(st.sampled_from(_FORMS)).format(", ".join(map(repr, names)))


@st.composite
def _decorated(draw: st.DrawFn, name: str) -> Any:
    decorator = draw(st.sampled_from(_DECORATORS))
    source, base, count = "", "", 0
    for level in range(draw(st.integers(1, 2))):
        source += f"@{decorator}\nclass {name}_{level}{base}:\n"
        own = draw(st.integers(0, 3))
        source += "".join(f"    f{i}: object = None\n" for i in range(count, count + own)) + "    drawn = ()\n"
        source += "    def kind(self): return __class__\n"
        count += own
        base = f"({name}_{level})"
    values = [_value(draw) for _ in range(count)]
    return source, [f"{base[1:-1]}({', '.join(values)})"]


def _value(draw: st.DrawFn) -> str:
    return draw(st.sampled_from(["3", "'text'", "[1, 2]", "None", "'itself'", "'another'", "2.5", "{'a': (1,)}"]))
