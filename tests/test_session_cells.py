"""``%ddp open``, ``%%ddp`` cells in a session, ``%ddp close``: in a real notebook."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support import Notebook, Reply, ranks_of, wait_until


@pytest.fixture(scope="module")
def opened() -> Iterator[Notebook]:
    with Notebook() as notebook:
        notebook.ok("%load_ext nbddp\nimport nbddp, json\n%ddp open -n 2 --device cpu")
        yield notebook


def out(reply: Reply) -> str:
    assert reply.status == "ok", reply.traceback
    return reply.shown.strip().splitlines()[-1]


def test_a_cell_goes_on_where_the_last_one_ended(opened: Notebook) -> None:
    pids = out(opened.ok("%%ddp\nimport os\nx = torch.ones(2) * rank\nnbddp.gather(os.getpid())"))
    reply = opened.ok("%%ddp\ndist.all_reduce(x)\n(x.tolist(), nbddp.gather(os.getpid()))")
    assert out(reply) == f"([1.0, 1.0], {pids})"
    assert out(opened.ok("'x' in globals()")) == "False"


def test_the_notebooks_variables_go_along_and_again_only_when_they_are_new(opened: Notebook) -> None:
    opened.ok("steps = [1]\ndef grow(): steps.append(len(steps) + 1)")
    assert out(opened.ok("%%ddp\ngrow()\nsteps")) == "[1, 2]"
    assert out(opened.ok("%%ddp\ngrow()\nsteps")) == "[1, 2, 3]"
    assert out(opened.ok("steps")) == "[1]"
    opened.ok("steps = [7]")
    reply = opened.ok("%%ddp\ngrow()\nsteps")
    assert out(reply) == "[7, 2]"
    assert "sent again: steps" in reply.shown


def test_a_name_that_the_ranks_have_set_is_theirs(opened: Notebook) -> None:
    opened.ok("rate = 0.1")
    opened.ok("%%ddp\nrate = rate * (rank + 1)")
    assert out(opened.ok("%%ddp\nnbddp.gather(rate)")) == "[0.1, 0.2]"
    assert out(opened.ok("%%ddp -o rate\nrate")) == "0.1"
    assert out(opened.ok("%%ddp\nnbddp.gather(rate)")) == "[0.1, 0.2]"
    opened.ok("rate = 0.5")
    assert out(opened.ok("%%ddp\nnbddp.gather(rate)")) == "[0.5, 0.5]"


def test_a_function_defined_in_the_notebook_reads_what_the_ranks_have(opened: Notebook) -> None:
    opened.ok("%%ddp\nown = 10 * (rank + 1)")
    opened.ok("def read(): return own")
    assert out(opened.ok("%%ddp\nnbddp.gather(read())")) == "[10, 20]"


def test_a_failure_shows_the_cells_lines_and_the_next_cell_trains(opened: Notebook) -> None:
    opened.ok("%%ddp\nmodel = nbddp.wrap(torch.nn.Linear(4, 1))\nopt = torch.optim.SGD(model.parameters(), 0.1)")
    began = time.monotonic()
    reply = opened.cell("%%ddp\nif rank == 1:\n    wrong = 1 / 0\nmodel(torch.ones(2, 4)).sum().backward()")
    assert time.monotonic() - began < 5
    assert reply.ename == "RankError"
    assert "wrong = 1 / 0" in reply.traceback
    assert "rank 1 of 2 failed" in reply.traceback
    training = "%%ddp\nopt.zero_grad()\nmodel(torch.ones(2, 4)).sum().backward()\nopt.step()\nnbddp.gather(world_size)"
    assert out(opened.ok(training)) == "[2, 2]"


def test_stop_ends_the_cell_and_the_session_goes_on(opened: Notebook) -> None:
    pids = sorted(ranks_of(opened.pid))
    cell = opened.begin("%%ddp\nimport time\nprint('there', flush=True)\ndist.barrier() if rank else time.sleep(300)")
    opened.shown_so_far(cell, "there")
    opened.interrupt()
    assert opened.end_of(cell).ename == "KeyboardInterrupt"
    assert out(opened.ok("%%ddp\nnbddp.all_reduce(1, 'sum')")) == "2"
    assert sorted(ranks_of(opened.pid)) == pids


def test_fresh_ranks_know_nothing_of_the_session(opened: Notebook) -> None:
    opened.ok("%%ddp\nhere = 1")
    assert opened.cell("%%ddp --fresh -n 1 --device cpu\nhere").ename == "RankError"
    assert out(opened.ok("%%ddp\nhere")) == "1"


def test_status_lists_the_names_and_options_of_the_session_are_refused(opened: Notebook) -> None:
    opened.ok("%%ddp\nweights = torch.zeros(3, 5)")
    shown = opened.ok("%ddp status").shown
    assert "<Session: 2 ranks on cpu" in shown
    assert "weights" in shown
    assert "3 × 5" in shown
    refused = opened.cell("%%ddp -n 3\nrank")
    assert refused.ename == "LaunchError"
    assert "nprocs belongs to the session" in refused.evalue
    assert "a session is open" in opened.cell("%ddp open").shown


def test_a_cell_in_the_background_is_waited_for(opened: Notebook) -> None:
    opened.ok("%%ddp --background --as later\nimport time\ntime.sleep(0.5)\nbehind = rank")
    assert "is still running in this session" in opened.cell("%%ddp\nrank").evalue
    opened.ok("later.wait()")
    assert out(opened.ok("%%ddp\nnbddp.gather(behind)")) == "[0, 1]"


@pytest.mark.slow
def test_nothing_is_left_of_a_session_when_its_kernel_is_killed_or_restarted_or_closes_it() -> None:
    for end in ("kill", "restart", "close"):
        with Notebook() as notebook:
            notebook.ok("%load_ext nbddp\n%ddp open -n 2 --device cpu")
            notebook.ok("%%ddp\nx = rank")
            pids = ranks_of(notebook.pid)
            assert len(pids) == 2
            if end == "kill":
                notebook.kill()
            elif end == "restart":
                notebook.restart()
            else:
                notebook.ok("%ddp close")
            wait_until(lambda gone=pids: not any(_lives(pid) for pid in gone), 5.0, f"after {end}")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_a_rank_that_is_killed_is_named_in_the_cell(opened: Notebook) -> None:
    os.kill(ranks_of(opened.pid)[0], signal.SIGKILL)
    reply = opened.cell("%%ddp\nrank")
    assert reply.ename in ("LaunchError", "RankDied")  # noticed before the call, or in it
    reply = opened.cell("%%ddp\nrank")
    assert reply.ename == "LaunchError"
    assert "is lost" in reply.evalue
    opened.ok("%ddp close\n%ddp open -n 2 --device cpu")
    assert out(opened.ok("%%ddp\nnbddp.gather(rank)")) == "[0, 1]"
    opened.ok("%ddp close")
