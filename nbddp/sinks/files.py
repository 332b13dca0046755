"""Sinks that are files: CSV and JSON lines."""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Sequence

from nbddp.atomic_file import WholeFile
from nbddp.history.history import History
from nbddp.sinks.interface import Points, Row, Sink, rows

_SHARE_OF_TIME = 0.05  # a CSV file has a column per metric and is written anew each time


class CsvFile(Sink):
    """``"csv:PATH"``: one line per step, one column per metric, as :meth:`nbddp.History.to_csv` writes it.

    The file is replaced whole while the run goes on, as often as takes a twentieth of the time.
    """

    path: str

    def __init__(self, path: str) -> None:
        self.name = f"csv:{path}"
        self.path = os.path.realpath(path)
        self._due = 0.0

    def write(self, points: Sequence[Points], history: History) -> None:
        began = time.monotonic()
        if points and began >= self._due:
            self._write(history)
            self._due = time.monotonic() + (time.monotonic() - began) / _SHARE_OF_TIME

    def close(self, history: History) -> None:
        self._write(history)

    def _write(self, history: History) -> None:
        with WholeFile(self.path, 0o666) as file:
            text = io.TextIOWrapper(file, "utf-8", newline="")
            history.write_csv(text)
            text.detach()  # flushes, and leaves the file open


class JsonLines(Sink):
    """``"jsonl:PATH"``: one JSON object per step, ``{"_step": 3, "_timestamp": 1767225600.5, "loss": 0.5}``.

    They are appended as they come: a step's metrics that were logged at different moments stand in several lines.
    NaN and infinities are null, which JSON has in their place. Each run begins the file anew.
    """

    path: str

    def __init__(self, path: str) -> None:
        self.name = f"jsonl:{path}"
        self.path = os.path.realpath(path)
        self._nbytes = 0

    def write(self, points: Sequence[Points], history: History) -> None:
        lines = "".join(f"{_json(row)}\n" for row in rows(points)).encode()
        with open(self.path, "r+b" if self._nbytes else "wb") as file:
            file.truncate(self._nbytes)  # without what a write that failed has left
            file.seek(self._nbytes)
            file.write(lines)
        self._nbytes += len(lines)


def _json(row: Row) -> str:
    values = {name: value if math.isfinite(value) else None for name, value in row.values.items()}
    return json.dumps({**values, "_step": row.step, "_timestamp": row.time})
