"""Stops this rank in Python's own debugger, pdb, whose prompt appears under the notebook's cell.

A rank that stops sends ``wire.Asks`` on its channel, and waits for the line that was typed there.
"""

from __future__ import annotations

import builtins
import code
import contextlib
import ctypes
import datetime
import os
import pdb
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from nbddp import wire
from nbddp.errors import CAUSE_CHARS
from nbddp.text import bounded
from nbddp.tracebacks import is_our_file, users_innermost
from nbddp.worker import context

SIGNAL = signal.SIGURG  # ignored by default, and hardly ever used: there is a message for the debugger on the channel
TIMEOUT_S = 3600.0  # of collectives while a rank is stopped
_MAX_CHARS = 200_000  # of what one command prints
_MAX_PROMPT_CHARS = 1000
_set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # private before torch 2.15
_LEAVE_INTERACT = ("exit", "exit()", "quit", "quit()")


class _State:
    """What the debugger knows of this process.

    Attributes:
        pid: of the rank, to recognise its children; 0 in a process that is not a rank.
        in_call: the user's function runs.
        reading: held by the thread that reads the channel, so that no other takes its messages.
        skips: nobody can answer in this call.
        post_mortem: an exception of the user's code opens the debugger.
        timeouts: of the process groups whose collectives wait for an hour, by name: those before.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.channel: Connection
        self.in_call = self.skips = self.post_mortem = False
        self.reading = threading.Lock()
        self.timeouts: dict[str, datetime.timedelta] = {}
        self.lock = threading.RLock()  # held by the thread that is stopped; other threads wait
        self.of_thread = threading.local()


_state = _State()


def enter(channel: Connection) -> None:
    """Make ``breakpoint()``, ``pdb.set_trace()`` and ``torch.distributed.breakpoint()`` stop this rank."""
    _state.pid, _state.channel = os.getpid(), channel
    sys.breakpointhook = _hook
    pdb.set_trace = _set_trace
    dist.breakpoint = _distributed_breakpoint
    signal.signal(SIGNAL, _on_signal)


def expect_stops(may_stop: bool) -> None:
    """Let the collectives of this call wait for an hour if its code may stop; otherwise as long as they should."""
    _restore_timeouts()
    if may_stop:
        hold_timeouts()


class Channel(Protocol):
    """What messages come from: a ``Connection``, or something like it."""

    def recv_bytes(self) -> bytes: ...


def receive(channel: Channel) -> wire.Message:
    """Receive a message after a call. The kernel first lets a thread go that has been left at the prompt."""
    with _state.reading:
        return wire.decode(channel.recv_bytes())


def begin_call(job: wire.Job) -> None:
    """Begin a call of the user's function."""
    _state.skips, _state.post_mortem = False, job.post_mortem
    _state.in_call = True


def end_call() -> None:
    """End a call of the user's function: what follows is not the user's code."""
    _state.in_call = False
    sys.settrace(None)


# ---------------------------------------------------------------------------- the user's breakpoints


def breakpoint(*, rank: int | Sequence[int] | None = None, when: Any = True) -> None:
    """Stop in the debugger, as ``breakpoint()`` does, on some ranks or under a condition.

    Args:
        rank: only on this rank, or these. Default: on every rank.
        when: stop only if this is true; a number, or a tensor of one element, too.
    """
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    ranks = [rank] if isinstance(rank, int) else rank
    if (ranks is not None and context.rank() not in ranks) or not when:
        return
    if _state.pid:
        _stop_at(sys._getframe(1))
    else:
        pdb.Pdb().set_trace(sys._getframe(1))


def _hook(*args: Any, **kwargs: Any) -> Any:
    if os.environ.get("PYTHONBREAKPOINT", "") not in ("", "pdb.set_trace"):
        return sys.__breakpointhook__(*args, **kwargs)  # 0, or another debugger
    return _stop_at(sys._getframe(1))


def _set_trace(*_: Any, **__: Any) -> None:
    _stop_at(sys._getframe(1))


def _distributed_breakpoint(rank: int = 0, skip: int = 0, timeout_s: float = TIMEOUT_S) -> None:
    frame = sys._getframe(1)
    place = frame.f_code.co_filename, frame.f_lineno
    _passed[place] = _passed.get(place, 0) + 1
    if _passed[place] > skip and context.rank() == rank:
        _stop_at(frame)


_passed: dict[tuple[str, int], int] = {}  # how often, by place


def _stop_at(frame: FrameType) -> None:
    if os.getpid() != _state.pid:
        raise RuntimeError(
            f"breakpoint() in a child process of rank {context.rank()}, such as a DataLoader worker, has no prompt: "
            "pass num_workers=0, and the rank itself loads the data"
        )
    with _state.lock:
        debugger = _of_this_thread()
        if _state.skips or not _state.in_call or debugger.is_open:  # in what was typed at the prompt
            return
        trace = debugger.stop_at(frame)
        if trace is not None:
            sys.settrace(trace)  # the last call here: all later ones are traced


def post_mortem(error: BaseException) -> None:
    """Open the debugger where the user's code raised, if the run asks for it."""
    if _state.post_mortem and isinstance(error, Exception) and os.getpid() == _state.pid:
        with _state.lock:
            _of_this_thread().look_at(error)


def _on_signal(_number: int, frame: FrameType | None) -> None:
    if os.getpid() != _state.pid or not _state.in_call:
        return
    for message in _messages():
        if isinstance(message, wire.HoldTimeouts):
            hold_timeouts()
        elif isinstance(message, wire.Look) and frame is not None:
            _state.skips = False
            users = _users_frame(frame)
            if users is None:
                sys.settrace(_stop_at_the_next)
            else:
                _stop_at(users)


def _messages() -> list[wire.Message]:
    """Return the messages that have arrived, unless a thread reads them at the prompt."""
    messages: list[wire.Message] = []
    if _state.reading.acquire(blocking=False):
        try:
            while _state.channel.poll():
                messages.append(wire.decode(_state.channel.recv_bytes()))
        finally:
            _state.reading.release()
    return messages


def _stop_at_the_next(frame: FrameType, _event: str, _arg: Any) -> Any:
    """Stop in the first of the user's frames. A function for ``sys.settrace``."""
    if _users_frame(frame) is not frame:
        return None
    sys.settrace(None)
    _stop_at(frame)
    return frame.f_trace


def hold_timeouts() -> None:
    """Let the collectives that begin from now on in this call wait for an hour, in all process groups."""
    for group, name in list(distributed_c10d._world.pg_names.items()):  # private; torch 2.6 to 2.15
        with contextlib.suppress(ValueError):  # this rank is not in it
            before = _timeout_of(group)
            _set_timeout(datetime.timedelta(seconds=TIMEOUT_S), group)
            if before is not None:
                _state.timeouts.setdefault(name, before)


def _restore_timeouts() -> None:
    """Undo :func:`hold_timeouts` of a session's last call."""
    timeouts, _state.timeouts = _state.timeouts, {}
    for group, name in list(distributed_c10d._world.pg_names.items()) if timeouts else ():
        if name in timeouts:
            _set_timeout(timeouts[name], group)


def _timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Return the timeout of a group's collectives; None for a backend that does not say it. Private, as above."""
    backends: list[Any] = [group._get_backend(device) for device in getattr(group, "_device_types", ())]
    timeouts = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends]
    return next(filter(None, timeouts), None)


def _users_frame(frame: FrameType) -> FrameType | None:
    """Return the innermost frame from here that is not a library's; None before and after the user's function."""
    frames = [each for each, _ in traceback.walk_stack(frame)]
    frames.reverse()
    inner = [each for each in frames[_first_of_the_call(frames) :] if not _is_ours(each)]
    if not inner or all(each.f_code is not _caller for each in frames):
        return None
    return inner[users_innermost([each.f_code.co_filename for each in inner])]


def _first_of_the_call(frames: Sequence[FrameType]) -> int:
    """Return the index of the user's outermost frame, which the last of our own frames below it has called."""
    for index, frame in enumerate(frames):
        if frame.f_code is _caller:
            return next((i for i in range(index, len(frames)) if not _is_ours(frames[i])), index)
    return 0


_caller: Any = None  # the code of the function that calls the user's


def call(function: Any) -> Any:
    """Call the user's function. In the debugger, the stack begins here."""
    return function()


_caller = call.__code__


def _is_ours(frame: FrameType) -> bool:
    return is_our_file(frame.f_code.co_filename)


# ---------------------------------------------------------------------------- pdb


def _of_this_thread() -> _RankPdb:
    if not hasattr(_state.of_thread, "debugger"):
        _state.of_thread.debugger = _RankPdb(_Line(_state.channel))
    debugger: _RankPdb = _state.of_thread.debugger
    return debugger


class _Line:
    """The line to the notebook: stdin and stdout of pdb."""

    encoding = "utf-8"

    def __init__(self, channel: Connection) -> None:
        self.interrupted = False
        self.place: tuple[str, int, str] = ("", 0, "")
        self.error = ""
        self._channel = channel
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
            line = self._answer_to(asks)
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

    def _answer_to(self, asks: wire.Asks) -> str | None:
        with _state.reading:
            self.send(asks)
            while True:
                self._channel.poll(None)  # an interrupt that arrives here leaves the channel as it is
                message = wire.decode(self._channel.recv_bytes())
                if isinstance(message, wire.HoldTimeouts):
                    hold_timeouts()
                elif isinstance(message, wire.Answer):
                    _state.skips = message.line is None
                    return message.line

    def send(self, message: wire.Message) -> None:
        with contextlib.suppress(OSError):
            self._channel.send_bytes(wire.encode(message))

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


class _RankPdb(pdb.Pdb):
    """pdb that talks to the notebook, knows nothing of nbddp's own frames, and never ends the process."""

    def __init__(self, line: _Line) -> None:
        super().__init__(stdin=line, stdout=line, skip=["nbddp", "nbddp.*"], nosigint=True, readrc=False)  # type: ignore[arg-type]
        self._line = line
        self._users_innermost = 0
        self.is_open = False  # the prompt

    def stop_at(self, frame: FrameType) -> Any:
        """Open the prompt at this frame. Returns the function that traces the rank from here on, or None."""
        self.reset()
        self._begin(frame)
        self.interaction(frame, None)
        _write_locals(frame)
        if self._goes_on() and not self.breaks:
            return None
        for each, _ in traceback.walk_stack(frame):
            each.f_trace = self.trace_dispatch
            if each is self.botframe:
                break
        return self.trace_dispatch

    def _begin(self, frame: FrameType) -> None:
        frames = [each for each, _ in traceback.walk_stack(frame)]
        frames.reverse()
        self.botframe = frames[_first_of_the_call(frames)]

    def look_at(self, error: Exception) -> None:
        """Open the prompt in the frames of an exception."""
        self.reset()
        entries = [tb for tb in _entries(error.__traceback__) if not _is_ours(tb.tb_frame)]
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
        if self._line.interrupted or (self.quitting and not _state.skips):
            self._line.interrupted = False
            self._line.take()
            sys.settrace(None)
            raise KeyboardInterrupt
        if self.quitting:  # nobody can answer
            self.set_continue()
            self.quitting = False
        if frame is None or self._goes_on():
            self._line.send(wire.GoesOn(self._line.take()))

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
        shown = [entry for entry in stack if not _is_ours(entry[0])]
        if f is None:
            return shown, self._users_innermost
        index = max((i for i, entry in enumerate(shown) if entry[0] is f), default=len(shown) - 1)
        return shown, index

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        result = super().dispatch_return(frame, arg)
        if frame is self.botframe and not self._goes_on():
            self.set_continue()  # what follows is not the user's code
            self._line.send(wire.GoesOn(""))
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
