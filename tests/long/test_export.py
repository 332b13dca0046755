"""A job under a real torchrun."""

from pathlib import Path

import pytest

from tests.jobs import torchrun
from tests.support import Cells
from tests.test_export import job_equals_run


def _launch(folder: Path, size: int, *words: object) -> None:
    torchrun(folder, size, "-m", "nbddp", *words)


def test_a_job_under_torchrun_equals_a_run(cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_equals_run(cell, tmp_path, monkeypatch, _launch)
