"""A job under a real torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import torchrun
from tests.support import Cells
from tests.test_export import a_job_gives_what_the_run_gives


def _launch(folder: Path, size: int, *words: object) -> None:
    torchrun(folder, size, "-m", "nbddp", *words)


def test_a_job_under_torchrun_gives_what_the_run_gives_bit_for_bit(
    cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_job_gives_what_the_run_gives(cell, tmp_path, monkeypatch, _launch)
