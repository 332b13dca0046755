"""How many examples a property is tried on: few and always the same ones, or many and new ones.

``HYPOTHESIS_PROFILE=long python -m pytest tests/properties`` is the long form. A failing example is printed with the
line that repeats it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
_LONG_FACTOR = 20


def examples(count: int, *, long_factor: int = _LONG_FACTOR) -> settings:
    """The budget of one property: ``count`` examples, ``long_factor`` times as many in the long form."""
    return settings(
        max_examples=count * long_factor if LONG else count,
        derandomize=not LONG,
        deadline=None,
        print_blob=True,
        phases=set(Phase) - {Phase.explain},
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
