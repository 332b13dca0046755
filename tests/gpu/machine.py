"""The machine itself, and the panel's gauges of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

import nbddp
from nbddp.launch import gauges as launch_gauges
from nbddp.launch.devices import accelerator
from tests.benchmarks.measure import heading
from tests.gpu import work
from tests.gpu.report import Report
from tests.support import wait_until

GIB = 1 << 30
NEAR = 64 << 20  # two readings of one number, at different moments


def versions(report: Report) -> None:
    report.value("machine", heading())
    report.value("nbddp", nbddp.__version__)
    report.check("the notebook's process has no context after the devices were counted", _counted_without_context())
    report.value("devices", accelerator())
    report.value("C compiler, which torch.compile needs", shutil.which("cc") or shutil.which("gcc") or "none")
    report.needs_cuda("no CUDA device was asked for")
    report.value("CUDA", torch.version.cuda)
    report.value("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    report.value("GPU", nvidia_smi("name,driver_version,memory.total,memory.used,compute_mode"))
    report.check("NVML names the GPU", launch_gauges.gpu_name(name_of_first()), launch_gauges.gpu_name(name_of_first()))
    report.value("MiB in use", round(gpu_used() / 2**20))


def _counted_without_context() -> bool:
    accelerator()
    return not torch.cuda.is_initialized()


def gauges(report: Report) -> None:
    report.needs_cuda("nvidia-smi needs a GPU")
    if shutil.which("nvidia-smi") is None:
        report.check("nvidia-smi is there", False)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "stamps")
        before = gpu_used()
        run = nbddp.run(work.hold, (path, 3 * GIB, "stay"), nprocs=1, device="cuda", wait=False, show=False)
        try:
            wait_until(Path(path).exists, what="the rank has its memory")
            seen = launch_gauges.LocalGauges("cuda", os.environ)
            seen.read(run.pids)
            used, total = seen.gpus[0]
            smi_used, smi_total = (int(word) << 20 for word in nvidia_smi("memory.used,memory.total").split(", "))
            report.value("in use", used / 2**20, "MiB")
            report.value("in use by nvidia-smi", smi_used / 2**20, "MiB")
            report.check("the gauge's use is nvidia-smi's", abs(used - smi_used) < NEAR, (used, smi_used))
            report.check("the gauge's total is nvidia-smi's", abs(total - smi_total) < NEAR, (total, smi_total))
            report.check("the rank's 3 GiB are in it", used - before > 3 * GIB, (used - before) / GIB)
        finally:
            Path(path + ".go").touch()
            run.wait(timeout=60)


def nvidia_smi(fields: str) -> str:
    """What nvidia-smi says of the first visible GPU."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={name_of_first()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.stdout.strip() or f"nvidia-smi: {done.stderr.strip()}"


def name_of_first() -> str:
    return launch_gauges.name_for_driver(0, os.environ)


def gpu_used() -> int:
    """Bytes in use on the first visible GPU, by any process."""
    memory = launch_gauges.gpu_memory(name_of_first())
    assert memory is not None, "NVML does not answer"
    return memory[0]
