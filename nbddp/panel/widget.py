"""Kernel side. The widget itself: what it sends and hears. The one module that imports the widget packages."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

_STATIC = pathlib.Path(__file__).with_name("static")


def _take_snapshot(_value: object, widget: PanelWidget) -> dict[str, Any]:
    return widget.take_snapshot()


class PanelWidget(anywidget.AnyWidget):
    """One live panel in the page.

    Attributes:
        snapshot: all that there is to show, made when somebody asks for the state: a reloaded page, a second view.
        heard: how many messages of the page have arrived; 0 is a front end that cannot reach a busy kernel.
        stopping: the Stop button's message has arrived.
        kernel_id: by which the server knows this kernel, "" when not known.
        place: class of the element in whose place it is shown; "": as a widget's view.
    """

    _esm = (_STATIC / "panel.js").read_text("utf-8")
    _css = (_STATIC / "panel.css").read_text("utf-8")
    snapshot = traitlets.Dict().tag(sync=True, to_json=_take_snapshot)
    heard = traitlets.Int(0).tag(sync=True)
    stopping = traitlets.Bool(False).tag(sync=True)
    kernel_id = traitlets.Unicode("").tag(sync=True)
    place = traitlets.Unicode("").tag(sync=True)

    def __init__(self, kernel_id: str, snapshot: Callable[[], tuple[dict[str, Any], bytes]], place: str = "") -> None:
        self._make_snapshot = snapshot
        super().__init__(kernel_id=kernel_id, place=place)
        self._be_heard_while_busy()

    def bundle(self) -> dict[str, Any]:
        """What ``display(..., raw=True)`` takes: its view."""
        bundle = self._repr_mimebundle_()
        return dict(bundle[0] if isinstance(bundle, tuple) else bundle or {})

    def take_snapshot(self) -> dict[str, Any]:
        content, data = self._make_snapshot()
        return {"content": content, "data": data}

    def leave(self) -> None:
        """Close it in the page, and the layout that ipywidgets has made for it."""
        self.layout.close()
        self.close()

    def _be_heard_while_busy(self) -> None:
        # ipykernel 7.4 sends the page's answers to the thread that spoke last, which is the busy
        # one. Ours go where the page sends them: to the subshell, as in 7.0 to 7.3.
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda _data, default: default
