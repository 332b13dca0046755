"""Describes the names on the line of the user's code that raised: what a debugger would be opened for."""

import ast
import contextlib
import re
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from pure_eval import Evaluator
from stack_data.core import FrameInfo

from nbddp.tracebacks import entries_of, user_frames, users_innermost

_MAX_CHARS = 4000  # of all descriptions
_MAX_VARIABLES = 12
_SECRET = re.compile(r"(?i:token|pass(w|phrase)|(\b|_)pwd|secret|credential|api_?key|(\b|_)key\b|auth)|[a-z]Key\b")
_LEFT_OUT = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_PLAIN = (bool, int, float, complex, type(None), torch.dtype, torch.device)


def names(error: BaseException) -> tuple[tuple[str, str], ...]:
    """Return the names on the failing line of the user's innermost frame, each with what it stands for.

    If there are none, as in ``raise ValueError("bad batch")``, these are the function's variables. Nothing is read
    from an accelerator, and no code of a user's class is called (pure_eval).
    """
    try:
        entries = entries_of(user_frames(error.__traceback__))  # a clone of ours isn't an installed package
        at = users_innermost([entry.tb_frame.f_code.co_filename for entry in entries])
        info: Any = FrameInfo(entries[at])
        found = info.variables_in_executing_piece or info.variables[:_MAX_VARIABLES]
        named = {each.name: each.value for each in found} | dict(_of_modules(info))
    except Exception:  # it must never replace the error itself
        return ()
    described = []
    for name, value in named.items():
        if not isinstance(value, _LEFT_OUT):
            try:
                text = describe(name, value)
            except Exception:  # of this one, such as a nested tensor, which has no shape
                text = type(value).__name__
            described.append((name, text))
    while sum(map(len, (text for pair in described for text in pair))) > _MAX_CHARS:
        described.pop()
    return tuple(described)


def _of_modules(info: Any) -> Iterator[tuple[str, Any]]:
    """Yield parameters, buffers and parts of modules on the line, such as ``self.weight``: they are no attributes."""
    evaluator = Evaluator.from_frame(info.frame)
    for statement in info.executing.statements:
        for node in ast.walk(statement):
            with contextlib.suppress(Exception):
                if isinstance(node, ast.Attribute) and isinstance(module := evaluator[node.value], torch.nn.Module):
                    yield ast.unparse(node), {**module._parameters, **module._buffers, **module._modules}[node.attr]


def describe(name: str, value: Any) -> str:
    """Describe a value in one line: ``Tensor (64, 3) float16 cuda:1``, ``list of 3``, ``0.1``."""
    kind = type(value).__name__
    if isinstance(value, (str, bytes)) and _SECRET.search(name):
        return f"{kind} (not shown)"
    if isinstance(value, torch.Tensor):
        text = f"{kind} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')} {value.device}"
        on_cpu = value.device.type == "cpu" and value.layout is torch.strided and value.numel() == 1
        return f"{text} = {value.detach().item()}" if on_cpu else text
    if isinstance(value, np.ndarray):
        return f"{kind} {value.shape} {value.dtype}"
    if isinstance(value, (np.number, np.bool_)):
        return f"{kind} = {value}"
    if type(value) in (str, bytes):
        return repr(value[:60]) + (f"... (length {len(value):,})" if len(value) > 60 else "")
    if type(value) in _PLAIN:
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:60]}... (length {len(text):,})"
    return f"{kind} of {len(value)}" if type(value) in (list, tuple, set, frozenset, dict) else kind
