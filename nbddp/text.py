"""Makes text fit to show: cut to a length, on one line, without control characters; durations in words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

LINE_CHARS = 300  # of a text on one line: in the panel, in a table, within another error


def short(value: object) -> str:
    """``repr(value)``, cut to 60 characters for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def plain(text: str) -> str:
    """The text on one line, without characters that a terminal or XML cannot show."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


# Characters that XML forbids, that control a terminal, or that reverse the direction of a line.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """``; did you mean model?``; "" if no word is similar."""
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def bounded(text: str, chars: int, rest: str = "") -> str:
    """The text, cut to ``chars`` characters, with the number of missing ones and where to find them (``rest``)."""
    if len(text) <= chars:
        return text
    return f"{text[:chars]}\n… {len(text) - chars:,} more characters{f' in {rest}' if rest else ''}"


def first_line(text: str) -> str:
    """The first line, cut to ``LINE_CHARS``."""
    line = text[: LINE_CHARS + 1].partition("\n")[0]
    return line if len(line) <= LINE_CHARS else line[: LINE_CHARS - 1] + "…"


def in_a_line(error: BaseException) -> str:
    """The error's type and the first line of its text."""
    return first_line(f"{type(error).__name__}: {error}")


def fold(text: str) -> str:
    """The text as a terminal would show it: of a line rewritten with carriage returns, only the last state."""
    if "\r" not in text:
        return text
    return "\n".join(_folded_line(line) for line in text.split("\n"))


def _folded_line(line: str) -> str:
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def duration(seconds: float) -> str:
    """``3.2 s``, ``1:02`` or ``2:03:04``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
