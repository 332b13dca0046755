"""``breakpoint()`` and the post-mortem debugger of a function. Their prompts are ``input()``; the cell answers."""

import os
import pdb
import sys
import traceback
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from nbddp.helpers import context
from nbddp.tracebacks import drop_our_frames


class _Pdb(pdb.Pdb):
    """pdb for code that nbddp and IPython call, and without a signal handler of its own."""

    def __init__(self, entry: FrameType | None = None) -> None:
        super().__init__(skip=["nbddp.*", "IPython.*"], nosigint=True)
        self._entry = entry

    def _cmdloop(self) -> None:
        self.cmdloop()  # pdb's goes on after an interrupt, which should stop the rank

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        stack, index = super().get_stack(f, t)
        first = max((number for number, (frame, _) in enumerate(stack, 1) if _is_below(frame)), default=0)
        return stack[first:], index - first

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and sys.version_info < (3, 13):
            frame.f_trace_opcodes = False
            return self.dispatch_line(frame)
        return super().trace_dispatch(frame, event, arg)

    def stop_here(self, frame: FrameType) -> bool:
        entry = _entry_of(frame)  # not in what IPython calls between two lines of a cell
        return (entry is self._entry or entry.f_globals.get("__name__") == "__main__") and super().stop_here(frame)

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        if frame.f_code.co_name != "<module>":  # else it's the next line of a cell
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        if frame.f_code.co_name != "<module>":
            super().user_return(frame, return_value)


def _is_below(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(("nbddp.", "IPython."))


def _entry_of(frame: FrameType) -> FrameType:
    """Return the outermost frame of those on the stack that nbddp or IPython has called last."""
    while frame.f_back is not None and not _is_below(frame.f_back):
        frame = frame.f_back
    return frame


def install() -> None:
    """Replace ``breakpoint()`` and ``pdb.set_trace()``."""
    sys.breakpointhook = pdb.set_trace = _stop_here


def breakpoint(*, rank: int | Sequence[int] | None = None, when: Any = True) -> None:
    """Stop in the debugger, as ``breakpoint()`` does, on some ranks or under a condition.

    Args:
        rank: only on this rank, or on these. Default: on every rank.
        when: stop only if this is true; it may be a number or a tensor with one element.
    """
    ranks = [rank] if isinstance(rank, int) else rank
    if (ranks is None or context.rank() in ranks) and when:
        _stop_here()


def _stop_here(*_: Any, **__: Any) -> None:
    """Open the debugger in the innermost frame of the user's, unless ``PYTHONBREAKPOINT=0`` says that none should."""
    frame = sys._getframe(1)
    while _is_below(frame) and frame.f_back is not None:
        frame = frame.f_back
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    frame.f_trace_opcodes = sys.version_info < (3, 13)  # later ones stop in this line by themselves
    _Pdb(_entry_of(frame)).set_trace(frame)


def post_mortem(error: BaseException) -> None:
    """Open the debugger where the user's code raised."""
    print("".join(traceback.format_exception_only(type(error), error)), end="")
    drop_our_frames(error)
    debugger = _Pdb()
    debugger.reset()
    debugger.interaction(None, error.__traceback__)
