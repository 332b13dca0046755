"""The tests that are marked gpu, and the quickstart notebook."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat

from tests.gpu.report import Report
from tests.gpu.runner import ROOT

NOTEBOOKS = ROOT / "notebooks"
LIMIT_S = 220  # of the tests; the part has some more
RUN_LINE = re.compile(r"^run = nbddp\.run\(train, .*$", re.MULTILINE)
PROBE = """
import json
ranks = [[v["before"], v["after"]] for v in run.values]
print(json.dumps({"accuracy": test_accuracy, "ranks": ranks, "returned": fingerprint(model)}))
"""


def marked(report: Report) -> None:
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if _has_mark(path))
    report.value("files", len(files))
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "outcome.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rA", "--timeout=100"]
        command += [f"--junitxml={outcome}", "-p", "no:cacheprovider", *files]
        done = subprocess.run(command, cwd=ROOT, timeout=LIMIT_S)
        cases = list(ElementTree.parse(outcome).iter("testcase"))
    for case in cases:
        wrong = [element.get("message", "") for kind in ("failure", "error") for element in case.iter(kind)]
        if case.find("skipped") is None:
            report.check(case.get("name", ""), not wrong, " / ".join(wrong)[:500])
    report.needs_cuda(f"{len(cases)} tests are skipped without a CUDA device")
    report.check("pytest's exit code", done.returncode == 0, done.returncode)


def _has_mark(path: Path) -> bool:
    return "@pytest.mark.gpu" in path.read_text()


def quickstart(report: Report) -> None:
    ways = {"as it is": ""}
    if report.on_cuda:
        ways |= {f"on {ranks} ranks": f"run = nbddp.run(train, {report.options(ranks)}, seed=0)" for ranks in (1, 2)}
    for name, call in ways.items():
        found = _executed(call)
        report.value(f"{name}: accuracy", found["accuracy"])
        report.check(f"{name}: it learns", found["accuracy"] > 0.95, found["accuracy"])
        before, after = map(set, zip(*found["ranks"]))
        report.check(f"{name}: one model that has moved", len(before) == len(after) == 1 and before != after)
        report.check(f"{name}: it has come back", {found["returned"]} == after)


def quickstart_with(call: str) -> Any:
    """The quickstart, with another call of run; "": as it is."""
    notebook = nbformat.read(NOTEBOOKS / "quickstart.ipynb", as_version=4)
    assert sum(len(RUN_LINE.findall(cell.source)) for cell in notebook.cells) == 1
    for cell in notebook.cells:
        cell.source = RUN_LINE.sub(call or r"\g<0>", cell.source)
    return notebook


def _executed(call: str) -> Any:
    """What PROBE prints in a copy of the quickstart, with another call of run."""
    notebook = quickstart_with(call)
    notebook.cells.append(nbformat.v4.new_code_cell(PROBE, id="probe"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quickstart.ipynb"
        nbformat.write(notebook, path)
        subprocess.run([sys.executable, NOTEBOOKS / "execute.py", path], check=True, env=dict(os.environ))
        return json.loads(nbformat.read(path, as_version=4).cells[-1].outputs[-1]["text"])
