"""Python's debugger, pdb, in a rank: its prompt is in the notebook."""

from __future__ import annotations

import builtins
import code
import contextlib
import ctypes
import pdb
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from nbddp import wire
from nbddp.errors import CAUSE_CHARS
from nbddp.text import bounded
from nbddp.tracebacks import users_innermost
from nbddp.worker import users_frames
from nbddp.worker.talk import Talk

_MAX_CHARS = 200_000  # of what one command prints
_MAX_PROMPT_CHARS = 1000
_LEAVE_INTERACT = ("exit", "exit()", "quit", "quit()")


class _Line:
    """The line to the notebook: stdin and stdout of pdb."""

    encoding = "utf-8"

    def __init__(self, talk: Talk) -> None:
        self.interrupted = False
        self.place: tuple[str, int, str] = ("", 0, "")
        self.error = ""
        self._talk = talk
        self._written: list[str] = []

    def write(self, text: str) -> int:
        self._written.append(text)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def take(self) -> str:
        """Return what has been written since the last time, in whole lines."""
        text, self._written = "".join(self._written), []
        text = _encodable(bounded(text, _MAX_CHARS))
        return text if not text or text.endswith("\n") else text + "\n"

    def readline(self) -> str:
        """Ask the notebook for a line; "" is the end of the file."""
        if self.interrupted:
            return ""
        # The prompt is what was written last; the output before it may end in the middle of a line.
        before, newline, prompt = (self._written.pop() if self._written else "").rpartition("\n")
        self.write(before + newline)
        asks = wire.Asks(self.take(), _encodable(bounded(prompt, _MAX_PROMPT_CHARS)), *self.place, self.error)
        try:
            line = self._talk.ask(asks)
        except (KeyboardInterrupt, EOFError, OSError):  # the last two: the notebook kernel has ended
            line, self.interrupted = None, True
        return "" if line is None else line + "\n"

    @contextlib.contextmanager
    def noting_interrupts(self) -> Iterator[None]:
        """Note an interrupt of the commands that are carried out meanwhile: pdb would go back to its prompt."""
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler) or threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(number: int, frame: FrameType | None) -> None:
            self.interrupted = True
            handler(number, frame)

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)

    def input(self, prompt: object = "", /) -> str:
        """As the builtin ``input()``."""
        self.write(str(prompt))
        line = self.readline()
        if not line:
            raise EOFError
        return line[:-1]


def _encodable(text: str) -> str:
    """The text with escapes for lone surrogates, which the notebook kernel cannot send to its page."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class RankPdb(pdb.Pdb):
    """pdb that talks to the notebook, knows nothing of nbddp's own frames, and never ends the process."""

    def __init__(self, talk: Talk) -> None:
        line = _Line(talk)
        super().__init__(stdin=line, stdout=line, skip=["nbddp", "nbddp.*"], nosigint=True, readrc=False)  # type: ignore[arg-type]
        self._line = line
        self._talk = talk
        self._users_innermost = 0
        self.is_open = False  # the prompt

    def stop_at(self, frame: FrameType) -> Any:
        """Open the prompt at this frame. Returns the function that traces the rank from here on, or None."""
        self.reset()
        self.botframe = users_frames.outermost(frame)
        self.interaction(frame, None)
        _write_locals(frame)
        if self._goes_on() and not self.breaks:
            return None
        for each, _ in traceback.walk_stack(frame):
            each.f_trace = self.trace_dispatch
            if each is self.botframe:
                break
        return self.trace_dispatch

    def look_at(self, error: Exception) -> None:
        """Open the prompt in the frames of an exception."""
        self.reset()
        entries = [tb for tb in _entries(error.__traceback__) if not users_frames.is_ours(tb.tb_frame)]
        if not entries:
            return
        self._users_innermost = users_innermost([tb.tb_frame.f_code.co_filename for tb in entries])
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        self._line.error = _encodable(bounded(text, CAUSE_CHARS))
        try:
            self.message(self._line.error)
            self.interaction(None, error.__traceback__)
        except KeyboardInterrupt:  # the run is being stopped
            pass
        finally:
            self._line.error = ""

    # ------------------------------------------------------------------ what pdb calls

    def interaction(self, frame: FrameType | None, tb_or_exc: Any) -> None:
        with self._prompt():
            super().interaction(frame, tb_or_exc)
        if self._line.interrupted or (self.quitting and not self._talk.nobody_answers):
            self._line.interrupted = False
            self._line.take()
            sys.settrace(None)
            raise KeyboardInterrupt
        if self.quitting:  # nobody can answer
            self.set_continue()
            self.quitting = False
        if frame is None or self._goes_on():
            self._talk.send(wire.GoesOn(self._line.take()))

    @contextlib.contextmanager
    def _prompt(self) -> Iterator[None]:
        before, builtins.input = builtins.input, self._line.input
        self.is_open = True
        try:
            with self._line.noting_interrupts():
                yield
        finally:
            self.is_open = False
            builtins.input = before

    def setup(self, f: FrameType | None, tb: TracebackType | None) -> Any:
        result = super().setup(f, tb)
        self._note_place()
        return result

    def _note_place(self) -> None:
        frame, line = self.stack[self.curindex]
        self._line.place = frame.f_code.co_filename, line, frame.f_code.co_name

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[Any], int]:
        stack, index = super().get_stack(f, t)
        shown = [entry for entry in stack if not users_frames.is_ours(entry[0])]
        if f is None:
            return shown, self._users_innermost
        index = max((i for i, entry in enumerate(shown) if entry[0] is f), default=len(shown) - 1)
        return shown, index

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        result = super().dispatch_return(frame, arg)
        if frame is self.botframe and not self._goes_on():
            self.set_continue()  # what follows is not the user's code
            self._talk.send(wire.GoesOn(""))
        return result

    def _goes_on(self) -> bool:
        """Return whether the last command was to go on until a breakpoint, if there is one."""
        return self.stopframe is self.botframe and self.stoplineno == -1

    def do_interact(self, arg: str) -> bool | None:
        """interact

        Start an interactive interpreter with the frame's names. exit() ends it.
        """
        assert self.curframe is not None
        # Python 3.14 deprecates curframe_locals; before 3.13 reading f_locals would undo assignments at the prompt.
        own = self.curframe.f_locals if sys.version_info >= (3, 13) else self.curframe_locals
        names = {**self.curframe.f_globals, **own}
        with contextlib.redirect_stdout(self._line), contextlib.redirect_stderr(self._line):
            console = code.InteractiveConsole(names)
            console.raw_input = self._read_interactive  # type: ignore[method-assign]
            console.interact(banner="*interactive*: exit() goes back to pdb", exitmsg="")
        return None

    def _read_interactive(self, prompt: str = "") -> str:
        line = self._line.input(prompt)
        if line.strip() in _LEAVE_INTERACT:
            raise EOFError
        return line

    def do_run(self, arg: str) -> None:
        """run

        A rank cannot begin again; end the run with q, and run the cell again.
        """
        self.error("a rank cannot begin again; end the run with q, and run the cell again")

    do_restart = do_run

    def help_rank(self) -> None:
        self.message("rank N\n\nGo to the prompt of rank N. rank all: commands go to all ranks that are at one line.")

    def help_ranks(self) -> None:
        self.message("ranks\n\nSay where each rank is.")

    def help_all(self) -> None:
        self.message("all COMMAND\n\nGive the command to all ranks that have stopped, for example: all p loss")


def _write_locals(frame: FrameType) -> None:
    """Make assignments at the prompt those of the function. From Python 3.13 on they already are."""
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _entries(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next
