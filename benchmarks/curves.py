"""Figures of what a run records and shows: ``log()``, and the panel."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Sequence

from benchmarks.kernel import kept
from benchmarks.measure import Sizes, Table
from benchmarks.ways import NBDDP, SILENT, Way

VIEWS = {NBDDP: "nbddp.panel.live.CellView"}  # what draws a run


def log(table: Table, sizes: Sizes, ways: Sequence[Way] = (SILENT,)) -> None:
    """A step of ``log()``, and one of tqdm, in one rank."""
    figure = "a step with log(loss=, acc=)"
    with kept(lambda way: way.prepared(1)) as kernels:

        def turn(way: Way) -> None:
            run = way.cell("log_and_tqdm", 1, str(sizes.calls))
            logged, tqdm = ast.literal_eval(kernels(way).cell(f"print({run}.value)").shown)
            table.add(figure, way.name, logged)
            table.add(figure, "tqdm, set_postfix() and update()", tqdm)

        table.turns(figure, sizes.rounds, ways, turn)


def panel(table: Table, sizes: Sizes, views: dict[Way, str] = VIEWS) -> None:
    """CPU time of the kernel to draw and send a frame of the panel, and the frame's size; four curves."""
    seconds, size = (f"a frame of the panel, {sizes.ranks} ranks, 4 curves: {what}" for what in ("CPU time", "size"))
    with kept(lambda way: way.prepared(sizes.ranks)) as kernels:

        def turn(way: Way) -> None:
            kernel, (module, _, name) = kernels(way), views[way].rpartition(".")
            kernel.cell(f"import {module} as live\nspent = globals().get('spent') or watch(live.{name})\ndel spent[:]")
            frames = kernel.cell(way.cell("draw_curves", sizes.ranks, str(sizes.steps))).frames
            spent = ast.literal_eval(kernel.cell("print(spent)").shown)
            # Most updates come before the next frame is due, and draw nothing.
            table.add(seconds, way.name, statistics.median(sorted(spent)[-len(frames) :]))
            table.add(size, way.name, statistics.median(frames), "B")

        table.turns(seconds, sizes.rounds, list(views), turn)
