"""``show``: encodes a figure or an image on its rank, and sends it to the notebook."""

from __future__ import annotations

import base64
import builtins
import io
import sys
from typing import Any

from nbddp import images
from nbddp.shown import MAX_BYTES, NAME_CHARS, Shown
from nbddp.worker import context, metrics
from nbddp.worker.metric_values import FIRST_STEP, LAST_STEP, checked_step

_DEFAULT_NAME = "figure"
_RANK = "{rank}"  # in a name
_FORMS = {"_repr_png_": "image/png", "_repr_svg_": "image/svg+xml", "_repr_html_": "text/html"}

_told: set[str] = set()  # names of what was too large


def show(fig: Any, name: str | None = None, *, step: int | None = None) -> None:
    """Show a figure, an image or a table in the notebook: ``show(fig)``, ``show(x[0], "samples")``.

    The panel shows the newest of each name, with a slider over the steps that were kept; ``run.figures`` has them.
    Rank 0's are shown. With ``"{rank}"`` in the name those of every rank are: ``show(x[0], "batch of rank {rank}")``.
    Encodes ``fig`` before it returns, so it may be changed afterwards; waits for nothing else. It is not a collective.

    In the notebook itself, where there is one rank, ``fig`` is displayed at once.

    Args:
        fig: a matplotlib figure, or what has one, such as its axes; a PIL image; an array or a tensor on any device, of
            shape (H, W), (H, W, 3) or (3, H, W) (or with 1 or 4 channels), with integers 0 to 255 or floats 0 to 1,
            or a batch of them, whose first 64 become a grid; or an object that a notebook shows as PNG, SVG or HTML.
            HTML runs no scripts.
        name: what it is, "figure" by default; a matplotlib figure's default is its label, as in ``plt.figure("loss")``.
        step: default: the step of the last ``log()``; before the first, images are counted. A step that is shown
            again replaces the old image.

    An image is scaled down to 1,200 pixels on its longer side and to 256 kB; SVG and HTML that are larger are left out,
    with a line in this rank's output. The notebook keeps at most 24 steps of a name (the first, the newest, and some
    between them), 20 names and 16 MB. The saved notebook has the newest image of each name, in 200 kB at most. In a job
    without a notebook nothing is shown.

    Raises:
        TypeError: ``fig`` is none of these, the name is not a string, or the step is not an integer.
        ValueError: an array is not of such a shape, or the step does not fit into 64 bits.
    """
    name = _name_of(fig) if name is None else name
    if type(name) is not str:
        raise TypeError(f"show(name={name!r}): a name must be a string")
    if step is not None and (type(step) is not int or not FIRST_STEP <= step <= LAST_STEP):
        step = checked_step(step, "show")
    if context.rank() == 0 or _RANK in name:
        _show(fig, name.replace(_RANK, str(context.rank()))[:NAME_CHARS], step)


def _show(fig: Any, name: str, step: int | None) -> None:
    encoded = _encoded(fig)
    if encoded is None:
        _tell(name)
        return
    shown = Shown(name, metrics.step_to_show(name) if step is None else step, *encoded)
    if not metrics.show(shown):
        _display(shown)


def _name_of(fig: Any) -> str:
    figure = _figure_of(fig)
    return str(figure.get_label() or _DEFAULT_NAME) if figure is not None else _DEFAULT_NAME


def _encoded(fig: Any) -> images.Encoded | None:
    """The type and the bytes of the file; None if they are too many."""
    pillow, torch = sys.modules.get("PIL.Image"), sys.modules.get("torch")
    if (figure := _figure_of(fig)) is not None:
        return _of_figure(figure)
    if pillow is not None and isinstance(fig, pillow.Image):
        return images.within(fig, MAX_BYTES)
    if torch is not None and isinstance(fig, torch.Tensor):
        pixels = fig.detach()
        fig = (pixels.float() if pixels.is_floating_point() else pixels).cpu().numpy()
    if hasattr(fig, "__array_interface__"):
        return images.encoded(images.pixels_of(fig), MAX_BYTES)
    return _of_notebook_object(fig)


def _figure_of(fig: Any) -> Any:
    """The matplotlib figure that this is or, such as axes, belongs to; None for something else."""
    module = sys.modules.get("matplotlib.figure")
    figure = getattr(fig, "figure", fig)
    return figure if module is not None and isinstance(figure, module.Figure) else None


def _of_figure(figure: Any) -> images.Encoded | None:
    file = io.BytesIO()
    dpi = min(figure.dpi, images.MAX_SIDE / max(figure.get_size_inches()))
    figure.savefig(file, format="png", dpi=dpi, bbox_inches="tight")
    return images.refitted("image/png", file.getvalue(), MAX_BYTES)


def _of_notebook_object(fig: Any) -> images.Encoded | None:
    for method, kind in _FORMS.items():
        found = getattr(fig, method)() if hasattr(type(fig), method) else None
        if found is None:
            continue
        data = found[0] if isinstance(found, tuple) else found  # with metadata
        if isinstance(data, str):
            data = base64.b64decode(data) if kind == "image/png" else data.encode("utf-8", "replace")
        return images.refitted(kind, data, MAX_BYTES)
    raise TypeError(
        "show() takes a matplotlib figure, a PIL image, an array or tensor, or an object that a notebook shows as PNG, "
        f"SVG or HTML, not {type(fig).__name__}"
    )


def _tell(name: str) -> None:
    if name not in _told:
        _told.add(name)
        builtins.print(f"show() left out {name}: it has more than {MAX_BYTES >> 10} kB", flush=True)


def _display(shown: Shown) -> None:
    """In a notebook's own process. Elsewhere, as under torchrun, nothing is displayed."""
    ipython: Any = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        ipython.display.display(shown)
