"""The panel's widget, and the state that it shares with the page. No other module imports the widget packages."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

_STATIC = pathlib.Path(__file__).with_name("static")


class PanelWidget(anywidget.AnyWidget):
    """One live panel in the page.

    Attributes:
        snapshot: everything to show, built when the state is requested: by a reloaded page, for a second view.
        heard: how many messages of the page have arrived; 0 means that the page cannot reach a busy kernel.
        stopping: the Stop button's message has arrived.
        kernel_id: the Jupyter server's id of this kernel, "" if not known.
        place: class of the element that the panel replaces in the page; "": it is shown as a widget's view.
    """

    _esm = (_STATIC / "panel.js").read_text("utf-8")
    _css = (_STATIC / "panel.css").read_text("utf-8")
    snapshot = traitlets.Dict().tag(sync=True, to_json=lambda _value, widget: widget.take_snapshot())
    heard = traitlets.Int(0).tag(sync=True)
    stopping = traitlets.Bool(False).tag(sync=True)
    kernel_id = traitlets.Unicode("").tag(sync=True)
    place = traitlets.Unicode("").tag(sync=True)

    def __init__(self, kernel_id: str, snapshot: Callable[[], tuple[dict[str, Any], bytes]], place: str = "") -> None:
        self._make_snapshot = snapshot
        super().__init__(kernel_id=kernel_id, place=place)
        # ipykernel 7.4 sends the page's messages to the thread that spoke last, which is the busy main thread. These
        # messages go where the page sends them, to the subshell, as in ipykernel 7.0 to 7.3.
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda _data, default: default

    def bundle(self) -> dict[str, Any]:
        """The data for ``display(..., raw=True)`` that shows this widget."""
        bundle = self._repr_mimebundle_()
        return dict(bundle[0] if isinstance(bundle, tuple) else bundle or {})

    def take_snapshot(self) -> dict[str, Any]:
        content, data = self._make_snapshot()
        return {"content": content, "data": data}

    def leave(self) -> None:
        """Close the widget in the page, and the layout that ipywidgets has made for it."""
        self.layout.close()
        self.close()
