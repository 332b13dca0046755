"""What hosts keep of a run that is over: nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from typing import Any

import pytest

import nbddp
from tests.hosts.rig import Rig
from tests.support import Cells, run, wait_until

pytestmark = pytest.mark.slow

BIG = bytes(30_000_000)


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


def test_a_payload_stays_in_the_hosts_memory(cell: Cells, warm: nbddp.Cluster, rig: Rig) -> None:
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


def test_a_function_stays_in_the_notebooks_memory(cell: Cells, warm: nbddp.Cluster) -> None:
    def forgotten() -> weakref.ref[Any]:
        names = cell("def make(data):\n    def train(): return len(data)\n    return train")
        train = names.make(BIG)
        assert run(train, hosts=warm).values == [len(BIG)] * 4
        return weakref.ref(train)

    train = forgotten()
    run(cell("def nothing(): pass").nothing)  # the last run is kept; this is another
    gc.collect()
    assert train() is None
