"""``breakpoint()`` and the post-mortem debugger of a function. Their prompts are ``input()``; the cell answers."""

from __future__ import annotations

import pdb
import sys
import traceback
from types import FrameType
from typing import Any


class _Pdb(pdb.Pdb):
    """pdb without our frames, and without a signal handler of its own."""

    def __init__(self) -> None:
        super().__init__(skip=["nbddp.*"], nosigint=True)
        self.allow_kbdint = True  # an interrupt at the prompt stops the rank


def install() -> None:
    """Replace ``breakpoint()``."""
    sys.breakpointhook = stop_here


def stop_here(*_: Any, **__: Any) -> None:
    """Open the debugger in the frame that calls ``breakpoint()``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("nbddp."):
        frame = frame.f_back
    _Pdb().set_trace(frame)


def post_mortem(error: BaseException) -> None:
    """Open the debugger where the user's code raised."""
    print("".join(traceback.format_exception_only(type(error), error)), end="")
    debugger = _Pdb()
    debugger.reset()
    debugger.interaction(None, error.__traceback__)
