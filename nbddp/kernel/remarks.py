"""Remarks on a run that has finished, but probably not as its user intended."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp import wire
from nbddp.kernel.plan import Plan


def side_by_side(plan: Plan, reports: Sequence[wire.Finished], *, sharing: bool) -> str:
    """Return a remark if no rank took part in a collective, so that each trained its own model; otherwise "".

    Args:
        sharing: the notebook gave the ranks queues or shared memory, through which they may have exchanged data.
    """
    if len(reports) == 1 or sharing or any(report.met for report in reports):
        return ""
    if not plan.contract and all(report.met is None for report in reports):
        return ""  # spawn(): processes that need not be ranks of a process group
    return (
        f"no rank took part in a collective: {len(reports)} ranks worked side by side, without sharing gradients. "
        "To train one model, wrap it: nbddp.wrap(model)"
    )
