"""Calls the user's function, and tells the debugger which frames of this rank are the user's."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

from nbddp.tracebacks import is_our_file, users_innermost


def call(function: Any) -> Any:
    """Call the user's function. In the debugger, the stack begins here."""
    return function()


_caller = call.__code__


def innermost(frame: FrameType) -> FrameType | None:
    """Return the innermost frame from here that is not a library's; None before and after the user's function."""
    frames = [each for each, _ in traceback.walk_stack(frame)]
    frames.reverse()
    inner = [each for each in frames[_first(frames) :] if not is_ours(each)]
    if not inner or all(each.f_code is not _caller for each in frames):
        return None
    return inner[users_innermost([each.f_code.co_filename for each in inner])]


def outermost(frame: FrameType) -> FrameType:
    """Return the user's outermost frame, which the last of our own frames below it has called."""
    frames = [each for each, _ in traceback.walk_stack(frame)]
    frames.reverse()
    return frames[_first(frames)]


def _first(frames: Sequence[FrameType]) -> int:
    """Return the index of the user's outermost frame."""
    for index, frame in enumerate(frames):
        if frame.f_code is _caller:
            return next((i for i in range(index, len(frames)) if not is_ours(frames[i])), index)
    return 0


def is_ours(frame: FrameType) -> bool:
    """Return whether the frame is of nbddp's own code."""
    return is_our_file(frame.f_code.co_filename)
