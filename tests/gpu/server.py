"""The fork server holds no CUDA context, whatever its ranks do."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import psutil

from nbddp.launch import gauges
from tests.benchmarks.kernel import Kernel, stamps
from tests.gpu.machine import name_of_first
from tests.gpu.report import Report
from tests.support import is_fork_server, ranks_of

MIB = 1 << 20


def contexts(report: Report) -> None:
    run = f"nbddp.run(work.hold, ({{path!r}}, {64 * MIB}, {{end!r}}), {report.options()}, show=False)"
    with Kernel() as kernel, stamps() as file:
        kernel.cell("%load_ext nbddp\nimport nbddp\nfrom tests.gpu import work")
        kernel.cell("nbddp.run(lambda: 1, nprocs=1, device='cpu', show=False)")
        _look(report, "before", kernel)
        for number in range(2):
            file.clear()
            going = kernel.begin(run.format(path=file.path, end="stay"))
            file.wait_for(1)
            _look(report, f"during run {number}", kernel)
            if report.on_cuda:
                (rank,) = ranks_of(kernel.process.pid)
                report.check(f"the rank of run {number} holds one", _opened(rank), sorted(_opened(rank)))
                report.value("the driver's list has the rank", rank in _listed(), "")
            Path(file.path + ".go").touch()
            kernel.end_of(going)
            _look(report, f"after run {number}", kernel)
    report.needs_cuda("on a CPU nothing can hold a context: this only tried the part")


def _look(report: Report, when: str, kernel: Kernel) -> None:
    servers = [child for child in kernel.process.children() if is_fork_server(child)]
    report.check(f"{when}: there is a fork server", len(servers) == 1, len(servers))
    for name, process in [("notebook", kernel.process), *(("fork server", server) for server in servers)]:
        # NVML, which both may use, opens nvidiactl and nvidia0 alone.
        held = {path for path in _opened(process.pid) if "uvm" in path}
        report.check(f"{when}: the {name} has not initialised CUDA", not held, sorted(_opened(process.pid)))
        report.check(f"{when}: the driver's list has not the {name}", process.pid not in _listed())


def _opened(pid: int) -> set[str]:
    """The driver's devices that a process has open; CUDA opens nvidia-uvm when it is initialised."""
    found = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
    return {path for path in found if path.startswith("/dev/nvidia")}


def _listed() -> set[int]:
    """The pids of the processes with a context, by the driver's list; in a container they may be another's."""
    nvml: Any = gauges._nvml()
    if nvml is None:
        return set()
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(gauges._handle(nvml, name_of_first()))
    return {process.pid for process in processes if psutil.pid_exists(process.pid)}
