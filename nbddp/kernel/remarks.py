"""Kernel side. What is said of a run that has finished, and most likely not as its user meant it."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp import wire
from nbddp.kernel.plan import Plan


def side_by_side(plan: Plan, reports: Sequence[wire.Finished], *, sharing: bool) -> str:
    """That no rank took part in a collective, so that each trained a model of its own; "" when there is nothing to say.

    Args:
        sharing: did the notebook give the ranks queues or shared memory? They may have met there.
    """
    if len(reports) == 1 or sharing or any(report.met for report in reports):
        return ""
    if not plan.contract and all(report.met is None for report in reports):
        return ""  # spawn(): processes, which need not be ranks
    return (
        f"no rank took part in a collective: {len(reports)} ranks worked side by side, without sharing gradients. "
        "To train one model, wrap it: nbddp.wrap(model)"
    )
