"""Worker side. matplotlib's backend in a rank: as agg, but ``show()`` says what to do with a figure.

Used where the notebook's is the inline backend, which shows figures in the page and prints their repr in a rank.
"""

from __future__ import annotations

import functools
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas  # noqa: F401 - matplotlib looks for it


def show(*args: Any, **kwargs: Any) -> None:
    """As in the notebook the figures are closed; what is to be seen is returned or saved."""
    import matplotlib.pyplot as plt

    if plt.get_fignums():
        _say_what_to_do()
        plt.close("all")


@functools.cache
def _say_what_to_do() -> None:
    print(
        "plt.show() on a rank shows nothing: return the figure to see it in the notebook, or save it by fig.savefig()",
        flush=True,
    )
