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

import difflib
import re
import signal
import sys
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from nbddp.tracebacks import hidden_runs, user_frames

MESSAGE_CHARS = 64 << 10  # of an error's text
CAUSE_CHARS = 10_000  # of the exception that a rank raised
LINE_CHARS = 300  # of what has a line to itself: in the panel, in a table, in another error
CRASHES = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT")
_CAUSE = "run.error.cause"  # where the rest of it is
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_IPYTHONS_FOLD = re.compile(r"\[\.\.\. skipping hidden \d+ frames?\]")


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
        return "\n".join([bounded(super().__str__(), MESSAGE_CHARS, "error.args"), *self._told_of_restarts()])

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
        partial: of a function whose return values cannot all come back, what did, by rank; what stands there for the
            others is shown as they were. None: nothing was on its way back.
    """

    def __init__(self, message: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.partial: list[Any] | None = None


class RankError(NbddpError):
    """The user's code raised an exception on a rank.

    Attributes:
        rank: the rank that failed first in time.
        world_size: how many ranks the run had.
        cause: the original exception, also as ``__cause__``; its traceback holds the user's frames.
        where: of a collective that timed out, where all ranks were, in a line; "" otherwise.
        host: of a run on several, the rank's; None otherwise.
        alike: did all ranks fail with the same error?
        advice: what to do about it, where nbddp knows; "" otherwise.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        cause: BaseException,
        *,
        where: str = "",
        host: str | None = None,
        alike: bool = False,
        advice: str = "",
    ) -> None:
        what = bounded("".join(traceback.format_exception_only(type(cause), cause)).strip(), CAUSE_CHARS, _CAUSE)
        self._header = _header(rank, world_size, host, where, alike)
        first = f"{self._header}\n{what}" if where else f"{self._header}: {what}"
        super().__init__("\n".join([first, *([advice] if advice else [])]))
        self.rank = rank
        self.world_size = world_size
        self.cause = cause
        self.where = where
        self.host = host
        self.alike = alike
        self.advice = advice
        self.__cause__ = cause

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.world_size, self.cause), {**self.__dict__, "args": self.args}

    def _render_traceback_(self) -> list[str]:
        shown = _render(type(self.cause), self.cause, self.cause.__traceback__, tb_offset=0)
        shown = [_cut(part) for part in _naming_libraries(shown, self.cause)]
        return [self._header, *shown, *([self.advice] if self.advice else []), *self._told_of_restarts()]


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
        stack: str = "",
        last_lines: str = "",
        where: str = "",
        host: str | None = None,
    ) -> None:
        self.signal_name = _signal_name(exitcode)
        parts = [f"{_rank_of(rank, world_size, host)} {why or _likely_cause(exitcode, self.signal_name)}"]
        parts += [f"When it ended, {where}"] if where else []
        parts += [f"It was here (most recent call last):\n{stack}"] if stack else []
        parts += [f"Its last lines of output:\n{last_lines}"] if last_lines else []
        super().__init__("\n".join(parts))
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
        super().__init__(f"{host} was lost: {bounded(why, CAUSE_CHARS, 'error.why')}")
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


def plain(text: str) -> str:
    """One line that any terminal and any XML can hold."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


# What XML forbids, what steers a terminal, and what turns a line's direction around.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """``; did you mean model?``; "" where nothing is like it."""
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def bounded(text: str, chars: int, rest: str = "") -> str:
    """The text, or so many characters of it, how many more there are, and where: ``rest``."""
    if len(text) <= chars:
        return text
    return f"{text[:chars]}\n… {len(text) - chars:,} more characters{f' in {rest}' if rest else ''}"


def first_line(text: str) -> str:
    """The first line, as much of it as a line of the panel can hold."""
    line = text[: LINE_CHARS + 1].partition("\n")[0]
    return line if len(line) <= LINE_CHARS else line[: LINE_CHARS - 1] + "…"


def in_a_line(error: BaseException) -> str:
    """Its type and the first line of its text."""
    return first_line(f"{type(error).__name__}: {error}")


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


def _cut(part: str) -> str:
    """One of a cell's parts of a traceback; of a long one without colours, which would not end, nor count."""
    return part if len(part) <= CAUSE_CHARS else bounded(_COLOURS.sub("", part), CAUSE_CHARS, _CAUSE)


def _naming_libraries(shown: list[str], error: BaseException) -> list[str]:
    """IPython's ``[... skipping hidden 4 frame]`` as ``[4 frames in torch]``."""
    runs = list(hidden_runs(error))
    if len(runs) != sum(len(_IPYTHONS_FOLD.findall(part)) for part in shown):
        return shown  # another mode of IPython's (%xmode), which hides none
    told = iter(f"[{len(run)} frame{'s' * (len(run) > 1)} in {', '.join(dict.fromkeys(run))}]" for run in runs)
    return [_IPYTHONS_FOLD.sub(lambda _: next(told), part) for part in shown]


def _header(rank: int, world_size: int, host: str | None, where: str, alike: bool) -> str:
    if where:
        return f"{_rank_of(rank, world_size, host)} timed out in a collective: {where}"
    if alike and world_size > 1:
        all_of_them = "both" if world_size == 2 else f"all {world_size}"
        return f"{all_of_them} ranks failed, rank {rank}{_on(host)} first"
    return f"{_rank_of(rank, world_size, host)} failed"


def _rank_of(rank: int, world_size: int, host: str | None) -> str:
    return f"rank {rank} of {world_size}{_on(host)}"


def _on(host: str | None) -> str:
    return f" on {host}" if host is not None else ""


def _signal_name(exitcode: int) -> str | None:
    if exitcode >= 0:
        return None
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def _likely_cause(exitcode: int, signal_name: str | None) -> str:
    if signal_name == "SIGKILL":
        return (
            "was killed by SIGKILL without a Python error; most often this is the memory limit: "
            "try a smaller batch, fewer ranks or fewer DataLoader workers"
        )
    if signal_name in CRASHES:
        return f"crashed in native code ({signal_name})"
    if signal_name is not None:
        return f"was ended by {signal_name}, sent by something outside nbddp"
    if exitcode == 0:
        return "left with exit code 0 before the function returned (os._exit?), so it has no result"
    return f"left with exit code {exitcode} before the function returned (sys.exit or os._exit?)"
