"""The line of a wait: one that is rewritten in a notebook and in a terminal, few lines elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_terminal import in_terminal

from nbddp.panel import frontend, waiting
from nbddp.panel.waiting import WaitingLine

WHAT = "4 nodes of Slurm"
WAITING = """
import time
from nbddp.panel import waiting
waiting._INTERVAL_S = 0.0
line = waiting.WaitingLine()
for took in ("2.0 s", "0:42"):
    line.show("4 nodes of Slurm", took, "Pending job allocation 4711")
line.end("4 nodes of Slurm", "0:43")
print("granted")
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: made.now)
    return made


def test_a_cell_of_a_notebook_has_one_line_that_is_renewed_each_second(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    page: Any = SimpleNamespace(update=lambda data, **_: shown.append(data["text/plain"]))
    monkeypatch.setattr("IPython.display.display", lambda data, **_: (page.update(data), page)[1])
    monkeypatch.setattr(frontend, "shell", lambda: "a kernel")
    monkeypatch.setattr(frontend, "is_executed", lambda: False)
    line = WaitingLine()
    for i in range(10):
        clock.now = 2.0 + i / 4
        line.show(WHAT, f"{clock.now} s", "Pending")
    line.end(WHAT, "0:42")
    assert shown == [
        "waiting for 4 nodes of Slurm, 2.0 s: Pending · ■ cancels the request",
        "waiting for 4 nodes of Slurm, 3.0 s: Pending · ■ cancels the request",
        "waiting for 4 nodes of Slurm, 4.0 s: Pending · ■ cancels the request",
        "4 nodes of Slurm, after 0:42",
    ]
    assert capsys.readouterr().out == ""


def test_a_file_has_a_line_for_each_reason_and_one_every_ten_seconds(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    line = WaitingLine()
    for clock.now in (2.0, 3.0, 4.0, 13.9, 14.1):
        line.show(WHAT, f"{clock.now} s", "Pending" if clock.now > 3.5 else "")
    line.end(WHAT, "0:15")
    assert capsys.readouterr().out == (
        "waiting for 4 nodes of Slurm, 2.0 s\n"
        "waiting for 4 nodes of Slurm, 4.0 s: Pending\n"
        "waiting for 4 nodes of Slurm, 14.1 s: Pending\n"
    )


def test_a_short_wait_shows_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(frontend, "shell", lambda: "a kernel")
    WaitingLine().end(WHAT, "0.1 s")
    assert capsys.readouterr().out == ""


def test_a_terminal_rewrites_the_line_and_removes_it_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WAITING)
    written = in_terminal(tmp_path / "program.py", 48)
    assert written.count("\n") == 1
    assert "waiting for 4 nodes of Slurm, 2.0 s: Pending j…\r\x1b[K" in written
    assert written.endswith("\r\x1b[Kgranted\r\n")
