"""Lines of text in a terminal: one line is rewritten in place, no line is wider than the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

from nbddp.panel import terminal

PROGRAM = """
import time
import nbddp

def train(steps=40):
    nbddp.barrier()  # else a remark, which is not cut
    for step in nbddp.progress(range(steps), desc="step"):
        nbddp.log({"loss": 40.0 - step, "accuracy_of_the_whole_validation_set": step / 40, "another/name": 1.0})
        if step % 20 == 0:
            nbddp.print(f"at step {step}")
        time.sleep(0.05)

run = nbddp.run(train, nprocs=2, device="cpu")
assert run.value is None
"""


def in_terminal(path: Path, columns: int) -> str:
    """All that the program writes to a terminal of this width."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environ = os.environ | {"TERM": "xterm", "COLUMNS": ""}
    process = subprocess.Popen([sys.executable, str(path)], stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    written = b""
    try:
        while piece := os.read(mine, 65536):
            written += piece
    except OSError:  # Linux's way to say that the terminal's other end is closed
        pass
    finally:
        os.close(mine)
    assert process.wait(60) == 0, written.decode()
    return written.decode()


def screen(written: str) -> list[str]:
    """The lines that are left: of a rewritten line, the last state."""
    lines = written.replace("\r\n", "\n").split("\n")
    assert not re.search("\x1b(?!\\[K)", written), "no other control sequence"
    return [line.rsplit("\r\x1b[K", 1)[-1] for line in lines]


@pytest.mark.slow
def test_a_terminal_shows_one_line_that_is_rewritten_and_never_too_wide(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    written = in_terminal(path, 60)
    states = [state for line in written.split("\r\n") for state in line.split("\r\x1b[K")]
    assert max(map(len, states)) < 60
    assert len([state for state in states if "step " in state and "/40" in state]) > 3, "it was rewritten"
    first, *output, end, rest = screen(written)
    assert (first, rest) == ("train: 2 processes · gloo", "")
    assert output == ["at step 0", "at step 20"]
    assert re.fullmatch(r"train: finished after [\d.:]+( s)? · 2 processes · gloo · loss 1", end), (
        "the next would be too wide"
    )
    wide = in_terminal(path, 200)
    assert re.search(r"train: [\d.:]+( s)? · step \d+/40 · .* left · loss \d+ [█▇▆▅▄▃▂▁]+ · accuracy", wide)
    metrics = r" · loss 1 █[█▇▆▅▄▃▂▁]{14}▁ · accuracy_of_the_whole_validation_set 0.9750 · another/name 1"
    assert re.search(f"{metrics}$", screen(wide)[-2])


def test_a_curve_in_a_line_has_no_more_levels_than_the_values_tell() -> None:
    assert terminal.sparkline(np.arange(8.0)) == "▁▂▃▄▅▆▇█"
    assert terminal.sparkline(np.array([3.0, np.nan, 1.0])) == "█▁"
    assert len(terminal.sparkline(np.random.default_rng(0).normal(size=10_000))) == 16
    for nothing in ([], [1.0], [2.0, 2.0], [np.nan, np.inf], [1.7e308, -1.7e308]):
        assert terminal.sparkline(np.array(nothing)) == ""


@pytest.mark.parametrize(
    ("cells", "text"),
    [(40, "train · loss 1 · acc 2"), (21, "train · loss 1"), (13, "train"), (4, "tra…"), (14, "train · loss 1")],
)
def test_parts_that_do_not_fit_are_left_out(cells: int, text: str) -> None:
    assert terminal.fitted(["train", "loss 1", "acc 2"], cells) == text


def test_wide_characters_take_two_cells() -> None:
    assert terminal.fitted(["損失", "x"], 7) == "損失"
    assert terminal.fitted(["損失損失"], 5) == "損失…"
