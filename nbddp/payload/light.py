"""Finds out whether a call surely needs none of the modules that torch imports only for training.

Optimizers, DistributedDataParallel and ``torch.compile`` import ``torch._dynamo``, which takes a second. A rank of a
kernel's first run starts without it if the call is light. If this is wrong, the rank imports the modules itself.
"""

from __future__ import annotations

import ast
import dis
import re
import sys
import types
from collections.abc import Iterable, Iterator

_LIGHT_MODULES = re.compile(
    r"""
    (numpy|nbddp|cloudpickle|__main__)(\..*)?
    | torch | torch\.distributed(\.distributed_c10d)?
    | torch\.(_C|_tensor|_utils|cuda|multiprocessing|random|storage|utils\.data)(\..*)?
    """,
    re.VERBOSE,
)
_NOT_LIGHT = {
    *("nn", "optim", "func", "compile", "export", "jit", "hub", "fsdp", "DistributedDataParallel", "wrap"),
    *("exec", "eval", "__import__", "import_module", "run_path", "run_module"),
}


def is_light(modules: Iterable[str], codes: Iterable[types.CodeType], texts: Iterable[str]) -> bool:
    """Return whether these lead to nothing but plain torch, numpy, nbddp and Python's own library.

    Args:
        modules: names of modules that objects of the call come from.
        codes: functions that are sent by value.
        texts: cells and scripts.
    """
    try:
        cells = [compile(text, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT) for text in texts]
    except (SyntaxError, ValueError):  # the rank says what is wrong
        return False
    every = list(_nested([*codes, *cells]))
    if any(_NOT_LIGHT & set(code.co_names) for code in every):
        return False
    return all(map(_is_light_module, [*modules, *(name for code in every for name in _imported_by(code))]))


def _imported_by(code: types.CodeType) -> Iterator[str]:
    return (str(each.argval) for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME")


def _is_light_module(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names or _LIGHT_MODULES.fullmatch(name) is not None


def _nested(codes: Iterable[types.CodeType]) -> Iterator[types.CodeType]:
    for code in codes:
        yield code
        yield from _nested(const for const in code.co_consts if isinstance(const, types.CodeType))
