"""What functools and torch make at runtime and pickle refuses can be sent both ways, or the error says what to do."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.utils.parametrize as parametrize

import nbddp
from tests.support import Cells, run

DISPATCH = """
    import functools, nbddp
    class Shape: pass
    class Square(Shape): pass
    @functools.singledispatch
    def describe(thing, *rest):
        "What it is."
        return "something", *rest
    @describe.register
    def _(thing: int): return "a number", describe("inside")
    @describe.register(list)
    @describe.register(tuple)
    def several(thing): return [describe(each) for each in thing]
    describe.register(Shape, lambda thing: type(thing).__name__)
    describe.note = {"kept": 1}
    class Reader:
        @functools.singledispatchmethod
        def read(self, thing): return "something"
        @read.register
        def _(self, thing: str): return thing.upper()
        @functools.singledispatchmethod
        @classmethod
        def make(cls, thing): return cls.__name__
"""
USE = """
    def use(describe):
        told = describe([1, (2.0, True), Square()]), describe("text", 1), describe.note, describe.__doc__
        try:
            describe()
        except TypeError as error:
            told += (str(error),)
        about = describe.__name__, describe.__qualname__, list(describe.registry)
        return told, about, Reader().read("a"), Reader().read(1), Reader().make(1)
"""


def test_singledispatch_functions_work_in_a_rank_and_when_they_come_back(cell: Cells) -> None:
    cell(DISPATCH)
    names = cell(
        USE
        + """
    def train(argument, reader):
        def make(added):
            @functools.singledispatch
            def local(thing): return "default"
            local.register(int, lambda thing: thing + added)
            return local
        return use(argument), use(describe), reader.read("b"), argument, make(nbddp.rank()), argument is describe
    """
    )
    expected = names.use(names.describe)
    assert expected[0][0] == [("a number", ("something",)), [("something",), ("a number", ("something",))], "Square"]
    for rank, (argument, of_global, read, back, local, same) in enumerate(
        run(names.train, names.describe, names.Reader()).values
    ):
        assert argument == of_global == names.use(back) == expected
        assert (read, same) == ("B", True)
        assert back is names.describe or back.note == {"kept": 1}
        assert (local("x"), local(4)) == ("default", 4 + rank)
        local.register(str, lambda thing: thing)
        assert local("x") == "x"


def test_an_unchanged_singledispatch_function_comes_back_as_the_notebooks_own(cell: Cells) -> None:
    names = cell("""
        import functools
        @functools.singledispatch
        def describe(thing): return "something"
        describe.register(int, lambda thing: "a number")
        def same(): return describe
        def more():
            describe.register(str, lambda thing: "text")
            return describe
    """)
    assert [back is names.describe for back in run(names.same).values] == [True, True]
    assert [(back is names.describe, back("x"), back(1)) for back in run(names.more).values] == [
        (False, "text", "a number")
    ] * 2
    assert names.describe("x") == "something"


def test_an_unpicklable_global_of_an_implementation_is_named(cell: Cells) -> None:
    names = cell("""
        import functools
        @functools.singledispatch
        def describe(thing): return "something"
        log_file = open("/dev/null")
        @describe.register
        def of_int(thing: int): return log_file
        def train(): return describe(1)
    """)
    with names.log_file, pytest.raises(nbddp.PayloadError) as error:
        run(names.train)
    assert "train → describe → describe of int → log_file: an open file" in str(error.value)


def test_cached_properties_are_sent_with_their_class_and_computed_once_per_instance(cell: Cells) -> None:
    names = cell("""
        import functools
        class Noted(functools.cached_property):
            note = "of a subclass"
        class Data:
            def __init__(self, number): self.number, self.computed = number, 0
            @functools.cached_property
            def squared(self):
                "Its square."
                self.computed += 1
                return self.number ** 2
            other = Noted(lambda self: Data(self.number + 1).squared)
        def look(data):
            props = vars(type(data))["squared"], vars(type(data))["other"]
            return (
                data.squared, data.squared, data.computed, data.other, sorted(vars(data)),
                [(type(each).__name__, each.attrname, each.__doc__) for each in props], props[1].note,
            )
        def make():
            cached = functools.cached_property  # cloudpickle looks for globals in functions, not in bodies of classes
            class Local:
                @cached
                def three(self): return 3
            return Local()
        def train(data, kind, prop):
            fresh = kind(4)
            return look(data), look(Data(4)), look(fresh), data, fresh, make(), kind, prop, kind is Data
    """)
    expected = names.look(names.Data(4))
    assert expected[:4] == (16, 16, 1, 25)
    alone = functools.cached_property(len)
    for *looks, data, fresh, local, kind, prop, same in run(names.train, names.Data(4), names.Data, alone).values:
        assert looks == [expected] * 3
        assert (names.look(data), names.look(fresh)) == (expected, expected)
        assert (local.three, kind is names.Data, prop.func, same) == (3, True, len, True)


PARAMETRIZED = """
    import torch
    from torch import nn
    from torch.nn.utils import parametrizations, parametrize
    class Symmetric(nn.Module):
        def forward(self, x): return x.triu() + x.triu(1).mT
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.symmetric = nn.Linear(4, 4)
            parametrize.register_parametrization(self.symmetric, "weight", Symmetric())
            self.normal = parametrizations.weight_norm(nn.Linear(4, 4), "weight")
            self.spectral = parametrizations.spectral_norm(nn.Linear(4, 4))
            self.turned = parametrizations.orthogonal(nn.Linear(4, 4))
            self.own = parametrizations.weight_norm(Own(4, 4), "weight")
            self.rnn = parametrizations.weight_norm(nn.LSTM(4, 4, batch_first=True), "weight_hh_l0")
        def forward(self, x):
            x = self.own(self.turned(self.spectral(self.normal(self.symmetric(x)))))
            return self.rnn(x)[0]
    class Own(nn.Linear):
        def __getstate__(self): return {**vars(self), "travelled": True}
    torch.manual_seed(0)
    net = Net()
    def step(net):
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            loss = net(torch.ones(2, 3, 4)).square().sum()
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(net.parameters(), gradients):
                    parameter -= 0.1 * gradient
            losses.append(loss.item())
        return losses, {name: value.clone() for name, value in net.state_dict().items()}
    def about(net):
        return [
            (name, type(module).__name__, parametrize.is_parametrized(module),
             parametrize.type_before_parametrizations(module).__name__)
            for name, module in net.named_modules()
        ]
"""


@pytest.mark.slow
def test_parametrized_modules_train_in_a_rank_as_in_the_notebook(cell: Cells) -> None:
    cell(PARAMETRIZED)
    names = cell("""
        def train(argument, leaf):
            return about(argument), about(net), argument, leaf, step(copy(argument)), step(copy(net)), argument.own
        from copy import deepcopy as copy
    """)
    before, leaf = copy.deepcopy(names.net), names.net.normal
    expected, form = names.step(copy.deepcopy(names.net)), names.about(names.net)
    for of_argument, of_global, back, back_leaf, *steps, own in run(names.train, names.net, leaf).values:
        assert of_argument == of_global == names.about(back) == form
        assert own.travelled
        assert type(back.symmetric.parametrizations.weight[0]) is names.Symmetric
        assert type(back) is names.Net
        assert torch.equal(back_leaf.weight, leaf.weight)
        x = torch.ones(1, 3, 4)
        assert torch.equal(back.eval()(x), copy.deepcopy(before).eval()(x))
        for losses, state in [*steps, names.step(back.train())]:
            assert losses == pytest.approx(expected[0], rel=1e-5)
            assert list(state) == list(expected[1])
            torch.testing.assert_close(state, expected[1])
        parametrize.remove_parametrizations(back_leaf, "weight")
        assert type(back_leaf) is torch.nn.Linear
        back_leaf.weight = torch.nn.Parameter(torch.zeros(4, 4))
    assert torch.equal(names.net.normal.weight, before.normal.weight)


def test_a_parametrized_module_with_its_own_reduce_is_refused_with_a_remedy(cell: Cells) -> None:
    names = cell("""
        import torch
        class Own(torch.nn.Linear):
            def __reduce__(self): return Own, (2, 2)
        model = torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(Own(2, 2)))
        def train(): return model
    """)
    message = (
        "cannot send train to the ranks: train → model → ._modules → ['0']: this Own has parametrizations, with which "
        "it does not pickle; pass it without them and register them inside the function, or pass its state_dict()"
    )
    with pytest.raises(nbddp.PayloadError) as error:
        run(names.train)
    assert str(error.value) == message


@pytest.fixture
def scripted(cell: Cells) -> SimpleNamespace:
    """What torch.jit makes; ``script`` reads source, which a cell's classes have."""
    return cell("""
        import torch
        def plus(x): return x + 1
        function = torch.jit.trace(plus, torch.ones(2))
        module = torch.jit.script(torch.nn.Linear(2, 2))
        traced = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2))
        def reads_function(): return function(torch.ones(1))
        def reads_module(): return [module]
        def makes(kind):
            if kind == "function":
                return torch.jit.trace(plus, torch.ones(2))
            return torch.jit.script(torch.nn.Linear(2, 2))
        def takes(thing): pass
    """)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
def test_torchscript_is_refused_with_a_remedy(scripted: SimpleNamespace) -> None:
    of_function = "is compiled code, which does not pickle: pass the plain function and script or trace it inside"
    of_module = "is compiled code, which does not pickle: pass the plain module and script or trace it inside"
    for fn, *args, path, text in [
        (scripted.reads_function, "reads_function → function: a ScriptFunction", of_function),
        (scripted.reads_module, "reads_module → module: a RecursiveScriptModule", of_module),
        (scripted.takes, [scripted.traced], "[0]: a TopLevelTracedModule", of_module),
        (scripted.takes, scripted.function, "a ScriptFunction", of_function),
        (scripted.makes, "function", "a ScriptFunction", of_function),
        (scripted.makes, "module", "a RecursiveScriptModule", of_module),
    ]:
        with pytest.raises(nbddp.PayloadError) as error:
            run(fn, *args)
        assert f"{path} {text}" in str(error.value)
