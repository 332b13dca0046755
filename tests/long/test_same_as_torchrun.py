"""The same weights as under torchrun itself, also where the ranks have unequal shares of the data."""

from pathlib import Path

import pytest

from tests.jobs import torchrun
from tests.support import Cells
from tests.test_same_as_torchrun import weights_equal


@pytest.mark.parametrize("size", [2, 3])
def test_weights_are_those_of_torchrun(cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    weights_equal(cell, tmp_path, monkeypatch, size, lambda folder, path: torchrun(folder, size, path))
