"""Restarts, and what ends them."""

from __future__ import annotations

import pytest

import nbddp
from tests.support import Cells, run


def test_a_timeout_after_a_restart_names_the_first_failure(cell: Cells) -> None:
    names = cell("""
        import nbddp, time
        def train():
            if nbddp.restart_count() == 0: raise ValueError("once")
            time.sleep(1000)
    """)
    with pytest.raises(nbddp.RunTimeout, match="This was after 1 restart; the first failure was RankError"):
        run(names.train, max_restarts=2, timeout=8)
