"""An error names the variables of its failing line: shapes, types, devices, values."""

from __future__ import annotations

import pytest

import nbddp
from tests.support import Cells, run


def test_the_error_of_a_rank_has_them_and_a_cell_shows_them(cell: Cells) -> None:
    here = cell(
        """
        import torch

        def train(width):
            weight = torch.zeros(3, width)
            return torch.zeros(2, 4) @ weight
        """
    )
    with pytest.raises(nbddp.RankError) as raised:
        run(here.train, 5)
    assert raised.value.locals == {"weight": "Tensor (3, 5) float32 cpu"}
    assert "weight  Tensor (3, 5) float32 cpu" in "\n".join(raised.value._render_traceback_())
