"""Matplotlib's backend in a rank: agg, with a ``show()`` that prints how to get at a figure.

It replaces the inline backend, which shows figures in the notebook's page but only prints their repr in a rank.
"""

from __future__ import annotations

import functools
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas  # noqa: F401 - matplotlib looks for it


def show(*args: Any, **kwargs: Any) -> None:
    """Print a hint and close the figures, as the notebook's ``show()`` closes them."""
    import matplotlib.pyplot as plt

    if plt.get_fignums():
        _print_hint()
        plt.close("all")


@functools.cache
def _print_hint() -> None:
    print(
        "plt.show() on a rank shows nothing: return the figure to see it in the notebook or save it with fig.savefig()",
        flush=True,
    )
