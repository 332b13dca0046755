"""A rank's report of how an order has ended: with a value, an exception, or an exit."""

import itertools
import sys
import time
import traceback
from typing import Any

from nbddp import payload
from nbddp.messages import Failure, Report
from nbddp.payload import explain
from nbddp.text import bounded
from nbddp.tracebacks import drop_our_frames, make_picklable
from nbddp.worker import failing_line, main_module

_TEXT_CHARS = 2000
_MOST_VALUES = 1000  # that are looked at
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def finished(value: Any, what: str, named: dict[str, Any] | None = None) -> Report:
    """Report a value; of one that does not pickle, the parts that do.

    Args:
        what: names the value for the user.
        named: its parts, with the user's names.
    """
    at, options = time.monotonic(), dict[str, Any](back=True, received=main_module.received)
    if value is None:
        return Report(at)
    try:
        packed = payload.pack(value, **options)
        return Report(at, block=packed.block, weak_references=packed.weak_references)
    except Exception as error:  # whatever a user's __reduce__ raises
        explained = explain.explained(named or {"the result": value}, error, what=what, **options)
        rest = payload.pack(explain.parts_of(value, **options), **options).block
        return Report(at, block=rest, lost=str(explained), path=explained.path)


def has_tensors(value: Any) -> bool:
    """Return whether there may be a model in what a function returned, or its weights."""
    waiting, looked_at = [value], 0
    while waiting:
        each, looked_at = waiting.pop(), looked_at + 1
        if isinstance(each, (dict, list, tuple, set)):
            waiting += itertools.islice(each.values() if isinstance(each, dict) else each, _MOST_VALUES)
        elif not (isinstance(each, _PLAIN) or getattr(each, "shape", None) in ((), (1,))):
            return True
        if looked_at > _MOST_VALUES:  # a circle, perhaps
            return True
    return False


def exited(error: SystemExit, at: float) -> Report:
    """Report ``sys.exit``; print the text of the exit, as Python does."""
    code, text = error.code, ""
    if code is None or code == 0:
        return Report(at)
    if not isinstance(code, int):
        text, code = bounded(str(code), _TEXT_CHARS), 1
        print(text, file=sys.stderr)
    return Report(at, failure=Failure("call", "SystemExit", text, code=code & 0xFF))


def failed(error: BaseException, phase: str, at: float) -> Report:
    """Report an exception; if it does not pickle, one of the same name, text and frames."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    names = failing_line.names(error) if phase == "call" else ()
    drop_our_frames(error)
    make_picklable(error)
    try:
        block = payload.pack(error, back=True, received=main_module.received).block
    except Exception:  # whatever a user's __reduce__ raises
        kind = type(type(error).__name__, (Exception,), {"__module__": type(error).__module__})
        stand_in = kind(text.partition(": ")[2] or text).with_traceback(error.__traceback__)
        make_picklable(stand_in)
        block = payload.pack(stand_in, back=True).block
    frames = tuple((f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(error.__traceback__))
    failure = Failure(phase, type(error).__name__, bounded(text, _TEXT_CHARS), names, frames=frames)
    return Report(at, failure=failure, block=block)
