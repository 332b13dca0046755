"""Functions with state of every kind, as a notebook makes them: closures that share variables, defaults, attributes.

A factory is text. Whoever calls what it makes in the same order gets the same results, wherever that is.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

_VARIABLES = ("m", "n", "p", "q", "total")
_LINES = (
    "m += x", "n += x", "p.append(x)", "q.append(x)", "own.append(x)", "named[x] = len(named)", "total += x",
    "{0}.calls = getattr({0}, 'calls', 0) + x", "(lambda: p.append(len(p)))()", "q.extend(i for i in (m, n))",
    "{1}(x + 1)", "helper(x)", "kinds.append(Kind())", "pass",
)  # fmt: skip
_LINES_ALONE = [line for line in _LINES if not any(word in line for word in ("total", "{1}", "helper", "Kind"))]
_HEAD = """
total = 100
def helper(x, log=[]):
    log.append(x)
    return len(log)
def factory():
    m, n, p, q, kinds = 0, 10, [], [], []
    class Kind:
        made = m
"""


@dataclass(frozen=True)
class Case:
    """A factory, how its functions travel, and which of them are called: before, in the rank, afterwards."""

    source: str
    wrapped: list[tuple[int, str]]
    before: list[int]
    inside: list[int]
    after: list[int]


@st.composite
def cases(draw: st.DrawFn, *, alone: bool = False) -> Case:
    """Of a factory with one to three functions, one to four, some of them twice.

    Args:
        alone: one function that shares nothing, and reads no global.
    """
    count = 1 if alone else draw(st.integers(1, 3))
    lines, variables = (_LINES_ALONE, _VARIABLES[:-1]) if alone else (_LINES, _VARIABLES)
    bodies = st.lists(st.sampled_from(lines), min_size=1, max_size=5)
    shown = st.lists(st.sampled_from(variables), unique=True)
    order = [f"f{number}" for number in draw(st.permutations(range(count)))]
    functions = [_function(f"f{number}", draw(bodies), draw(shown), order) for number in range(count)]
    wraps = st.tuples(st.integers(0, count - 1), st.sampled_from(["", "", "partial", "method"]))
    wrapped = draw(st.lists(wraps, min_size=1, max_size=1 if alone else 4))
    result = f"    return [{', '.join(f'f{number}' for number in range(count))}]"
    calls = st.lists(st.integers(0, 3), max_size=4)
    return Case(_HEAD + "".join(functions) + result, wrapped, draw(calls), draw(calls), draw(calls))


def _function(name: str, body: list[str], shown: list[str], order: list[str]) -> str:
    later = order[order.index(name) + 1 :]
    lines = [line.format(name, later[0] if later else "abs") for line in body]
    counted = [n for n in "mn" if f"{n} += x" in lines]
    head = [f"nonlocal {', '.join(counted)}"] * bool(counted) + ["global total"] * ("total += x" in lines)
    values = [f"list({n})" if n in "pq" else n for n in shown]
    result = f"return {', '.join(['x', 'list(own)', 'dict(named)', f'vars({name}).copy()', *values])}"
    text = "\n        ".join([*head, *lines, result])
    return f"    def {name}(x=1, own=[], *, named={{}}):\n        {text}\n"


def make(case: Case, namespace: dict[str, Any], suffix: str = "") -> list[Any]:
    """The functions, made where these are the globals, whose names get this suffix."""
    source = re.sub(r"\b(total|helper|factory)\b", rf"\g<1>{suffix}", case.source)
    exec(compile(source, "<cell>", "exec", dont_inherit=True), namespace)
    made = namespace[f"factory{suffix}"]()
    return [_wrapped(made[number], how) for number, how in case.wrapped]


def _wrapped(function: Any, how: str) -> Any:
    if how == "partial":
        return functools.partial(function, x=3)
    return types.MethodType(function, 5) if how == "method" else function


def call(functions: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    """What they give, one after the other."""
    return [functions[number % len(functions)]() for number in numbers]


def call_all(several: Sequence[tuple[Sequence[Any], Sequence[int]]]) -> list[tuple[list[Any], Sequence[Any]]]:
    """In a rank: what those of every case give, and they themselves."""
    return [(call(functions, numbers), functions) for functions, numbers in several]


def same(functions: Sequence[Any]) -> list[bool]:
    """Which of them are one."""
    return [f is g for f in functions for g in functions]


class Globals:
    """What functions may change of their namespace, as it is now."""

    def __init__(self, namespace: dict[str, Any], suffix: str = "") -> None:
        self._namespace, self._suffix = namespace, suffix
        self._total, self._log = namespace[f"total{suffix}"], list(self._helpers_log())

    def restore(self) -> None:
        """What a rank does to its own does not count."""
        self._namespace[f"total{self._suffix}"] = self._total
        self._helpers_log()[:] = self._log

    def _helpers_log(self) -> list[Any]:
        return self._namespace[f"helper{self._suffix}"].__defaults__[0]


def results_without_travelling(case: Case) -> list[Any]:
    """All of it in one process."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    functions = make(case, namespace)
    results = call(functions, case.before)
    before = Globals(namespace)
    results += call(functions, case.inside)
    before.restore()
    return results + call(functions, case.after)
