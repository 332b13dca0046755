"""Which lines of the notebook travel with its functions: their own, and no others of the cell."""

from __future__ import annotations

import inspect
import linecache
import types
from collections.abc import Iterable, Iterator

_LEFT_OUT = "...\n"  # not an empty line: what is indented further down would belong to the function above


def sources_of(codes: Iterable[types.CodeType]) -> dict[str, list[str]]:
    """The source of these functions by file name, every line in its place, and ``...`` for the others.

    A cell may hold more than the functions that travel: a token, a comment, other functions. Those lines stay.
    """
    found: dict[str, list[str]] = {}
    for code in codes:
        if not (lines := linecache.getlines(code.co_filename)):
            continue
        kept = found.setdefault(code.co_filename, [_LEFT_OUT] * len(lines))
        start, stop = code.co_firstlineno - 1, _end(code, lines)
        kept[start:stop] = lines[start:stop]
    return found


def _end(code: types.CodeType, lines: list[str]) -> int:
    """The index of the line behind the function's last one."""
    start = code.co_firstlineno - 1
    if (
        code.co_name == "<lambda>"
    ):  # the block that it begins is its whole statement, with the other arguments of a call
        return min(max(_numbers(code)), len(lines))
    return start + len(inspect.getblock(lines[start:]))


def _numbers(code: types.CodeType) -> Iterator[int]:
    yield code.co_firstlineno
    yield from (number for *_, number in code.co_lines() if number is not None)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _numbers(constant)
