"""Fixture: matplotlib's fonts, which a process opens once and keeps."""

from __future__ import annotations

import io

import pytest


@pytest.fixture(scope="session", autouse=True)
def _fonts_are_open() -> None:
    """Draw every kind of text once."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().set_title("α → ∞")
    figure.savefig(io.BytesIO())
