"""Snapshots on hosts that share no disk: all ranks go on from the same one, or the run ends and says who found what."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nbddp
from tests.hosts.rig import Rig
from tests.support import Cells, run

pytestmark = pytest.mark.slow

Login = Callable[..., nbddp.Cluster]
TRAINING = """
    import nbddp, os, psutil, time, torch
    def train(path, steps, lost_after=None):
        path = os.path.expanduser(path)
        found = nbddp.load_snapshot(path) or {"step": -1, "weights": torch.zeros(3)}
        nbddp.barrier()
        for step in range(found["step"] + 1, steps):
            found["weights"] += 1
            nbddp.log(loss=1.0)
            nbddp.save_snapshot(path, step=step, weights=found["weights"])
            nbddp.barrier()
            if step == lost_after and nbddp.restart_count() == 0 and nbddp.rank() == 0:
                time.sleep(0.5)  # the notebook shall know of the last step
                psutil.Process().parent().parent().kill()
                time.sleep(60)
        return float(found["weights"][0]), nbddp.world_size()
"""


@pytest.fixture
def own(rig: Rig) -> Iterator[str]:
    """A path that exists on every host, and is not the same file."""
    yield "/tmp/own.pt"
    for host in rig.hosts.values():
        host.run("sh", "-c", f"rm -f /tmp/own.pt {host.home}/own.pt")


@pytest.mark.parametrize("path", ["/tmp/own.pt", "~/own.pt"])
def test_ranks_that_do_not_see_rank_0s_snapshot_end_the_run(
    cell: Cells, warm: nbddp.Cluster, own: str, path: str
) -> None:
    train = cell(TRAINING).train
    assert run(train, path, 3, hosts=warm).values == [(3.0, 4)] * 4
    with pytest.raises(nbddp.RankError) as raised:
        run(train, path, 6, hosts=warm)
    text = str(raised.value.cause)
    one = r"rank [01] on gpu1 loaded the snapshot of step 2 \(\w{8}\)"
    other = "rank [23] on gpu2 found no file there"
    assert re.search(f"{one}, but {other}|{other}, but {one}", text), text
    assert "folder that all hosts share" in text


def test_a_restart_without_rank_0s_host_does_not_begin_at_step_0(cell: Cells, warm: nbddp.Cluster, own: str) -> None:
    with pytest.raises(nbddp.RankError) as raised:
        run(cell(TRAINING).train, own, 9, 4, hosts=warm, nprocs=1, max_restarts=1, min_hosts=1)
    assert str(raised.value.cause).startswith(
        "load_snapshot('/tmp/own.pt'): before the restart rank 0 saved the snapshot of step 4 there on gpu1, which is "
        "lost, but rank 0 on gpu2 found no file there. Put snapshots into a folder that all hosts share"
    )
    assert (raised.value.host, raised.value.restarts) == ("gpu2", 1)


def test_a_restart_without_rank_0s_host_goes_on_from_the_shared_folder(
    cell: Cells, warm: nbddp.Cluster, in_folder: Path
) -> None:
    found = run(cell(TRAINING).train, "s.pt", 9, 4, hosts=warm, nprocs=1, max_restarts=1, min_hosts=1)
    assert found.values == [(9.0, 1)]
    assert found.history["loss"].steps.tolist() == list(range(9))


def test_a_snapshots_missing_folder_is_named_with_its_host(cell: Cells, warm: nbddp.Cluster, rig: Rig) -> None:
    names = cell("import nbddp\ndef save(path): nbddp.save_snapshot(path, x=1)")
    with pytest.raises(
        nbddp.RankError, match=r"no such folder on gpu1, where rank 0 saves .*: '/tmp/of-the-notebook'"
    ) as raised:
        run(names.save, "/tmp/of-the-notebook/s.pt", hosts=warm)
    assert isinstance(raised.value.cause, FileNotFoundError)
