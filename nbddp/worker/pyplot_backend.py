"""Matplotlib's backend in a rank: agg, with a ``show()`` that sends the figures to the notebook.

It replaces the inline backend, which shows figures in the notebook's page but only prints their repr in a rank.
"""

from __future__ import annotations

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas  # noqa: F401 - matplotlib looks for it

from nbddp.worker.show import show as show_in_notebook


def show(*args: Any, **kwargs: Any) -> None:
    """Show rank 0's figures, and close the figures of this rank, as the notebook's ``show()`` closes them.

    A figure without a label is called "figure"; further ones are "figure 2", "figure 3".
    """
    import matplotlib.pyplot as plt

    unnamed = 0
    for number in plt.get_fignums():
        figure = plt.figure(number)
        unnamed += not figure.get_label()
        show_in_notebook(figure, f"figure {unnamed}" if unnamed > 1 and not figure.get_label() else None)
    plt.close("all")
