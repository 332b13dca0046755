"""A history: what the notebook knows of a run's progress and metrics."""

from __future__ import annotations

import pytest

from nbddp.text import fold


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a\rb", "b"), ("1%\r2%\nnext", "2%\nnext"), ("a\r\nb\r\n", "a\nb\n"), ("plain", "plain"), ("x\r", "x"), ("", "")],
)
def test_carriage_returns_are_folded_as_in_a_terminal(text: str, expected: str) -> None:
    assert fold(text) == expected
