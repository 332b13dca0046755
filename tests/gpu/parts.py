"""The parts, with their time limits; nothing here imports torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_S = 540.0  # of one command, where commands end after ten minutes


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        where: the module and the function that run it in a process of its own.
        limit_s: after this time the part is ended.
        what: in one line.
    """

    name: str
    where: str
    limit_s: float
    what: str

    def function(self) -> Callable[[Any], None]:
        module, _, name = self.where.partition(":")
        found: Callable[[Any], None] = getattr(importlib.import_module(module), name)
        return found


# The order is that of importance: what is cut off is missed least.
PARTS = (
    Part("machine", "tests.gpu.machine:versions", 60, "device, driver and versions; the driver's lists work"),
    Part("nccl", "tests.gpu.ranks:nccl", 90, "NCCL with one rank: collectives, and how long its teardown takes"),
    Part("shared", "tests.gpu.ranks:shared", 120, "two to four ranks on one GPU by gloo train one model"),
    Part("server", "tests.gpu.server:contexts", 90, "the fork server holds no CUDA context before, during, after"),
    Part("before", "tests.gpu.ranks:cuda_before", 90, "CUDA was used in the notebook before the run"),
    Part("memory", "tests.gpu.memory:given_back", 150, "GPU memory is back after each kind of end"),
    Part("failures", "tests.gpu.failing:failures", 150, "out of memory, device-side assert: message, names, next run"),
    Part("sessions", "tests.gpu.staying:sessions", 150, "sessions: state, failure and recovery, with NCCL and gloo"),
    Part("debugger", "tests.gpu.staying:debugger", 90, "breakpoint() and post mortem with tensors of the device"),
    Part("suite", "tests.gpu.suite:marked", 240, "all tests that are marked gpu"),
    Part("log", "tests.gpu.speed:log", 90, "log() of the device's tensors waits for nothing; its cost per step"),
    Part("gauges", "tests.gpu.machine:gauges", 60, "the panel's memory gauges against nvidia-smi"),
    Part("training", "tests.gpu.speed:training_in_turn", 300, "the compiled bf16 GPT with panel beside torchrun"),
    Part("transfer", "tests.gpu.speed:transfer", 90, "1 GiB of the notebook to the device, beside pinned memory"),
    Part("quickstart", "tests.gpu.suite:quickstart", 150, "the quickstart as it is, and on the GPU"),
    Part("starts", "tests.gpu.speed:starts", 90, "warm starts, without and with a context in the notebook"),
    Part("nccl_shared", "tests.gpu.ranks:nccl_shared", 90, "two NCCL ranks on one GPU, where NCCL allows it"),
)
