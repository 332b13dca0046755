"""Fixtures: servers and browser for the whole session; processes that a test leaves are looked for below its server."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """In place of the one that looks at this process: ``Lab.end_kernels`` sees that kernels and ranks are gone."""
