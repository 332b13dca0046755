"""Chooses the view of a run: the live panel, a picture that is renewed, or lines of text."""

from __future__ import annotations

import os

from nbddp.errors import LaunchError
from nbddp.panel import frontend
from nbddp.panel.live import ExecutedView, MarimoView, PanelView
from nbddp.panel.live_picture import PictureView
from nbddp.panel.text import TextView
from nbddp.panel.view import View, Viewable

_VARIABLE = "NBDDP_PANEL"
_KINDS = ("widget", "picture", "text")


def check(show: bool | str | None) -> None:
    """Raise ``LaunchError`` unless ``show=`` and the environment name a view that there is."""
    for source, kind in (("show=", show), (f"{_VARIABLE}=", os.environ.get(_VARIABLE))):
        if isinstance(kind, str) and kind and kind not in _KINDS:
            raise LaunchError(f"{source}{kind!r} is not known: use {', '.join(_KINDS)}")


def view_for(run: Viewable, *, show: bool | str | None, reopened: bool, with_output: bool) -> View:
    """The view that was asked for, or the best one that the present front end can show.

    Args:
        show: the kind of view; True: something else than lines of text, if there is a notebook kernel.
        reopened: the view is opened by ``run.show()``, and not by the run's own cell.
        with_output: show rank 0's output beside the panel.
    """
    kind = show if isinstance(show, str) else os.environ.get(_VARIABLE) or _best(show)
    if kind != "text" and with_output and frontend.is_marimo():  # its output belongs to the running cell
        return MarimoView(run) if kind == "widget" and frontend.marimo_shows_widgets() else PictureView(run)
    if frontend.shell() is None or kind == "text":
        return TextView(run)
    if kind == "widget":
        return PanelView(run, with_output=with_output, stays_live=reopened and run.status().over)
    return PictureView(run, with_output=with_output) if kind == "picture" else ExecutedView(run)


def _best(show: bool | None) -> str:
    if frontend.is_executed():
        return "picture" if show else ""
    return "picture" if frontend.place() else "widget"
