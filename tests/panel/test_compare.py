"""Two runs over each other."""

from __future__ import annotations

import base64
import re
from types import SimpleNamespace

import numpy as np
import pytest

import nbddp
from nbddp.history.history import History
from tests.panel.fakes import Rank

GREY = "#8a8a8a"


def history(factor: float, *names: str) -> History:
    made = History()
    for name in names:
        Rank(made).log(name, range(300), (factor * np.exp(-np.arange(300) / 100)).tolist())
    return made


def test_the_earlier_run_is_grey_and_behind_with_the_differences_in_a_table() -> None:
    before = SimpleNamespace(history=history(2.0, "train/loss", "old"))
    shown = nbddp.compare(before, history(1.0, "train/loss", "new"))
    html = shown.bundle()["text/html"]
    charts = [base64.b64decode(data).decode() for data in re.findall('base64,([^"]+)" alt="Chart', html)]
    assert re.findall("<b>([A-Z][a-z]+)</b>", html) == ["Loss", "New", "Old"]
    colors = [re.findall('stroke="(#[0-9a-f]+)" stroke-width="2"', chart) for chart in charts]
    assert colors == [[GREY, "#3b7df0"], ["#3b7df0"], [GREY]], "the later line is drawn last, on top"
    assert "</span> train before 0.1006" in html
    assert "</span> train 0.0503" in html
    assert "<td>train/loss</td><td>0.1006</td><td>0.0503</td><td>−0.0503 (−50 %)</td>" in html
    assert "<td>new</td><td>–</td><td>0.0503</td><td>–</td>" in html
    assert repr(shown) == "Comparison(train/loss 0.1006 → 0.0503)"


def test_some_metrics_of_two_runs() -> None:
    html = nbddp.compare(history(1.0, "a", "b"), history(1.0, "a", "c"), "b", "c", log=True).bundle()["text/html"]
    assert re.findall("<b>([A-Z])</b>", html) == ["C", "B"]
    with pytest.raises(KeyError, match="no metric 'd' was logged; the metrics are: a"):
        nbddp.compare(history(1.0, "b"), history(1.0, "a"), "d")
    with pytest.raises(TypeError, match=r"compare\(\) takes two runs or histories, not str"):
        nbddp.compare(history(1.0), "run")  # type: ignore[arg-type]
    assert "<img" not in nbddp.compare(history(1.0), history(1.0)).bundle()["text/html"]
