"""A run whose ranks never met, in a collective or in shared memory, ends with a remark that says so."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

import nbddp
from nbddp.panel.feed import Feed
from nbddp.panel.picture import Picture
from nbddp.panel.text import TextView
from tests.support import Cells, run, start

TOLD = (
    "no rank took part in a collective: 2 ranks worked side by side, without sharing gradients. "
    "To train one model, wrap it: nbddp.wrap(model)"
)

MEETINGS = {
    "barrier": "dist.barrier()",
    "nbddp.barrier": "nbddp.barrier()",
    "nbddp.gather": "nbddp.gather(1)",
    "all_reduce": "dist.all_reduce(t)",
    "async": "dist.all_reduce(t, async_op=True).wait()",
    "send and recv": "dist.send(t, 1) if rank == 0 else dist.recv(t, 0)",
    "isend": "(dist.isend(t, 1) if rank == 0 else dist.irecv(t, 0)).wait()",
    "batch": """
op = dist.P2POp(dist.isend if rank == 0 else dist.irecv, t, 1 - rank)
[work.wait() for work in dist.batch_isend_irecv([op])]
""",
    "objects": "dist.broadcast_object_list([rank], 0)",
    "monitored_barrier": "dist.monitored_barrier()",
    "coalesced": """
with dist.distributed_c10d._coalescing_manager():
    dist.all_reduce(t)
""",
    "new group": "dist.all_reduce(t, group=dist.new_group([0, 1]))",
    "new group, destroyed": """
group = dist.new_group([0, 1])
dist.all_reduce(t, group=group)
dist.destroy_process_group(group)
""",
    "own group": "dist.init_process_group('gloo'); dist.barrier()",
    "own group, destroyed": "dist.init_process_group('gloo'); dist.barrier(); dist.destroy_process_group()",
    "mesh": """
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
torch.distributed._functional_collectives.all_reduce(t, "sum", mesh["b"]).sum()
""",
    "functional": "torch.distributed._functional_collectives.all_reduce(t, 'sum', dist.group.WORLD).sum()",
    "DDP": "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))(t).sum().backward()",
    "wrap": "nbddp.wrap(torch.nn.Linear(2, 2))",
    "FSDP": """
from torch.distributed.fsdp import fully_shard
model = torch.nn.Linear(2, 2)
fully_shard(model)
model(t[None]).sum().backward()
""",
    "one rank of two": "if rank == 0: dist.send(t, 1)\nelse: dist.recv(t, 0)",
}
NO_MEETINGS = {
    "nothing": "pass",
    "training": "torch.nn.Linear(2, 2)(t).sum().backward()",
    "new group": "dist.new_group([0, 1])",
    "own group": "dist.init_process_group('gloo'); dist.destroy_process_group()",
    "groups of one": "dist.all_reduce(t, group=[dist.new_group([0]), dist.new_group([1])][rank])",
    "a log over all ranks": "nbddp.log(loss=1.0, reduce='mean')",
    "shares of data": "list(nbddp.loader(list(range(8))))",
}


def function(cell: Cells, body: str, name: str = "train") -> Any:
    """A function of the notebook with this body."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return getattr(
        cell(
            "import nbddp, torch, torch.distributed as dist\n"
            f"def {name}(*args):\n    rank = nbddp.rank()\n    t = torch.ones(2)\n{lines}\n"
        ),
        name,
    )


@pytest.mark.parametrize("meeting", MEETINGS)
def test_a_run_whose_ranks_met_has_no_remark(meeting: str, cell: Cells) -> None:
    assert run(function(cell, MEETINGS[meeting])).remark == ""


@pytest.mark.parametrize("work", NO_MEETINGS)
def test_a_run_whose_ranks_never_met_has_a_remark(work: str, cell: Cells) -> None:
    assert run(function(cell, NO_MEETINGS[work])).remark == TOLD


def test_meetings_are_counted_in_torchs_debug_mode_too(cell: Cells) -> None:
    debug = "dist.set_debug_level(dist.DebugLevel.DETAIL); dist.init_process_group('gloo')"
    assert run(function(cell, debug)).remark == TOLD
    assert run(function(cell, f"{debug}; dist.all_reduce(t)")).remark == ""


def test_a_run_of_one_rank_has_no_remark(cell: Cells) -> None:
    assert run(function(cell, "pass"), nprocs=1).remark == ""


def test_a_run_without_a_process_group_has_the_remark_too(cell: Cells) -> None:
    assert run(function(cell, "pass"), init=False).remark == TOLD
    assert run(function(cell, "dist.init_process_group('gloo'); dist.barrier()"), init=False).remark == ""


def test_spawn_has_the_remark_only_if_its_processes_make_a_group(tmp_path: Path, cell: Cells) -> None:
    group = "dist.init_process_group('gloo', init_method='file://{}', rank=args[0], world_size=2)"
    assert _spawned(cell, "pass") == ""
    assert _spawned(cell, group.format(tmp_path / "one")) == TOLD
    assert _spawned(cell, f"{group.format(tmp_path / 'two')}; dist.barrier()") == ""


def _spawned(cell: Cells, body: str) -> str:
    nbddp.spawn(function(cell, body), nprocs=2)
    last = nbddp.last_run()
    assert last is not None
    return last.remark


def test_shared_memory_counts_as_a_meeting(cell: Cells) -> None:
    shared = torch.zeros(2).share_memory_()
    assert run(function(cell, "args[0][rank] = 1"), shared).remark == ""
    assert shared.tolist() == [1, 1]


def test_a_failed_or_stopped_run_has_no_remark(cell: Cells) -> None:
    with pytest.raises(nbddp.RankError):
        run(function(cell, "1 / 0"))
    last = nbddp.last_run()
    assert last is not None
    assert last.remark == ""
    going = start(function(cell, "import time; time.sleep(60)"))
    going.stop(0)
    assert going.remark == ""


def test_only_the_last_attempt_counts_for_the_remark(cell: Cells) -> None:
    body = "if nbddp.restart_count() == 0:\n    dist.barrier()\n    raise RuntimeError('first')"
    assert run(function(cell, body), max_restarts=1).remark == TOLD


def test_every_view_shows_the_remark(cell: Cells) -> None:
    for body, told in (("pass", True), ("dist.barrier()", False)):
        done = run(function(cell, body), name="mine")
        status, stream = done._viewable.status(), io.StringIO()
        TextView(done._viewable, stream).update(status)
        assert (f"mine: {TOLD}\n" in stream.getvalue()) is told
        frame = Feed(done._viewable).frame(status)
        assert frame is not None
        assert frame[0]["head"]["remark"] == (TOLD if told else "")
        html = Picture(done.history, status).bundle()["text/html"]
        assert (TOLD in html) is told


def test_the_cell_shows_the_remark_once(cell: Cells, capsys: pytest.CaptureFixture[str]) -> None:
    nbddp.run(function(cell, "pass"), nprocs=2, device="cpu")
    assert capsys.readouterr().out.count(TOLD) == 1
