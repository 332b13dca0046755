"""Both sides. Everything nbddp raises, and the words it says it with.

    NbddpError
    ├── LaunchError     bad arguments, no such GPU, a rank ended before it was ready
    ├── PayloadError    something that does not pickle, by the name the user gave it
    ├── RankError       the user's code raised on a rank
    ├── RankDied        a rank ended without a result and without a Python exception
    ├── HostLost        nothing more is heard of one of several hosts
    └── RunTimeout      the run's wall time is over

A kernel interrupt is ``KeyboardInterrupt`` and none of these, so that "Run All" stops.
"""

from __future__ import annotations

import signal
import sys
import traceback
from types import TracebackType
from typing import Any

from nbddp.tracebacks import user_frames


class NbddpError(Exception):
    """Base of every error that nbddp raises by itself.

    Attributes:
        restarts: how often all ranks had started again before this failure.
        first: of a run that has been restarted, its first failure; None otherwise.
    """

    restarts: int = 0
    first: NbddpError | None = None

    def after_restarts(self, restarts: int, first: NbddpError) -> None:
        """Let it tell that the run had been restarted, and what it first failed of."""
        self.restarts, self.first = restarts, first

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self._told_of_restarts()])

    def _told_of_restarts(self) -> list[str]:
        if self.first is None:
            return []
        times = f"{self.restarts} restart{'s' * (self.restarts != 1)}"
        return [f"That was after {times}; the first failure was {in_a_line(self.first)}"]

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: the reader's own frames, then the message, none of ours."""
        return _render(type(self), self, user_frames(self.__traceback__), tb_offset=1)


class LaunchError(NbddpError):
    """The run could not start: bad arguments, a missing device, or a rank that ended before it was ready."""


class PayloadError(NbddpError):
    """Something cannot travel between the notebook and the ranks.

    Attributes:
        path: how the object was reached, by the user's own names, e.g. ``("train", "helper", "log_file")``.
    """

    def __init__(self, message: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path = path


class RankError(NbddpError):
    """The user's code raised an exception on a rank.

    Attributes:
        rank: the rank that failed first in time.
        world_size: how many ranks the run had.
        cause: the original exception, also as ``__cause__``; its traceback holds the user's frames.
        where: of a collective that timed out, where all ranks were, in a line; "" otherwise.
        host: of a run on several, the rank's; None otherwise.
    """

    def __init__(
        self, rank: int, world_size: int, cause: BaseException, *, where: str = "", host: str | None = None
    ) -> None:
        what = "".join(traceback.format_exception_only(type(cause), cause)).strip()
        self._who = _rank_of(rank, world_size, host)
        super().__init__("\n".join([f"{self._who} failed: {what}", *_told_where(where)]))
        self.rank = rank
        self.world_size = world_size
        self.cause = cause
        self.where = where
        self.host = host
        self.__cause__ = cause

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.world_size, self.cause), {**self.__dict__, "args": self.args}

    def _render_traceback_(self) -> list[str]:
        header = f"{self._who} failed"
        shown = _render(type(self.cause), self.cause, self.cause.__traceback__, tb_offset=0)
        return [header, *shown, *_told_where(self.where), *self._told_of_restarts()]


class RankDied(NbddpError):
    """A rank ended without a result and without a Python exception: a signal, ``os._exit``, ``sys.exit(3)``.

    Attributes:
        rank: the rank that ended.
        exitcode: as ``multiprocessing.Process.exitcode``: negative for a signal.
        signal_name: ``"SIGKILL"`` and the like, or None.
        where: of a rank that NCCL aborted when a collective timed out, where all ranks were; "" otherwise.
        host: of a run on several, the rank's; None otherwise.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        exitcode: int,
        *,
        why: str = "",
        last_lines: str = "",
        where: str = "",
        host: str | None = None,
    ) -> None:
        self.signal_name = _signal_name(exitcode)
        text = f"{_rank_of(rank, world_size, host)} {why or _likely_cause(rank, exitcode, self.signal_name)}"
        if last_lines:
            text += f"\nits last lines of output:\n{last_lines}"
        super().__init__("\n".join([text, *_told_where(where)]))
        self.rank = rank
        self.world_size = world_size
        self.exitcode = exitcode
        self.where = where
        self.host = host

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.world_size, self.exitcode), {**self.__dict__, "args": self.args}


class HostLost(NbddpError):
    """Nothing more is heard of a host: its connection ended, or it was silent for the heartbeat's time.

    Its ranks end by themselves: they are killed there as soon as they have no connection to the notebook.

    Attributes:
        host: by the name that the user gave.
        why: what is known.
    """

    def __init__(self, host: str, why: str) -> None:
        super().__init__(f"{host} was lost: {why}")
        self.host = host
        self.why = why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.host, self.why), {**self.__dict__, "args": self.args}


class RunTimeout(NbddpError):
    """The run was still going when its ``timeout`` (seconds of wall time) was over; its ranks were stopped."""


def short(value: object) -> str:
    """A value as a message quotes it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def in_a_line(error: BaseException) -> str:
    """Its type and the first line of its text."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def interrupt(message: str) -> KeyboardInterrupt:
    """A plain KeyboardInterrupt, which a cell shows without our frames."""
    error = KeyboardInterrupt(message)
    render = lambda: _render(type(error), error, user_frames(error.__traceback__), tb_offset=1)  # noqa: E731
    error._render_traceback_ = render  # type: ignore[attr-defined]
    return error


def _render(etype: type[BaseException], error: BaseException, tb: TracebackType | None, tb_offset: int) -> list[str]:
    # Called by IPython, so it is there; never imported here, because workers load this module too.
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or tb is None:
        return "".join(traceback.format_exception(etype, error, tb)).splitlines()
    lines: list[str] = shell.InteractiveTB.structured_traceback(etype, error, tb, tb_offset=tb_offset)
    return lines


def _rank_of(rank: int, world_size: int, host: str | None) -> str:
    return f"rank {rank} of {world_size}" + (f" on {host}" if host is not None else "")


def _told_where(where: str) -> list[str]:
    return [f"When it failed, {where}"] if where else []


def _signal_name(exitcode: int) -> str | None:
    if exitcode >= 0:
        return None
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def _likely_cause(rank: int, exitcode: int, signal_name: str | None) -> str:
    if signal_name == "SIGKILL":
        return (
            "was killed by SIGKILL without a Python error; most often this is the memory limit: "
            "try a smaller batch, fewer ranks or fewer DataLoader workers"
        )
    if signal_name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"):
        return f"crashed in native code ({signal_name}); nbddp.last_run().logs({rank}) shows where it was"
    if signal_name is not None:
        return f"was ended by {signal_name}, sent by something outside nbddp"
    if exitcode == 0:
        return "left with exit code 0 before the function returned (os._exit?), so it has no result"
    return f"left with exit code {exitcode} before the function returned (sys.exit or os._exit?)"
