"""How many cases a property is tried on: the same few in every run, or as many new ones as asked for.

``NBDDP_CASES=20000 python -m pytest tests/properties --timeout=0`` tries each property on 20,000 cases. A failing case
is printed with the line that repeats it (``@reproduce_failure``), and kept in ``.hypothesis`` for the next run.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

_ASKED = int(os.environ.get("NBDDP_CASES", "0"))


def examples(count: int) -> settings:
    """The budget of one property: ``count`` cases, or ``NBDDP_CASES`` new ones."""
    return settings(
        max_examples=_ASKED or count,
        deadline=None,
        print_blob=True,
        phases=set(Phase) - {Phase.explain},
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def batches(count: int, each: int) -> settings:
    """The budget of a property whose example is a list of ``each`` cases, which one run of real ranks tries.

    A failing list is not shrunk, which would take minutes of runs: such a property notes the case that it looks at.
    """
    ours = examples(count)
    runs = max(1, _ASKED // each) if _ASKED else count
    return settings(ours, max_examples=runs, phases=set(ours.phases) - {Phase.shrink})
