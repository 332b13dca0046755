"""Type hints of a notebook's functions and classes arrive, also those that Python 3.14 has not evaluated yet."""

from __future__ import annotations

import sys

import pytest

from tests.support import script

# Programs of their own, since a cell of the other tests has its hints as text.
EVERY_KIND = """
    import dataclasses, enum, typing, nbddp
    class Config:
        lr: float
        steps: int = 3
    @dataclasses.dataclass
    class Point:
        x: float
        near: "Point | None" = None
    class Mode(enum.Enum):
        about: str
        A = 1
    class Pair(typing.NamedTuple):
        left: Config
        right: int
    class Slotted:
        __slots__ = ("y",)
        y: typing.ClassVar[Config]
    class Plain: pass
    def reads(config: Config, mode: Mode = Mode.A) -> Point: ...
    KINDS = [Config, Point, Mode, Pair, Slotted, Plain, Config.__init__, reads]
    def hints(kinds):
        return [typing.get_type_hints(kind) for kind in kinds]
    value = nbddp.run(hints, (KINDS,), nprocs=1, device="cpu", show=False).value
    assert value == hints(KINDS), value
    print([len(each) for each in value])
"""

NOT_DEFINED = """
    import dataclasses, typing, nbddp
    file = open("/dev/null")  # must not travel along with a hint
    class Layer:
        size: Gone
        def join(self, other: Layer, gone: Gone) -> Layer: return other
    @dataclasses.dataclass
    class Tree:
        children: list[Tree]
        def add(self, other: Tree) -> Tree:
            self.children.append(other)
            return self
    @dataclasses.dataclass
    class Wants:
        size: Gone = 3
    def train(tree: Tree, gone: Gone = None) -> Later:
        assert typing.get_type_hints(Tree) == {"children": list[Tree]}
        assert typing.get_type_hints(Tree.add) == {"other": Tree, "return": Tree}
        assert Layer.__annotations__ == {"size": "Gone"}
        assert train.__annotations__ == {"tree": "Tree", "gone": "Gone", "return": "Later"}
        return tree.add(Tree([])), Wants(), Layer().join(1, 2), train
    tree, wants, joined, back = nbddp.run(train, (Tree([]),), nprocs=1, device="cpu", show=False).value
    assert tree == Tree([Tree([])]) and wants == Wants() and back is train, (tree, wants, back)
    print(typing.get_type_hints(Tree), joined)
    try:
        nbddp.run(train, nprocs=1, device="cpu", show=False)
    except nbddp.LaunchError as error:
        print(error)
"""

ALIASES = """
    import typing, nbddp
    type Json = dict[str, Json] | list[Json] | None
    type Two[T] = tuple[T, T]
    def train(json: Json, two: Two[int]) -> Json:
        assert typing.get_type_hints(train) == {"json": Json, "two": Two[int], "return": Json}
        assert Json.__value__.__args__[0].__args__ == (str, Json), Json.__value__
        assert Two[int].__value__.__args__ == Two.__type_params__ * 2
        return json, Json
    value, alias = nbddp.run(train, ({"a": None}, (1, 2)), nprocs=1, device="cpu", show=False).value
    print(value, alias, alias.__value__.__args__[1] == list[alias])
"""


def test_the_hints_of_every_kind_of_class_arrive() -> None:
    done = script(EVERY_KIND)
    assert (done.stdout, done.stderr) == ("[2, 2, 1, 2, 1, 0, 0, 3]\n", "")


@pytest.mark.skipif(sys.version_info < (3, 14), reason="before Python 3.14 such a definition fails")
def test_hints_may_name_what_is_not_defined_or_defined_later() -> None:
    done = script(NOT_DEFINED)
    asked = "train(tree: Tree, gone: Gone = None) -> Later cannot be called with these arguments"
    expected = f"{{'children': list[__main__.Tree]}} 1\n{asked}: missing a required argument: 'tree'\n"
    assert (done.stdout, done.stderr) == (expected, "")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the type statement is new in Python 3.12")
def test_type_aliases_arrive_also_those_that_name_themselves() -> None:
    done = script(ALIASES)
    assert (done.stdout, done.stderr) == ("{'a': None} Json True\n", "")
