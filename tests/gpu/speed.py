"""How fast: log(), transfers, starts and training on the device; the benchmarks' own code."""

from __future__ import annotations

import os
from dataclasses import replace

from tests.benchmarks import gpu, gpu_work, training
from tests.benchmarks.kernel import stamps
from tests.benchmarks.measure import Table
from tests.benchmarks.peers import NBDDP, NBDDP_SILENT, TORCHRUN, Peer
from tests.benchmarks.settings import Settings
from tests.gpu.report import Report

GOAL = 0.995  # of torchrun's steps per second
TURNS, STEPS = {"cuda": 20, "cpu": 3}, {"cuda": 60, "cpu": 2}


def log(report: Report) -> None:
    speed, waits = gpu.logging(Settings(rounds=5 if report.on_cuda else 1), report.device)
    for table in (speed, waits):
        report.table(table)
    none, ours, item = (waits.median(way) for way in gpu_work.WAYS)
    report.needs_cuda("on a CPU there is nothing to wait for")
    report.check("log() waits for the device as often as no logging", ours == none, (none, ours))
    report.check("the profiler sees the waits of .item()", item is not None and item >= 200, item)
    plain, logged = speed.median(gpu_work.WAYS[0]) or 0.0, speed.median(gpu_work.WAYS[1]) or 0.0
    report.value("cost of log()", (logged - plain) * 1e6, "µs a step")


def transfer(report: Report) -> None:
    mib = 1024 if report.on_cuda else 16
    report.table(gpu.transfer(Settings(rounds=3), report.device, mib))


def starts(report: Report) -> None:
    report.table(gpu.start(Settings(rounds=5 if report.on_cuda else 2), report.device))


def training_in_turn(report: Report) -> None:
    os.environ["NBDDP_BENCH_DEVICE"] = report.device  # for torchrun's ranks
    ways: list[tuple[Peer, bool]] = [
        (replace(TORCHRUN, name="torchrun, no logging"), False),
        (_on(report.device, replace(NBDDP, name="nbddp, log at every step, panel")), True),
        (_on(report.device, replace(NBDDP_SILENT, name="nbddp, no logging")), False),
    ]
    ranks = 1
    table = Table(f"GPT of the notebook, compiled, bf16, {ranks} rank", columns=["chargpt"], unit="steps/s", scale=1)
    with stamps() as file:
        turns, steps = TURNS[report.device], STEPS[report.device]
        ratios = training.in_turn(table, "chargpt", steps, turns, ranks, file, ways)
    report.table(table)
    for name, ratio in list(ratios.items())[1:]:
        report.value(f"{name}: of torchrun's steps", ratio)
    report.needs_cuda("the goal is one for GPUs")
    with_panel = ratios[ways[1][0].name]
    report.check(f"with the panel at least {GOAL} of torchrun's steps", with_panel >= GOAL, with_panel)


def _on(device: str, peer: Peer) -> Peer:
    return replace(peer, call=peer.call.replace("'cpu'", repr(device)))
