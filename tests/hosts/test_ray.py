"""Hosts that Ray gives: two nodes of a Ray cluster on this machine. Skipped where Ray is not installed."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator

import pytest

import nbddp
from tests.support import script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray"),
]

RAY = """
    import contextlib, os, signal, sys, time
    os.environ.update(RAY_TMPDIR=sys.argv[1], RAY_USAGE_STATS_ENABLED="0", RAY_raylet_start_wait_time_s="120")
    import nbddp, psutil, torch
    from nbddp.hosts import returns
    from ray.cluster_utils import Cluster

    def where():
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        return total.item(), nbddp.rank(), nbddp.world_size(), os.environ["NBDDP_NODE"], "OMP_NUM_THREADS" in os.environ

    def fail():
        nbddp.barrier()
        if nbddp.rank() == 1: raise ValueError("boom")
        time.sleep(1000)

    def agents():
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:] == ["-m", "nbddp.agent"]:
                    found.append(process)
        return found

    def until(condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    options = {"device": "cpu", "show": False, "nprocs": 1}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
"""


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder with a short name, for Ray's sockets."""
    made = tempfile.mkdtemp(prefix="r", dir="/tmp")
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_a_run_on_two_nodes_of_ray_and_again_after_a_loss(folder: str) -> None:
    done = script(
        RAY
        + """
    returns.FIRST_PAUSE_S = 0.2
    with nbddp.cluster("ray", nodes=2, address=cluster.address) as hosts:
        (first, *_), (second, *_) = found = [value[1:] for value in hosts.run(where, **options).values]
        print([value[0] for value in hosts.run(where, **options).values], len({node for *_, node, _ in found}))
        try:
            hosts.run(fail, **options)
        except nbddp.RankError as error:
            print(error.host == hosts.hosts[1], repr(error.cause))
        print(hosts.run(lambda data: data.sum().item(), (torch.ones(8_000_000),), **options).values)
        notes = [line for rank in (0, 1) for line in nbddp.last_run().logs(rank).splitlines() if "cannot send" in line]
        print(hosts._supplier.chain_from, notes)
        before = {process.pid for process in agents()}
        agents()[0].kill()
        until(lambda: len(hosts.present()) == 1)
        until(lambda: len(hosts.present()) == 2)
        print([value[:3] for value in hosts.run(where, **options).values], len(before))
    until(lambda: not agents())
    cluster.shutdown()
    """,
        folder,
    )
    assert [line for line in done.stdout.splitlines() if not line.startswith("waiting for")] == [
        "[2.0, 2.0] 2",
        "True ValueError('boom')",
        "[8000000.0, 8000000.0]",
        "2 []",
        "[(2.0, 0, 2), (2.0, 1, 2)] 2",
    ], done.stderr


def test_a_ray_that_does_not_run_is_named() -> None:
    with pytest.raises(nbddp.LaunchError, match=r"no Ray answers at 127\.0\.0\.1:9: start it with `ray start --head`"):
        nbddp.cluster("ray", nodes=2, address="127.0.0.1:9")
