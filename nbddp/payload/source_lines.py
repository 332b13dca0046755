"""Selects the source lines that are sent with functions: those of the functions, and no other lines of the cell."""

from __future__ import annotations

import inspect
import linecache
import types
from collections.abc import Iterable, Iterator

_LEFT_OUT = "...\n"  # not an empty line, because indented lines below it would belong to the function above


def sources_of(codes: Iterable[types.CodeType]) -> dict[str, list[str]]:
    """The source of these functions by file name, each line at its line number, with ``...`` for all other lines.

    The rest of a cell, which may hold a token, a comment or other functions, is not sent.
    """
    found: dict[str, list[str]] = {}
    for code in codes:
        if not (lines := linecache.getlines(code.co_filename)):
            continue
        kept = found.setdefault(code.co_filename, [_LEFT_OUT] * len(lines))
        start = code.co_firstlineno - 1
        if code.co_name == "<lambda>":  # getblock() would return its whole statement, e.g. a call with all arguments
            stop = min(max(_line_numbers(code)), len(lines))
        else:
            stop = start + len(inspect.getblock(lines[start:]))
        kept[start:stop] = lines[start:stop]
    return found


def _line_numbers(code: types.CodeType) -> Iterator[int]:
    yield code.co_firstlineno
    yield from (number for *_, number in code.co_lines() if number is not None)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _line_numbers(constant)
