"""``nbddp.History``: a history that can be drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nbddp.history import history
from nbddp.panel import html

if TYPE_CHECKING:
    from IPython.display import HTML


class _Run(Protocol):
    @property
    def history(self) -> history.History: ...


class History(history.History):
    __doc__ = history.History.__doc__

    def plot(self, *names: str, log: bool = False, before: history.History | _Run | None = None) -> HTML:
        """Return the curves as a picture that a notebook displays.

        Args:
            names: the metrics to draw. Default: all.
            log: a logarithmic axis for the values; values that aren't positive are left out.
            before: an earlier run, or its history, whose curves are drawn in gray behind the others.

        Raises:
            KeyError: no metric of this name was logged.
        """
        from IPython.display import HTML

        earlier = before if before is None or isinstance(before, history.History) else before.history
        return HTML(html.plot(self, names, log=log, before=earlier))  # type: ignore[no-untyped-call]

    def _repr_html_(self) -> str | None:
        return html.plot(self) if self.latest() else None
