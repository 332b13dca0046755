"""What a terminal adds to lines of text: it has a width and rewrites a line, and a small curve fits into a line."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from typing import TextIO

import numpy as np
import numpy.typing as npt

ERASE_LINE = "\r\x1b[K"
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_CHARS = 16
_LEAST_WIDTH = 20  # cells; a terminal that reports less does not know its width


def width(stream: TextIO) -> int | None:
    """The number of character cells in a line; None if the stream is not a terminal that can rewrite a line."""
    if os.environ.get("TERM") == "dumb" or not stream.isatty():
        return None
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    return columns - 1 if columns > _LEAST_WIDTH else None  # a full line may start another one


def fitted(parts: Sequence[str], cells: int) -> str:
    """As many of the parts as fit into this number of character cells, joined by dots; the first one may be cut."""
    shown = list(parts)
    while len(shown) > 1 and _cells(" · ".join(shown)) > cells:
        shown.pop()
    text = " · ".join(shown)
    if _cells(text) <= cells:
        return text
    while text and _cells(text) >= cells:
        text = text[:-1]
    return text + "…"


def sparkline(values: npt.NDArray[np.float64]) -> str:
    """The curve in at most 16 characters: ``▇▅▃▂▁``. "" for fewer than two finite values or a flat curve."""
    finite = values[np.isfinite(values)]
    if len(finite) < 2:
        return ""
    means = np.array([part.mean() for part in np.array_split(finite, min(_SPARK_CHARS, len(finite)))])
    low, high = float(means.min()), float(means.max())
    if not np.isfinite(high - low) or high <= low:
        return ""
    levels = np.minimum((means - low) / (high - low) * len(_BARS), len(_BARS) - 1).astype(int)
    return "".join(_BARS[level] for level in levels.tolist())


def _cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else not unicodedata.combining(char) for char in text)
