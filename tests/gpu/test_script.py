"""``python -m tests.gpu`` runs every part, whatever one of them does; how it ends here, without a GPU, is tried too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import suite, trial, wheels
from tests.gpu.parts import MOST_S, PARTS, Part
from tests.gpu.report import Report, Skip
from tests.gpu.runner import ROOT, Results, run_all
from tests.support import gone, wait_until

ALL = (trial.raises, trial.is_killed, trial.finds_something_wrong, trial.needs_a_gpu, trial.passes)


def part(function: Any, limit_s: float = 60.0) -> Part:
    return Part(function.__name__, f"{trial.__name__}:{function.__name__}", limit_s, "")


def run(folder: Path, *parts: Part, within_s: float = 1000.0) -> tuple[int, dict[str, Any]]:
    failed = run_all(parts, Results(folder, "cpu"), "cpu", within_s)
    return failed, json.loads((folder / "gpu.json").read_text())["parts"]


def test_a_part_that_fails_does_not_end_the_others_and_the_file_has_every_part(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = [part(each) for each in ALL]
    failed, found = run(tmp_path, *parts)
    assert failed == 3
    assert {name: (each["state"], each["why"]) for name, each in found.items()} == {
        "raises": ("failed", "ValueError: on purpose"),
        "is_killed": ("failed", "its process ended with exit code -9"),
        "finds_something_wrong": ("failed", "this does not hold"),
        "needs_a_gpu": ("skipped", "a device is needed"),
        "passes": ("passed", ""),
    }
    assert found["passes"]["results"][0] == {"name": "figure", "value": 0.333333, "unit": "s"}
    assert found["finds_something_wrong"]["results"][0] == {"name": "this does not hold", "ok": False, "found": [1, 2]}
    shown = capfd.readouterr().out
    assert "    figure: 0.333333 s\n" in shown
    assert "    FAIL this does not hold: [1, 2]\n" in shown
    assert "    | what was printed\n" in shown


def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    failed, found = run(tmp_path, part(trial.takes_for_ever, 5.0))
    assert (failed, found["takes_for_ever"]["state"]) == (1, "timed out")
    (child,) = (each["value"] for each in found["takes_for_ever"]["results"])
    wait_until(lambda: gone(child))


def test_a_second_call_goes_on_with_the_parts_that_have_no_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, found = run(tmp_path, part(trial.needs_a_gpu, 50.0), part(trial.passes, 120.0), within_s=100.0)
    assert {name: each["state"] for name, each in found.items()} == {"needs_a_gpu": "skipped", "passes": "not begun"}
    assert "120 s do not fit" in found["passes"]["why"]
    _, found = run(tmp_path, part(trial.needs_a_gpu, 50.0), part(trial.passes, 60.0), within_s=100.0)
    assert {name: each["state"] for name, each in found.items()} == {"needs_a_gpu": "skipped", "passes": "passed"}
    assert "needs_a_gpu: has a result already" in capfd.readouterr().out


def test_every_part_is_there_and_fits_into_one_command() -> None:
    names = "machine nccl shared server before memory failures sessions debugger suite log gauges training transfer "
    assert [each.name for each in PARTS] == [*names.split(), "quickstart", "starts", "nccl_shared"]
    for each in PARTS:
        assert callable(each.function())
        assert 0 < each.limit_s <= MOST_S


def test_the_command_lists_its_parts_and_skips_with_a_reason_here(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu"]
    listed = subprocess.run([*command, "--list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == [each.name for each in PARTS]
    command += [str(tmp_path), "--device", "cpu", "--part", "gauges"]
    assert "skipped" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["parts"]["gauges"]["why"] == "nvidia-smi needs a GPU"


def test_the_wheels_are_those_that_a_torch_image_may_lack() -> None:
    found = wheels.needs("3.12")
    assert {"cloudpickle", "tblib", "ipykernel", "ipywidgets", "pytest", "pyzmq", "traitlets"} <= set(found)
    assert not {"torch", "numpy", "nbddp", "scipy", "exceptiongroup", "tomli"} & set(found)


def test_the_quickstarts_call_of_run_is_found_and_replaced() -> None:
    there = [cell.source for cell in suite.quickstart_with("").cells]
    other = [cell.source for cell in suite.quickstart_with("run = None").cells]
    [(before, after)] = [(one, two) for one, two in zip(there, other) if one != two]
    assert "nbddp.run(train, " in before
    assert after.splitlines()[-1] == "run = None"


def test_a_skip_has_a_reason() -> None:
    with pytest.raises(Skip, match="because"):
        Report("cpu", lambda finding: None).needs_cuda("because")
