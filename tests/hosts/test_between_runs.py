"""Hosts and the notebook keep nothing of a run that is over."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import nbddp
from nbddp.payload import huge_pages
from tests.hosts.rig import Rig
from tests.support import Cells, run, wait_until

pytestmark = pytest.mark.slow

BIG = bytes(30_000_000)
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def kept(rig: Rig, host: str) -> int:
    """Bytes of blocks that are in memory there."""
    found = {}
    for process in rig.hosts[host].processes():
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{process.pid}/fd"):
                path = f"/proc/{process.pid}/fd/{fd}"
                if os.readlink(path).startswith(("/memfd:nbddp-", "/nbddp-")):
                    found[os.stat(path).st_dev, os.stat(path).st_ino] = os.stat(path).st_blocks * 512
    return sum(found.values())


def test_hosts_free_the_payload_after_the_run(cell: Cells, warm: nbddp.Cluster, rig: Rig) -> None:
    names = cell("""
        import nbddp
        def train(data):
            if nbddp.restart_count() == 0:
                raise ValueError
            return len(data)
    """)
    for _ in range(2):  # the data of a run are there for its restarts, and again for the next run
        assert run(names.train, BIG, hosts=warm, max_restarts=1).values == [len(BIG)] * 4
        wait_until(lambda: kept(rig, "gpu1") == kept(rig, "gpu2") == 0)


def test_a_hosts_large_payload_lies_in_huge_pages_after_a_small_one_too(cell: Cells, warm: nbddp.Cluster) -> None:
    names = cell("""
        import re
        def train(data):
            total = int(data.sum())
            return total, int(re.search(r"ShmemPmdMapped:\\s+(\\d+)", open("/proc/self/smaps_rollup").read())[1]) << 10
    """)
    for nbytes in (1 << 20, huge_pages.FROM_NBYTES):
        data = torch.ones(nbytes, dtype=torch.uint8)
        for total, in_huge_pages in run(names.train, data, hosts=warm).values:
            assert total == nbytes
            assert in_huge_pages >= (nbytes // 2 if makes_huge_pages() and nbytes == huge_pages.FROM_NBYTES else 0)


def makes_huge_pages() -> bool:
    huge_pages.begin(wait_s=5)
    return bool(huge_pages._directories) and SHMEM_ENABLED.exists() and "[deny]" not in SHMEM_ENABLED.read_text()


def test_the_notebook_frees_a_function_after_the_next_run(cell: Cells, warm: nbddp.Cluster) -> None:
    def forgotten() -> weakref.ref[Any]:
        names = cell("def make(data):\n    def train(): return len(data)\n    return train")
        train = names.make(BIG)
        assert run(train, hosts=warm).values == [len(BIG)] * 4
        return weakref.ref(train)

    train = forgotten()
    run(cell("def nothing(): pass").nothing)  # the last run is kept; this is another
    gc.collect()
    assert train() is None
