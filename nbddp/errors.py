"""Every exception that nbddp raises, with its message.

    NbddpError
    ├── LaunchError     invalid arguments, no such GPU, a rank ended before it was ready
    ├── PayloadError    an object that can't be pickled, with the user's name for it
    ├── RankError       the user's code raised on a rank
    ├── RankDied        a rank ended without a result and without a Python exception
    ├── CellError       a cell failed on a rank
    ├── SessionLost     a rank has ended, so the session is over
    ├── NodeLost        a node of several is gone, or can't be reached
    ├── RunTimeout      the run's timeout expired
    └── NanLogged       a rank logged NaN, and the run has stop_on_nan=True

A kernel interrupt is ``KeyboardInterrupt`` and none of these, so that "Run All" stops.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from nbddp.text import bounded, in_a_line, plain, ranks_text, uncolored
from nbddp.tracebacks import hidden_runs, user_frames

E = TypeVar("E", bound=BaseException)

MESSAGE_CHARS = 64 << 10  # of an error's text
CAUSE_CHARS = 10_000  # of the text of an exception that a rank raised
CRASHES = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT")
_FIELDS = ("rank", "world_size", "cause", "where", "host", "alike", "advice", "locals")  # of a RankError
_NOT_ALSO = (StopIteration, StopAsyncIteration, SyntaxError)  # end loops; and IPython shows it in a way of its own
_CAUSE = "run.error.cause"  # where the rest of a cut text is
_IPYTHON_HIDDEN = re.compile(r"\[\.\.\. skipping hidden \d+ frames?\]")


class NbddpError(Exception):
    """Base class of every exception that nbddp raises.

    Attributes:
        restarts: how many times all ranks had been restarted before this failure.
        first: the run's first failure if the run has been restarted; None otherwise.
    """

    restarts: int = 0
    first: NbddpError | None = None

    def __str__(self) -> str:
        return "\n".join([bounded(Exception.__str__(self), MESSAGE_CHARS, "error.args"), *self._restarts_text()])

    def __reduce__(self) -> tuple[Any, ...]:
        return Exception.__new__, (type(self), *self.args), vars(self)  # whatever __init__ takes

    def _restarts_text(self) -> list[str]:
        if self.first is None:
            return []
        times = f"{self.restarts} restart{'s' * (self.restarts != 1)}"
        return [f"Failed after {times}; the first failure was {in_a_line(self.first)}"]

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: the user's own frames, then the message, without the frames of nbddp."""
        return _render(type(self), self, user_frames(self.__traceback__), tb_offset=1)


class CellError(NbddpError):
    """A cell failed on a rank. The class is named after the rank's error; the traceback is what IPython made there.

    Attributes:
        rank: the rank that failed first in time.
    """

    rank: int
    shown: Sequence[str] = ()

    def _render_traceback_(self) -> list[str]:
        return [*self.shown]


class SessionLost(NbddpError):
    """A rank has ended, so the session is over."""


class LaunchError(NbddpError):
    """The run couldn't start: invalid arguments, a missing device, or a rank that ended before it was ready."""


class PayloadError(NbddpError):
    """An object can't be sent between the notebook and the ranks.

    Attributes:
        path: how the object was reached, by the user's own names, e.g. ``("train", "helper", "log_file")``.
        partial: if some return values couldn't be sent back, the return values by rank, with descriptions in place of
            the missing ones. None: the error is not about return values.
    """

    def __init__(self, message: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.partial: list[Any] | None = None


class RankError(NbddpError):
    """The user's code raised an exception on a rank. An ``except`` for that exception's class catches it, too.

    Attributes:
        rank: the rank that failed first in time.
        world_size: how many ranks the run had.
        cause: the original exception, also as ``__cause__``; its traceback holds the user's frames.
        where: if a collective timed out, where all ranks were, on one line; "" otherwise.
        host: the rank's host if the run is on several; None otherwise.
        alike: whether all ranks failed with the same error.
        advice: what to do about the error, if nbddp knows; "" otherwise.
        locals: the names on the failing line of your code, each with a description such as
            ``"Tensor (64, 10) float32 cuda:1"``.
    """

    def __new__(cls, *args: Any, **_: Any) -> RankError:
        made = _also_of_its_class(args[2]) if cls is RankError and len(args) == 3 else None
        return made or super().__new__(cls, *args)

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
        locals: Mapping[str, str] | None = None,
    ) -> None:
        what = bounded("".join(traceback.format_exception_only(type(cause), cause)).strip(), CAUSE_CHARS, _CAUSE)
        self._header = _header(rank, world_size, host, where, alike)
        first = f"{self._header}\n{what}" if where else f"{self._header}: {what}"
        Exception.__init__(self, "\n".join([first, *filter(None, [advice])]))  # the cause's class has its own
        self.rank, self.world_size, self.host = rank, world_size, host
        self.cause = self.__cause__ = cause
        self.where, self.alike, self.advice, self.locals = where, alike, advice, dict(locals or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return RankError, (self.rank, self.world_size, self.cause), {**self.__dict__, "args": self.args}

    def _render_traceback_(self) -> list[str]:
        shown = _render(type(self.cause), self.cause, self.cause.__traceback__, tb_offset=0)
        shown = [_cut(part) for part in _naming_libraries(shown, self.cause)]
        return [self._header, *shown, *self._locals_text(), *filter(None, [self.advice]), *self._restarts_text()]

    def _locals_text(self) -> list[str]:
        if not self.locals:
            return []
        width = max(map(len, self.locals))
        return ["", f"on rank {self.rank}:", *(f"  {name:{width}}  {text}" for name, text in self.locals.items())]


def _also_of_its_class(cause: BaseException) -> RankError | None:
    """Make an empty RankError that an ``except`` for the cause's class catches, with the cause's fields."""
    if not isinstance(cause, Exception) or isinstance(cause, (NbddpError, *_NOT_ALSO)):
        return None
    if any(inspect.isdatadescriptor(getattr(type(cause), name, None)) for name in _FIELDS):
        return None
    with contextlib.suppress(Exception):  # of a class that can't be a second base, or whose __new__ needs arguments
        kind = type("RankError", (RankError, type(cause)), {"__module__": __name__})
        made: RankError = super(RankError, kind).__new__(kind)  # type: ignore[misc]
        bases = set(type(cause).__mro__) - {*Exception.__mro__}
        slots = [name for base in bases for name, what in vars(base).items() if inspect.isdatadescriptor(what)]
        fields = vars(cause) | {name: getattr(cause, name) for name in slots if hasattr(cause, name)}
        for name in fields.keys() - {*dir(NbddpError)}:
            with contextlib.suppress(AttributeError):  # a property
                setattr(made, name, fields[name])
        return made
    return None


class RankDied(NbddpError):
    """A rank ended without a result and without a Python exception: a signal, ``os._exit``, ``sys.exit(3)``.

    Attributes:
        rank: the rank that ended.
        exitcode: as ``multiprocessing.Process.exitcode``: negative for a signal.
        signal_name: ``"SIGKILL"`` and the like, or None.
        where: if NCCL aborted the rank when a collective timed out, where all ranks were; "" otherwise.
        host: the rank's host if the run is on several; None otherwise.
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
        self.signal_name = signal_name(exitcode)
        parts = [f"{_rank_of(rank, world_size, host)} {why or _likely_cause(exitcode, self.signal_name)}"]
        parts += [f"Where the ranks were when it ended: {where}"] if where else []
        parts += [f"It was here (most recent call last):\n{stack}"] if stack else []
        parts += [f"Its last lines of output:\n{last_lines}"] if last_lines else []
        super().__init__("\n".join(parts))
        self.rank, self.world_size, self.exitcode, self.where, self.host = rank, world_size, exitcode, where, host


class NodeLost(NbddpError):
    """A node of the run is gone, or can't be reached.

    Attributes:
        node: its name.
    """

    def __init__(self, node: str, why: str) -> None:
        super().__init__(f"node {node} was lost: {why}")
        self.node, self.why = node, why


class RunTimeout(NbddpError):
    """The run took longer than its ``timeout`` (seconds of wall time), and its ranks were stopped."""


class NanLogged(NbddpError):
    """A rank logged NaN in a run with ``stop_on_nan=True``, and all ranks were stopped.

    Attributes:
        metric: the name of the metric with the first NaN.
        step: the step of this NaN.
        ranks: the rank that logged it first, in a list.
    """

    def __init__(self, metric: str, step: int, ranks: list[int]) -> None:
        super().__init__(
            f"{plain(metric)} became NaN at step {step} on {ranks_text(ranks)}; the run has stop_on_nan=True, so all "
            "ranks were stopped. Try a lower learning rate, clip the gradients, or look at that step's batch"
        )
        self.metric, self.step, self.ranks = metric, step, ranks


def without_our_frames(error: E) -> E:
    """An error of one of Python's own kinds, which a cell shows without the frames of nbddp."""
    render = lambda: _render(type(error), error, user_frames(error.__traceback__), tb_offset=1)  # noqa: E731
    error._render_traceback_ = render  # type: ignore[attr-defined]
    return error


def _render(etype: type[BaseException], error: BaseException, tb: TracebackType | None, tb_offset: int) -> list[str]:
    # Called by IPython, which is thus loaded already. No import here, since the ranks load this module too.
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or tb is None:
        return "".join(traceback.format_exception(etype, error, tb)).splitlines()
    return list(shell.InteractiveTB.structured_traceback(etype, error, tb, tb_offset=tb_offset))


def _cut(part: str) -> str:
    """One part of a traceback, bounded. A long part loses its colours, since a cut could leave a colour open."""
    return part if len(part) <= CAUSE_CHARS else bounded(uncolored(part), CAUSE_CHARS, _CAUSE)


def _naming_libraries(shown: list[str], error: BaseException) -> list[str]:
    """Replace IPython's ``[... skipping hidden 4 frame]`` by ``[4 frames in torch]``."""
    runs = list(hidden_runs(error))
    if len(runs) != sum(len(_IPYTHON_HIDDEN.findall(part)) for part in shown):
        return shown  # another traceback mode of IPython (%xmode), which hides no frames
    named = iter(f"[{len(run)} frame{'s' * (len(run) > 1)} in {', '.join(dict.fromkeys(run))}]" for run in runs)
    return [_IPYTHON_HIDDEN.sub(lambda _: next(named), part) for part in shown]


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


def signal_name(exitcode: int) -> str | None:
    """Return the name of the signal that ended a process; None if none did."""
    if exitcode >= 0:
        return None
    with contextlib.suppress(ValueError):  # it has no name
        return signal.Signals(-exitcode).name
    return f"signal {-exitcode}"


def _likely_cause(exitcode: int, signal_name: str | None) -> str:
    if signal_name == "SIGKILL":
        return (
            "was killed by SIGKILL without a Python error; most likely, it hit the memory limit: "
            "try a smaller batch, fewer ranks, or fewer DataLoader workers"
        )
    if signal_name in CRASHES:
        return f"crashed in native code ({signal_name})"
    if signal_name is not None:
        return f"was terminated by {signal_name}, sent by something outside nbddp"
    if exitcode == 0:
        return "ended with exit code 0 before it finished (os._exit?), so it has no result"
    return f"ended with exit code {exitcode} before it finished (os._exit?)"
