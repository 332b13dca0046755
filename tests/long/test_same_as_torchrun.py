"""The same weights as under torchrun itself, also where the ranks have unequal shares of the data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import torchrun
from tests.support import Cells
from tests.test_same_as_torchrun import weights_equal


@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_equal_torchruns_bit_for_bit(
    cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    weights_equal(cell, tmp_path, monkeypatch, world_size, lambda folder, path: torchrun(folder, world_size, path))
