"""Other start methods inside ranks, and what only counts when a process starts."""

import functools
import os
import signal
import subprocess
import sys

import pytest

from tests.support import Cells, gone, run, wait_until
from tests.test_ranks import dataloader_workers_work, launched_processes_form_a_group


@pytest.mark.parametrize("port", ["ours", "own"])
def test_processes_that_a_rank_spawns_form_a_group_of_their_own(cell: Cells, port: str) -> None:
    launched_processes_form_a_group(cell, "spawn", port)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_dataloader_workers_work_inside_ranks_with_every_start_method(cell: Cells, method: str) -> None:
    """Their start method is the platform's or the user's, never an accident of how the rank was started."""
    dataloader_workers_work(cell, method)


def test_variables_that_are_read_when_python_or_torch_starts_count_for_a_run_of_their_own(cell: Cells) -> None:
    names = cell("""
        import os, sys, torch
        def seen():
            logs = torch._logging._internal.log_state.is_artifact_enabled("graph_breaks")
            return hash("a name"), sys.warnoptions, torch.jit._state._enabled.enabled, logs, os.getppid()
    """)
    at_start = {"PYTHONHASHSEED": "7", "PYTHONWARNINGS": "ignore", "PYTORCH_JIT": "0", "TORCH_LOGS": "+graph_breaks"}
    later = {"OMP_NUM_THREADS": "2", "TORCH_DISTRIBUTED_DEBUG": "INFO", "MY_OWN": "x"}
    assert run(names.seen, env=later).values == run(names.seen).values  # in the same server
    for _ in range(2):
        found = run(names.seen, env=at_start).values
        server = found[0][-1]
        os.kill(server, signal.SIGKILL)  # the one that is started in its place reads them, too
        wait_until(functools.partial(gone, server))
    plain = [sys.executable, "-c", "import sys; print(hash('a name'), sys.warnoptions)"]
    expected = subprocess.run(plain, env={**os.environ, **at_start}, capture_output=True, text=True, check=True).stdout
    assert [(f"{value[0]} {value[1]}\n", *value[2:4]) for value in found] == [(expected, False, True)] * 2
    assert not at_start.keys() & os.environ.keys()
