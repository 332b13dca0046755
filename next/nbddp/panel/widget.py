"""The live panel: a widget whose state is one whole frame, so that a page that is reloaded needs nothing else."""

from __future__ import annotations

import base64
import pathlib
import time
from typing import Any

import anywidget  # noqa: TID253  # this module is imported when a panel is shown
import numpy as np
import traitlets

from nbddp.history.history import History
from nbddp.panel import html
from nbddp.panel.charts import Chart, Line, charts
from nbddp.panel.status import Status

_PAGE = pathlib.Path(__file__).with_name("page")
_LEAST_S, _SHARE, _BYTES_PER_S = 0.1, 0.05, 300_000  # of the kernel's time; a Jupyter server drops more than 1 MB/s


class Panel(anywidget.AnyWidget):
    """One live panel in the page. ``place``: class of the picture that it takes the place of."""

    _esm = "".join((_PAGE / name).read_text("utf-8") for name in ("uPlot.iife.min.js", "panel.js"))  # no build step
    _css = "".join((_PAGE / name).read_text("utf-8") for name in ("uPlot.min.css", "panel.css"))
    frame = traitlets.Dict().tag(sync=True)
    logs = traitlets.Dict().tag(sync=True)
    place = traitlets.Unicode("").tag(sync=True)
    kernel_id = traitlets.Unicode("").tag(sync=True)


class Frames:
    """Frames of a run, as often as they cost little."""

    def __init__(self, history: History, before: History | None = None) -> None:
        self._history = history
        self._before = before
        self._due = 0.0

    def next(self, status: Status) -> dict[str, Any] | None:
        """The run now; None if it is too early for another frame."""
        began = time.monotonic()
        if began < self._due and not status.over:
            return None
        lines = max(1, len(self._history))
        drawn, rest = charts(
            self._history, self._before, points=max(80, min(1200 if status.over else 360, 9_000 // lines))
        )
        frame = {
            "state": status.state,
            "over": status.over,
            "blocking": status.blocking,
            "parts": html.parts(self._history, status),
            "charts": (shown := [_chart(chart) for chart in drawn]),
            "rest": rest,
        }
        size = sum(len(line["x"]) + len(line["ys"]) for chart in shown for line in chart["lines"]) + 8_000
        took = time.monotonic() - began
        self._due = began + max(_LEAST_S, took / _SHARE, size / _BYTES_PER_S)
        return frame


def _chart(chart: Chart) -> dict[str, Any]:
    lines = [_line(line) for line in chart.lines]
    return {"title": chart.title, "caption": html.caption(chart), "lines": lines, "marks": chart.marks}


def _line(line: Line) -> dict[str, Any]:
    ys = np.concatenate([line.y, line.low, line.high])
    words = {"label": line.label, "color": line.color, "ghost": line.ghost, "dots": line.dots}
    return {**words, "smooth": line.smooth is not None, "x": _packed(line.x, "<f8"), "ys": _packed(ys, "<f4")}


def _packed(numbers: np.ndarray, kind: str) -> str:
    with np.errstate(over="ignore"):
        return base64.b64encode(numbers.astype(kind).tobytes()).decode()
