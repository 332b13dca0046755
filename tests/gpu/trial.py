"""Parts that end in every way, for the test of the script; they import nothing that takes long."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from tests.gpu.report import Report


def passes(report: Report) -> None:
    report.value("figure", 1 / 3, "s")
    report.check("it holds", True)


def finds_something_wrong(report: Report) -> None:
    report.check("this does not hold", False, [1, 2])
    report.check("this holds", True)


def raises(report: Report) -> None:
    print("what was printed")
    raise ValueError("on purpose")


def is_killed(report: Report) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def needs_a_gpu(report: Report) -> None:
    report.check("it holds without one", True)
    report.needs_cuda("a device is needed")


def takes_for_ever(report: Report) -> None:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    report.value("child", child.pid)
    time.sleep(1000)
