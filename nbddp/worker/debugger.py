"""Stops this rank in Python's own debugger, pdb, whose prompt appears under the notebook's cell.

A rank that stops sends ``wire.Asks`` on its channel, and waits for the line that was typed there.
"""

from __future__ import annotations

import os
import pdb
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch.distributed as dist

from nbddp import wire
from nbddp.worker import context, group_timeouts, users_frames
from nbddp.worker.rank_pdb import RankPdb
from nbddp.worker.talk import Channel, Talk

SIGNAL = signal.SIGURG  # ignored by default, and hardly ever used: there is a message for the debugger on the channel


class _State:
    """What the debugger knows of this process.

    Attributes:
        pid: of the rank, to recognise its children; 0 in a process that is not a rank.
        in_call: the user's function runs.
        post_mortem: an exception of the user's code opens the debugger.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.talk: Talk
        self.in_call = self.post_mortem = False
        self.lock = threading.RLock()  # held by the thread that is stopped; other threads wait
        self.of_thread = threading.local()


_state = _State()


def connect(channel: Connection) -> None:
    """Use this channel to the notebook kernel."""
    _state.talk = Talk(channel)


def enter() -> None:
    """Make ``breakpoint()``, ``pdb.set_trace()`` and ``torch.distributed.breakpoint()`` stop this rank."""
    _state.pid = os.getpid()
    sys.breakpointhook = _hook
    pdb.set_trace = _set_trace
    dist.breakpoint = _distributed_breakpoint
    signal.signal(SIGNAL, _on_signal)


def expect_stops(may_stop: bool) -> None:
    """Let the collectives of this call wait for an hour if its code may stop; otherwise as long as they should."""
    group_timeouts.restore()
    if may_stop:
        group_timeouts.hold()


def receive(channel: Channel) -> wire.Message:
    """Receive a message between two calls; see :meth:`Talk.receive`."""
    return _state.talk.receive(channel)


def begin_call(job: wire.Job) -> None:
    """Begin a call of the user's function."""
    _state.talk.nobody_answers, _state.post_mortem = False, job.post_mortem
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


def _distributed_breakpoint(rank: int = 0, skip: int = 0, timeout_s: float = group_timeouts.TIMEOUT_S) -> None:
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
        if _state.talk.nobody_answers or not _state.in_call or debugger.is_open:  # in what was typed at the prompt
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
    for message in _state.talk.arrived():
        if isinstance(message, wire.HoldTimeouts):
            group_timeouts.hold()
        elif isinstance(message, wire.Look) and frame is not None:
            _state.talk.nobody_answers = False
            users = users_frames.innermost(frame)
            if users is None:
                sys.settrace(_stop_at_the_next)
            else:
                _stop_at(users)


def _stop_at_the_next(frame: FrameType, _event: str, _arg: Any) -> Any:
    """Stop in the first of the user's frames. A function for ``sys.settrace``."""
    if users_frames.innermost(frame) is not frame:
        return None
    sys.settrace(None)
    _stop_at(frame)
    return frame.f_trace


def _of_this_thread() -> RankPdb:
    if not hasattr(_state.of_thread, "debugger"):
        _state.of_thread.debugger = RankPdb(_state.talk)
    debugger: RankPdb = _state.of_thread.debugger
    return debugger
