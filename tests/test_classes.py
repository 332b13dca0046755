"""Instances of the notebook's classes are, in a rank and when they come back, what pickle makes of them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

import nbddp
from tests import slotted
from tests.slotted import describe
from tests.support import Cells, Notebook, run


@pytest.fixture
def names(cell: Cells) -> SimpleNamespace:
    """A notebook with classes, and instances of every kind."""
    cell(slotted.CELL)
    return cell("""
        from tests.slotted import describe
        known = instances()
        def use(arguments):
            made = instances()
            by_kind = {kind: (argument, known[kind], made[kind]) for kind, argument in arguments.items()}
            return {kind: [describe(each) for each in three] for kind, three in by_kind.items()}, by_kind
        def contain(things):
            return describe(things), things, {"made": (instances()["nested"], [Result(1, 2)] * 2)}
    """)


def test_an_instance_is_in_a_rank_and_afterwards_what_pickle_makes_of_it(names: SimpleNamespace) -> None:
    made = {kind: describe(instance) for kind, instance in names.known.items()}
    pickled = {kind: describe(pickle.loads(pickle.dumps(instance))) for kind, instance in names.known.items()}
    assert len(made) >= 35
    for seen, by_kind in run(names.use, names.instances()).values:
        assert seen == {kind: [pickled[kind], pickled[kind], made[kind]] for kind in made}
        for kind, instances in by_kind.items():
            assert [describe(instance) for instance in instances] == [pickled[kind]] * 3
            assert [type(instance) for instance in instances] == [type(names.known[kind])] * 3


def test_slotted_instances_in_containers_keep_their_identity(names: SimpleNamespace) -> None:
    one = names.Result(0.5, 10)
    things = [one, {"same": one, "equal": names.Result(0.5, 10)}, (names.Pair(one, names.Node("n")),)]
    expected = describe(pickle.loads(pickle.dumps(things)))
    for seen, back, made in run(names.contain, things).values:
        assert seen == describe(back) == expected
        assert back[0] == one
        assert describe(made["made"][0]) == describe(names.known["nested"])
        assert made["made"][1] == [names.Result(1, 2)] * 2
        assert made["made"][1][0] is made["made"][1][1]


def test_slotted_classes_behave_the_same_in_a_rank_and_afterwards(names: SimpleNamespace, cell: Cells) -> None:
    names = cell("""
        def does(things):
            errors = []
            for kind, name in [("plain", "typo"), ("frozen_data", "loss"), ("frozen_result", "loss"), ("pair", "left")]:
                try:
                    setattr(things[kind], name, 1)
                except AttributeError as error:
                    errors.append(type(error).__name__)
            return dict(
                errors=errors, private=things["private"].told(), attrs=things["child_result"].told(),
                frozen=things["frozen_child"].told(), equal=things["data"] == Data(0.5, 10),
                area=things["square"].area(),
                hash=hash(things["frozen_data"]) == hash(FrozenData(0.5, 10)), cached=things["cached"].area,
                replaced=attrs.evolve(things["result"], step=4).step, mode=things["mode"].told(),
                both=things["pair_with_method"].both(),
            )
        def train(things): return does(things), things
    """)  # fmt: skip
    expected = names.does(names.known)
    assert expected["errors"] == ["AttributeError", "FrozenInstanceError", "FrozenInstanceError", "AttributeError"]
    for seen, back in run(names.train, names.known).values:
        assert seen == names.does(back) == expected


def test_slots_from_an_iterator_or_replaced_by_a_property_work_in_a_rank(cell: Cells) -> None:
    names = cell("""
        class Iterated:
            __slots__ = iter(["x", "y"])
        class Replaced:
            __slots__ = ("x", "y")
        Replaced._x = Replaced.x
        Replaced.x = property(lambda self: self._x * 10, lambda self, x: Replaced._x.__set__(self, x))
        def look(obj):
            slots = sorted(n for n, v in vars(type(obj)).items() if type(v).__name__ == "member_descriptor")
            return slots, obj.x, obj.y, hasattr(obj, "__dict__")
        def make(kind):
            obj = kind()
            obj.x, obj.y = 3, 4
            return obj
        def train(): return look(make(Iterated)), look(make(Replaced))
    """)
    expected = ["x", "y"], 3, 4, False
    assert names.train() == (expected, (["_x", "y"], 30, 4, False))
    assert run(names.train).values == [names.train()] * 2


def test_classes_made_in_a_rank_keep_their_slots(cell: Cells) -> None:
    names = cell("""
        import dataclasses
        def train():
            @dataclasses.dataclass(frozen=True, slots=True)
            class Local:
                x: int
                def __add__(self, other): return Local(self.x + other.x)
            class Cut(Exception):
                __slots__ = ("code",)
            return Local(3), Cut("no")
    """)
    for local, cut in run(names.train).values:
        assert (local + local).x == 6
        assert not hasattr(local, "__dict__")
        with pytest.raises(AttributeError):
            local.x = 4
        assert (type(cut).__name__, cut.args, type(cut).__slots__) == ("Cut", ("no",), ("code",))


def test_a_slotted_exception_that_a_rank_raises_is_the_cause(cell: Cells) -> None:
    names = cell("""
        class TooLarge(Exception):
            __slots__ = ("loss",)
            def __init__(self, loss):
                super().__init__(f"loss {loss}")
                self.loss = loss
            def __reduce__(self): return TooLarge, (self.loss,)
        def train(): raise TooLarge(7.5)
    """)
    with pytest.raises(nbddp.RankError) as caught:
        run(names.train)
    assert type(caught.value.cause) is names.TooLarge
    assert caught.value.cause.loss == 7.5


def test_enum_members_keep_their_attributes_in_a_rank(cell: Cells) -> None:
    names = cell("""
        import enum
        class Planet(enum.Enum):
            EARTH = (5.97, 6.37)
            MARS = (0.64, 3.38)
            def __init__(self, mass, radius): self.mass, self.radius = mass, radius
            def density(self): return round(self.mass / self.radius**3, 4)
        class Size(str, enum.Enum):
            def __new__(cls, value, factor=2):
                self = str.__new__(cls, value)
                self._value_, self.factor = value, factor
                return self
            SMALL = "s"
            LARGE = "l"
        def look():
            sizes = [(s, s.factor, s.value) for s in Size]
            return [(p.mass, p.density()) for p in Planet], sizes, Planet((5.97, 6.37)).name
        def train(planet): return look(), planet is Planet.MARS, planet
    """)  # fmt: skip
    for seen, same, back in run(names.train, names.Planet.MARS).values:
        assert seen == names.look()
        assert same
        assert back is names.Planet.MARS


def test_slotted_variables_of_a_cell_come_back_with_the_o_option(notebook: Notebook) -> None:
    notebook.ok(
        "%load_ext nbddp\n%ddp --nprocs 2 --device cpu\nimport json, pickle\nfrom tests.slotted import describe"
    )
    notebook.ok(slotted.CELL + "\nknown = instances()\nfrozen = FrozenResult(0.5, 10)")
    notebook.ok(
        "%%ddp -o made,same,echoed,local,Local\n"
        "made = instances()\nsame = known\nechoed = frozen\nresult = FrozenResult(rank + 0.5, 3)\n"
        "import dataclasses\n"
        "@dataclasses.dataclass(slots=True)\nclass Local:\n    x: int\n"
        "    def __class_getitem__(cls, i): return cls(i)\n"
        "local = [Local(1), Local[2]]"
    )
    assert notebook.ok("""
        expected = {kind: describe(pickle.loads(pickle.dumps(each))) for kind, each in instances().items()}
        json.dumps([
            [kind for kind in expected if describe(made[kind]) != expected[kind]],
            [kind for kind in expected if describe(same[kind]) != expected[kind]],
            [type(made[kind]) is type(same[kind]) is type(each) for kind, each in instances().items()].count(False),
            echoed == frozen and type(echoed) is FrozenResult,
            repr(local), type(local[0]) is Local, hasattr(local[0], "__dict__"),
        ])
    """).shown.strip() == repr('[[], [], 0, true, "[Local(x=1), Local(x=2)]", true, false]')
    notebook.ok("%ddp --reset")
