"""The live panel: a widget whose state is one whole frame, so that a page that is reloaded needs nothing else."""

import base64
import pathlib
import time
from typing import Any

import anywidget  # noqa: TID253  # this module is imported when a panel is shown
import numpy as np
import traitlets

from nbddp.panel import html
from nbddp.panel.charts import Chart, Line, charts
from nbddp.panel.status import Source, Status

_PAGE = pathlib.Path(__file__).with_name("page")
_LEAST_S, _SHARE, _BYTES_PER_S = 0.1, 0.05, 300_000  # of the kernel's time; a Jupyter server drops more than 1 MB/s
_LOG_CHARS, _LOG_CHARS_IN_ALL = 6_000, 16_000  # of what the ranks have printed; the second while they run


class Panel(anywidget.AnyWidget):
    """One live panel in the page. ``place``: class of the picture that it takes the place of.

    traitlets sends nothing that's equal to what it has sent before; the head, with its clock, changes each second.
    """

    _esm = "".join((_PAGE / name).read_text("utf-8") for name in ("uPlot.iife.min.js", "panel.js"))  # no build step
    _css = "".join((_PAGE / name).read_text("utf-8") for name in ("uPlot.min.css", "panel.css"))
    head = traitlets.Unicode().tag(sync=True)
    frame = traitlets.Dict().tag(sync=True)
    logs = traitlets.Dict().tag(sync=True)
    place = traitlets.Unicode().tag(sync=True)
    kernel_id = traitlets.Unicode().tag(sync=True)

    def __init__(self, place: str, kernel_id: str) -> None:
        super().__init__(place=place, kernel_id=kernel_id)
        # ipykernel 7.4 sends the page's messages to the thread that spoke last, which may be busy; without this, to the
        # subshell that the page asks for, as 7.0 to 7.3 do.
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda data, default: default
        self._due = 0.0
        self._states: list[Any] = []

    def update(self, source: Source, status: Status) -> None:
        """Send the run as it is now: at once if a state has changed, else as often as it costs little."""
        began = time.monotonic()
        states = [status.state, *((rank.state, rank.waits) for rank in status.ranks)]
        if began < self._due and states == self._states:
            return
        self._states = states
        parts = html.parts(source.history, status)
        points = max(80, min(1200 if status.over else 360, 9_000 // max(1, len(source.history))))
        drawn, rest = charts(source.history, source.before, points=points)
        chars = _LOG_CHARS if status.over else min(_LOG_CHARS, _LOG_CHARS_IN_ALL // max(1, len(status.ranks)))
        with self.hold_sync():  # one message
            self.head = parts.pop("head")
            self.frame = {
                "state": status.state,
                "said": f"{status.name}: {status.state}{f', {status.error}' * bool(status.error)}",
                "over": status.over,
                "waits": any(rank.waits for rank in status.ranks),
                "failed": status.failed_rank,
                "blocking": status.blocking,
                "parts": parts,
                "charts": [_chart(chart) for chart in drawn],
                "rest": rest,
            }
            self.logs = {str(rank.rank): source.tail(rank.rank, chars) for rank in status.ranks}
        size = sum(len(line["x"]) + len(line["ys"]) for chart in self.frame["charts"] for line in chart["lines"])
        took = time.monotonic() - began
        self._due = began + max(_LEAST_S, took / _SHARE, (size + _LOG_CHARS_IN_ALL) / _BYTES_PER_S)

    def leave(self) -> None:
        """Close the widget in the page, and the layout that ipywidgets has made for it."""
        self.layout.close()
        self.close()


def _chart(chart: Chart) -> dict[str, Any]:
    lines = [_line(line) for line in chart.lines]
    return {"title": chart.title, "caption": html.caption(chart), "lines": lines, "marks": chart.marks}


def _line(line: Line) -> dict[str, Any]:
    ys = np.concatenate([line.y, line.low, line.high])
    words = {"label": line.label, "color": line.color, "ghost": line.ghost, "dots": line.dots}
    return {**words, "smooth": line.is_noisy, "x": _packed(line.x, "<f8"), "ys": _packed(ys, "<f4")}


def _packed(numbers: np.ndarray, kind: str) -> str:
    with np.errstate(over="ignore"):
        return base64.b64encode(numbers.astype(kind).tobytes()).decode()
