"""Describes the names on the line of the user's code that raised: what a debugger would be opened for."""

from __future__ import annotations

import ast
import inspect
import io
import keyword
import linecache
import re
import sys
import tokenize
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from nbddp.tracebacks import users_innermost

_MAX_CHARS = 4000  # of all descriptions
_MAX_LINES = 20  # of one statement
_MAX_VARIABLES = 12
_SECRET = re.compile(r"(?i:token|pass(w|phrase)|(\b|_)pwd|secret|credential|api_?key|(\b|_)key$|auth)|[a-z]Key$")
_LONG = 50  # characters of a text, bits of an integer
_MISSING = object()
_WITH_SHAPE = ("pandas", "polars", "scipy", "jax", "cupy")


def names(error: BaseException) -> tuple[tuple[str, str], ...]:
    """Return the names on the failing line of the user's innermost frame, each with what it stands for.

    If there are none, as in ``raise ValueError("bad batch")``, these are the function's variables.

    Nothing is read from an accelerator, and no code of a user's class is called.
    """
    try:
        return tuple(_names(error))
    except Exception:  # it must never replace the error itself
        return ()


def _names(error: BaseException) -> Iterator[tuple[str, str]]:
    entries = list(traceback.walk_tb(error.__traceback__))
    if not entries:
        return
    frame, line = entries[users_innermost([frame.f_code.co_filename for frame, _ in entries])]
    found = list(_described(_names_in(_statement(frame.f_code, line)), frame))
    if not found and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function's
        found = list(_described(list(frame.f_locals)[:_MAX_VARIABLES], frame))
    left = _MAX_CHARS
    for name, text in found:
        left -= len(name) + len(text)
        if left < 0:
            return
        yield name, text


def _described(wanted: Iterable[str], frame: types.FrameType) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys(wanted):
        value = _value_of(name, frame)
        if value is not _MISSING and not isinstance(value, (types.ModuleType, type)) and not _is_function(value):
            yield name, _describe_or_type(name, value)


def _describe_or_type(name: str, value: Any) -> str:
    try:
        return describe(name, value)
    except Exception:  # a nested tensor has no shape, for one; the other names are shown all the same
        return type(value).__name__


def _statement(code: types.CodeType, line: int) -> str:
    """Return the source of the failing line, with the lines that follow it in the same statement."""
    last = line
    if sys.version_info >= (3, 11):
        ends = [end for start, end, *_ in code.co_positions() if start == line and end is not None]
        last = min(max(ends, default=line), line + _MAX_LINES)
    return "".join(linecache.getline(code.co_filename, number) for number in range(line, last + 1))


def _names_in(source: str) -> Iterator[str]:
    """Yield names, and attributes with what they belong to, such as ``self.weight``."""
    chain: list[str] = []
    dotted = False
    tokens = tokenize.generate_tokens(io.StringIO(source.lstrip()).readline)
    try:
        for token in tokens:
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                chain = [*chain, token.string] if dotted else [token.string]
                yield ".".join(chain)
                dotted = False
            elif token.type == tokenize.STRING and "f" in token.string.lower().partition(token.string[-1])[0]:
                yield from _names_in_f_string(token.string)
                chain, dotted = [], False
            else:
                dotted = token.string == "." and bool(chain)
                chain = chain if dotted else []
    except (tokenize.TokenError, SyntaxError):  # the line is a part of a statement
        return


def _names_in_f_string(source: str) -> Iterator[str]:
    """Yield the names in an f-string, which is one token before Python 3.12."""
    for node in ast.walk(ast.parse(source, mode="eval")):
        if isinstance(node, ast.FormattedValue):
            yield from _names_in(ast.unparse(node.value))


def _value_of(name: str, frame: types.FrameType) -> Any:
    first, *attributes = name.split(".")
    value = frame.f_locals.get(first, frame.f_globals.get(first, _MISSING))
    for attribute in attributes:
        value = _attribute(value, attribute)
    return value


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without calling code, which a property would do."""
    found = getattr(value, "__dict__", {})
    if isinstance(value, types.ModuleType) or not isinstance(found, Mapping):
        return _MISSING
    if isinstance(value, torch.nn.Module):
        found = {**found, **value._parameters, **value._buffers, **value._modules}
    return found.get(name, _MISSING)


def _is_function(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType))


def describe(name: str, value: Any) -> str:
    """Describe a value in one line: ``Tensor (64, 3) float16 cuda:1``, ``list of 3``, ``0.1``."""
    kind = type(value).__name__
    if isinstance(value, (str, bytes)) and _SECRET.search(name):
        return f"{kind} (not shown)"
    if isinstance(value, torch.Tensor):
        described = f"{kind} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')} {value.device}"
        is_number = value.device.type == "cpu" and value.layout is torch.strided and value.numel() == 1
        return f"{described} = {value.detach().item()}" if is_number else described
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{kind} {value.shape} {value.dtype}" if value.shape else f"{kind} {value.dtype} = {value}"
    if isinstance(value, torch.nn.Module):
        parameter = next(value.parameters(), None)
        where = "" if parameter is None else f" {str(parameter.dtype).removeprefix('torch.')} {parameter.device}"
        return f"{kind}{where}"
    if type(value) in (str, bytes) and len(value) > _LONG:
        return f"{value[:_LONG]!r}... of {len(value):,}"
    if type(value) in (str, bytes, bool, float, complex, type(None)):
        return repr(value)
    if type(value) is int and value.bit_length() <= _LONG:
        return repr(value)
    if type(value) in (list, tuple, set, frozenset, dict):
        return f"{kind} of {len(value)}"
    if type(value).__module__.partition(".")[0] in _WITH_SHAPE and isinstance(getattr(value, "shape", None), tuple):
        return f"{kind} {value.shape}"
    return str(value) if isinstance(value, (torch.dtype, torch.device)) else kind
