"""Holds the functions of higher subpackages that lower ones call, so that no import goes upwards.

``nbddp/__init__.py`` sets them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _closed(*args: Any) -> Any:
    raise RuntimeError("the package nbddp has not been imported, only modules of it")


open_remote: Callable[..., Any] = _closed  # hosts.site.open_remote, for run(hosts=...)
close_sessions: Callable[..., Any] = _closed  # sessions.session.close_all, for shutdown()
picture_of: Callable[..., Any] = _closed  # panel.picture.plotted, for History.plot()
