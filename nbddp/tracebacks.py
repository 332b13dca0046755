"""Reduces tracebacks to the user's frames, and makes them picklable."""

from __future__ import annotations

import collections
import copyreg
import functools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import tblib.pickling_support

_MAX_LINKS = 50  # of a chain of exceptions: pickle handles it by recursion, which Python limits
_PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
_HIDDEN = "__tracebackhide__"  # the local that IPython and pytest look for in a frame

Frame = tuple[str, str, int, int]  # file name, qualified function name, line, the function's first line


def is_our_file(filename: str) -> bool:
    """Whether this is a source file of nbddp."""
    return filename.startswith(_PACKAGE_DIR)


def user_frames(tb: TracebackType | None) -> TracebackType | None:
    """The same traceback without the frames of nbddp itself."""
    result: TracebackType | None = None
    for entry in reversed(_entries(tb)):
        if not is_our_file(entry.tb_frame.f_code.co_filename):
            result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def drop_our_frames(error: BaseException | None) -> None:
    """Remove the frames of nbddp from an exception, and from its causes and contexts."""
    for current, _ in _linked(error):
        current.__traceback__ = user_frames(current.__traceback__)


def _linked(error: BaseException | None) -> list[tuple[BaseException, int]]:
    """The exception, its causes and contexts, and the parts of an ExceptionGroup, each with its distance in links."""
    found: dict[int, tuple[BaseException, int]] = {}
    waiting = collections.deque([(error, 0)])
    while waiting:
        current, links = waiting.popleft()
        if current is not None and id(current) not in found:
            found[id(current)] = current, links
            parts = getattr(current, "exceptions", ())
            nested = [part for part in parts if isinstance(part, BaseException)] if isinstance(parts, tuple) else []
            waiting += [(linked, links + 1) for linked in (current.__cause__, current.__context__, *nested)]
    return list(found.values())


def library_of(files: Sequence[str]) -> list[str]:
    """The installed package of each source file of a stack, e.g. ``torch``; "" for the user's own files.

    The package in which the stack begins counts as the user's, too: a script or a function may itself be installed.

    Args:
        files: outermost first.
    """
    packages = [found[1].removesuffix(".py") if (found := _INSTALLED.match(file)) else "" for file in files]
    return ["" if package == packages[0] else package for package in packages]


def hide_libraries(error: BaseException) -> None:
    """Mark the frames of libraries as hidden for IPython, in a rank's exception and in the chain behind it."""
    begins_in = [entry.tb_frame.f_code.co_filename for entry in _entries(error.__traceback__)[:1]]
    for each in shown_chain(error):
        entries = _entries(each.__traceback__)
        files = begins_in + [entry.tb_frame.f_code.co_filename for entry in entries]
        for entry, library in zip(entries, library_of(files)[len(begins_in) :]):
            entry.tb_frame.f_locals[_HIDDEN] = library  # in a rebuilt frame, a plain dict


def hidden_runs(error: BaseException) -> Iterator[list[str]]:
    """The libraries of each group of consecutive hidden frames, in the order in which a cell shows the groups."""
    for each in reversed(list(shown_chain(error))):
        run: list[str] = []
        for entry in _entries(each.__traceback__):
            library = entry.tb_frame.f_locals.get(_HIDDEN) if entry.tb_next is not None else None
            if library:
                run.append(library)
            elif run:
                yield run
                run = []


def shown_chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and those in its chain that a traceback shows."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def make_picklable(error: BaseException) -> None:
    """Make ``error`` picklable with its causes, notes and tracebacks (tblib; also for unusual ``__init__`` methods).

    Of a long chain of causes, only the newest are kept.
    """
    _shorten(error)
    # The types and not the instance: tblib would follow the causes of an instance by recursion.
    tblib.pickling_support.install(*{type(linked) for linked, _ in _linked(error)})
    # tblib's own frames lose the first line of their function, and IPython would then show the wrong lines.
    copyreg.pickle(TracebackType, _reduce)
    for cls in _FILLED_BY_INIT:
        reduce = functools.partial(tblib.pickling_support.pickle_exception, builtin_inits=(cls.__init__,))
        copyreg.pickle(cls, reduce)


def _shorten(error: BaseException) -> None:
    linked = _linked(error)
    for current, links in linked:
        if links == _MAX_LINKS and (current.__cause__ or current.__context__):
            current.__cause__ = current.__context__ = None
            if hasattr(current, "add_note"):  # from Python 3.11 on
                current.add_note(f"[older exceptions are left out: the chain has {len(linked):,}]")


# Their line numbers and positions are C fields, which only a call of the class can fill.
_FILLED_BY_INIT = (
    SyntaxError,
    IndentationError,
    TabError,
    UnicodeDecodeError,
    UnicodeEncodeError,
    UnicodeTranslateError,
)


def _entries(tb: TracebackType | None) -> list[TracebackType]:
    entries = []
    while tb is not None:
        entries.append(tb)
        tb = tb.tb_next
    return entries


def _reduce(tb: TracebackType) -> tuple[Any, ...]:
    frames: list[Frame] = []
    for entry in _entries(tb):
        code = entry.tb_frame.f_code
        name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
        frames.append((code.co_filename, name, entry.tb_lineno, min(code.co_firstlineno, entry.tb_lineno)))
    return _rebuild, (frames,)


def _rebuild(frames: list[Frame]) -> TracebackType | None:
    result: TracebackType | None = None
    for filename, name, line, first_line in reversed(frames):
        stub = _raised_at(filename, name, line, first_line)
        result = TracebackType(result, stub.tb_frame, stub.tb_lasti, line)
    return result


def _raised_at(filename: str, name: str, line: int, first_line: int) -> TracebackType:
    """A real traceback entry of generated code, which has that function's name and raises on that line."""
    names = {"co_name": name.rpartition(".")[2]}
    if sys.version_info >= (3, 11):
        names["co_qualname"] = name
    source = "\n" * (line - first_line) + "raise StopIteration"
    code = compile(source, filename, "exec").replace(co_filename=filename, co_firstlineno=first_line, **names)  # type: ignore[arg-type]
    here: Any = None
    try:
        exec(code, {"__name__": "__main__"})
    except StopIteration as raised:
        here = raised.__traceback__
    entry: TracebackType = here.tb_next  # here is this function's entry, the next one the generated code's
    return entry
