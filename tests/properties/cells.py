"""Small programs as a cell holds them: nested statements of every kind over a few names, some of them the notebook's.

A program is text and ends by itself. ``flag()`` and ``tick()`` decide where it goes, by choices drawn with it.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "b", "c", "d")
FUNCTIONS = ("f", "g")
_MISSING = object()
_DEPTH = 3


@dataclass(frozen=True)
class Program:
    """A cell, the values that the notebook has by then, and where ``flag()`` leads."""

    source: str
    notebook: dict[str, int]
    choices: list[bool]


@dataclass(frozen=True)
class Outcome:
    """What came of it: the exception's type, what the cell showed, and its globals."""

    error: str
    seen: list[Any]
    names: dict[str, Any]


def outcome(program: Program, names: dict[str, Any]) -> Outcome:
    """Run the program where these names are there."""
    seen: list[Any] = []
    namespace = {"__name__": "__main__", "__builtins__": {**vars(builtins), **helpers(seen, program.choices)}, **names}
    error = ""
    try:
        exec(compile(program.source, "<cell>", "exec", dont_inherit=True), namespace)
    except Exception as raised:
        error = type(raised).__name__
    return Outcome(error, seen, {name: _plain(namespace[name]) for name in NAMES + FUNCTIONS if name in namespace})


def helpers(seen: list[Any], choices: list[bool]) -> dict[str, Any]:
    """What programs use beside their names, all but builtins of theirs."""
    flags = itertools.chain(choices, itertools.repeat(False))
    ticks = itertools.chain(choices[::-1], itertools.repeat(False))

    def see(value: Any) -> Any:
        seen.append(_plain(value))
        return value

    def keep(function: Any) -> Any:
        kept.append(function)
        return function

    def call(function: Any) -> Any:
        seen.append(function())
        return function

    class Base:
        def __init_subclass__(cls) -> None:
            cls.method(cls)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def enter(value: Any) -> Iterator[Any]:
        yield value

    kept: list[Callable[[], Any]] = []
    return {
        "see": see,
        "flag": lambda: next(flags),
        "tick": lambda: next(ticks),
        "some": lambda: range(sum(choices[:2])),
        "keep": keep,
        "kept": lambda: [function() for function in kept],
        "call": call,
        "Base": Base,
        "enter": enter,
        "suppress": contextlib.suppress,
    }


def _plain(value: Any) -> Any:
    """Equal in two runs of a program that went alike."""
    return value if isinstance(value, (int, str, type(None))) else type(value).__name__


def difference(program: Program, needed: frozenset[str]) -> str:
    """How the run with only the ``needed`` names differs from the one with all; "" if nowhere."""
    whole = outcome(program, dict(program.notebook))
    part = outcome(program, {name: value for name, value in program.notebook.items() if name in needed})
    if (whole.error, whole.seen) != (part.error, part.seen):
        return f"{whole} differs from {part}"
    for name in NAMES + FUNCTIONS:
        # What did not travel and was not set is in the notebook as it was.
        here = program.notebook.get(name, _MISSING) if name not in needed else _MISSING
        theirs = whole.names.get(name, _MISSING)
        if part.names.get(name, _MISSING) is not theirs and part.names.get(name, here) != theirs:
            return f"{name}: {whole} differs from {part}"
    return ""


# ---------------------------------------------------------------------------- drawing them


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A cell of one to six statements."""
    # One draw of many bytes, each a choice: a thousand times as fast as a draw for each.
    source = _Writer(draw(st.binary(min_size=30, max_size=300))).block(_DEPTH, most=6)
    values = {name: st.just(number + 100) for number, name in enumerate((*NAMES, "f"))}
    return Program(
        source, draw(st.fixed_dictionaries({}, optional=values)), draw(st.lists(st.booleans(), min_size=2, max_size=8))
    )


# X and Y are names, F a function's, E an expression, B a block, L a block in a loop.
_EXPRESSIONS = """
(X := E) | (flag() and (X := E)) | (E or E) | (E if flag() else E) | [X for X in some()] | [(Y := X) for F in some()]
[Y for X in some() if E for X in [X]] | [E for X in [X]] | (lambda X=E: X + Y)() | (lambda: X) | sum(X for Y in some())
f"{X!r:>{Y}} {(Y := X)}" | (1 < E < (X := E) < Y) | {E: X, (X := 5): Y} | see(E) | eval('X') | globals()['X']
('X' in globals()) | (X + E) | [E, E][X:Y] | not E | len([*E, X]) | dict(X=E, **Y) | (X := Y, Y) | F()
"""
_SIMPLE = """
pass | X = E | X = E | X = E | see(E) | see(X) | see(X) | X += E | X: int | X: int = E | X, Y = E, Y | X = Y = E | del X
del X, Y | assert flag(), E | import math as X | from math import * | global X | see(F()) | keep(F) | see(kept())
X = F | exec('X = Y') | [X, *Y] = [1, 2] | X.real, Y = 1, 2 | raise ValueError
"""
_JUMPS = "break | if flag(): break | if flag(): continue | continue"
_NESTED = """
if E: B | if flag(): B | if flag(): B else: B | if E: B elif E: B else: B | if True: B | if 0: B else: B
for X in some(): L | for X in some(): L else: B | for X, Y in zip(some(), some()): L | for X in E: L
for X.x in some(): L | for [X, *Y] in [[X]]: L else: B
while tick(): L | while tick(): L else: B | while (X := tick()): L | while tick() and E: L else: B | while True: T
while 1: U
with suppress(Exception): B | with enter(E) as X: B | with suppress(Exception), enter(E) as X: B
with suppress(Exception) as X: B | with enter(X) as Y, suppress(E): B
try: B except: B | try: B except NameError: B except Exception as X: B | try: B except E: B else: B
try: B finally: B | try: B except (E, TypeError)[1]: B except: B else: B finally: B
match E: case 0: B case int(X) if E: B | match (0, 1): case (0, X): B case _: B | match E: case int(real=X): B
match flag(): case (True|1) as X if flag(): B case Y: B | match {1: E}: case {1: X, **Y}: B
match [X]: case [X.real, *_]: B case [X, *_]: B
def F(): B | def F(): G | def F(_=E): B | def F(_: X = 1): R | @keep def F(): R | @call def F(): G
class F: M | class F(Base): M | class X: C | class F: C | @keep class F: M
"""
_BODIES = {
    "G": "global X, Y\n{}\nreturn X",
    "R": "return see(X), F",
    "M": "{}\ndef method(self):\n    return see(X), Y",
    "C": "{}\nX = 1\ndel X\nsee(X)\nY = [X for _ in some()]\nsee((lambda: Y)())",
    "T": "if not tick(): break\n{}",
    "U": "try:\n    if tick(): X = 1\nfinally:\n    break",
}
_LETTERS = re.compile(r"\b[XYFE]\b")
_BLOCKS = re.compile(r"\b([BLGRMCTU])\b")


def _options(text: str) -> list[str]:
    return [option.strip() for line in text.strip().splitlines() for option in line.split(" | ")]


class _Writer:
    """Makes a program of bytes, each of them a choice; where there are no more, of the first that there is."""

    def __init__(self, choices: bytes) -> None:
        self._choices = iter(choices)

    def block(self, depth: int, *, in_loop: bool = False, most: int = 3) -> str:
        count = 1 + next(self._choices, 0) % most
        return "\n".join(self._statement(depth, in_loop) for _ in range(count))

    def _statement(self, depth: int, in_loop: bool) -> str:
        if depth and next(self._choices, 0) % 2:
            return self._nested(self._one_of(_options(_NESTED)), depth - 1, in_loop)
        return self._filled(self._one_of(_options(_SIMPLE) + _options(_JUMPS) * in_loop), 2)

    def _nested(self, template: str, depth: int, in_loop: bool) -> str:
        if template.startswith("match"):
            subject, cases = template.split(": ", 1)
            cases = self._nested(cases, depth, in_loop)
            return f"{self._filled(subject, 1)}:\n{textwrap.indent(cases, '    ')}"
        in_loop = in_loop and not template.startswith(("def", "class", "@"))  # out of those no loop can be left
        text = ""
        for part in filter(None, map(str.strip, _BLOCKS.split(template))):
            text += self._filled(part.replace("@keep ", "@keep\n").replace("@call ", "@call\n"), 1)
            if _BLOCKS.fullmatch(part):
                inside = self.block(depth, in_loop=in_loop or part in "LT")
                body = self._filled(_BODIES.get(part, "{}"), 1).replace("{}", inside)
                text = text[: -len(part)] + f"\n{textwrap.indent(body, '    ')}\n"
        return text.rstrip()

    def _filled(self, template: str, depth: int) -> str:
        names = {"X": self._one_of(NAMES), "Y": self._one_of(NAMES), "F": self._one_of(FUNCTIONS)}
        return _LETTERS.sub(lambda found: names.get(found[0]) or self._expression(depth), template)

    def _expression(self, depth: int) -> str:
        if not depth or not next(self._choices, 0) % 2:
            return self._one_of((*NAMES, "1"))
        return self._filled(self._one_of(_options(_EXPRESSIONS)), depth - 1)

    def _one_of(self, options: Sequence[str]) -> str:
        return options[next(self._choices, 0) % len(options)]
