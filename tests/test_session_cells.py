"""``%ddp open``, ``%%ddp`` cells in a session, ``%ddp close``: in a real notebook."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support import Notebook, Reply, out, ranks_of, tab, wait_until


@pytest.fixture(scope="module")
def opened() -> Iterator[Notebook]:
    with Notebook() as notebook:
        notebook.ok("%load_ext nbddp\nimport nbddp, json\n%ddp open -n 2 --device cpu")
        yield notebook


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


def test_a_cell_on_some_ranks_leaves_the_others_their_names(opened: Notebook) -> None:
    opened.ok("%%ddp\nwhere = 'all'")
    opened.ok("started = 5")
    assert out(opened.ok("%%ddp --ranks 1 -o there\nwhere, there = 'one', started\nrank")) == "1"
    assert out(opened.ok("there")) == "5"
    assert out(opened.ok("%%ddp\nnbddp.gather((where, started))")) == "[('all', 5), ('one', 5)]"
    assert "there is no rank 2: the session has ranks 0 to 1" in opened.cell("%%ddp --ranks 0,2\n1").traceback
    assert "--ranks needs a session" in opened.cell("%%ddp --fresh --ranks 0\n1").shown


def test_values_that_differ_between_ranks_are_printed_and_equal_ones_together(opened: Notebook) -> None:
    differing = opened.ok("%%ddp\nx = torch.full((), 10.0 * rank)\nx")
    assert differing.shown.strip().splitlines()[-3:] == ["rank 0: tensor(0.)", "rank 1: tensor(10.)", "tensor(0.)"]
    assert "rank 0" not in opened.ok("%%ddp\nx = 3\nx").shown
    assert "rank 0" not in opened.ok("%%ddp\nobject()").shown  # an address is no difference
    assert "rank 1" not in opened.ok("%%ddp\nrank;").shown


def test_a_class_that_is_sent_again_is_told_once_to_leave_old_objects_as_they_are(opened: Notebook) -> None:
    opened.ok("class Net:\n    version = 1")
    opened.ok("%%ddp\nold = Net()")
    opened.ok("class Net:\n    version = 2")
    reply = opened.ok("%%ddp\n(old.version, Net().version)")
    assert "sent again: Net (objects made before keep the old Net)" in reply.shown
    assert out(reply) == "(1, 2)"
    opened.ok("class Net:\n    version = 3")
    again = opened.ok("%%ddp\nNet.version").shown
    assert "sent again: Net" in again
    assert "keep the old" not in again


def test_tab_completes_the_ranks_names_and_their_attributes(opened: Notebook) -> None:
    opened.ok("%%ddp\nonly_on_ranks = torch.nn.Linear(2, 3)\n_hidden = 1")
    assert tab(opened, "%%ddp\nonly_on_") == ["only_on_ranks"]
    assert tab(opened, "%%ddp\nx = f(only_on_ranks.wei") == ["only_on_ranks.weight"]
    assert "only_on_ranks.bias.shape" in tab(opened, "%%ddp\nonly_on_ranks.bias.")
    assert tab(opened, "only_on_") == []  # in a cell of the notebook
    assert tab(opened, "%%ddp\nnot_there.wei") == []


def test_cells_of_px_and_distributed_run_with_their_first_line_changed(opened: Notebook) -> None:
    def of_another(first: str, body: str) -> Reply:
        words = {"%%px": "%%ddp", "%%distributed": "%%ddp", "--targets": "--ranks", "--noblock": "--background --as r"}
        if first.startswith("%%rank"):
            return opened.cell(f"%%ddp --ranks {first.removeprefix('%%rank').strip(' []')}\n{body}")
        return opened.cell(" ".join(words.get(word, word) for word in first.split()) + "\n" + body)

    assert out(of_another("%%px", "a = 5\nb = 10\na + b")) == "15"
    assert "ZeroDivisionError" in of_another("%%px", "1/0").traceback  # and the engines live on
    assert out(of_another("%%px", "import numpy\nint(numpy.arange(a).sum())")) == "10"
    assert out(of_another("%%px --targets 1", "a = 7\nrank")) == "1"
    assert of_another("%%px", "a").shown.splitlines()[-3:] == ["rank 0: 5", "rank 1: 7", "5"]
    assert of_another("%%px --noblock", "import time\ntime.sleep(0.5)\na * 2").seconds < 0.5
    assert out(opened.ok("r.wait().values")) == "[10, 14]"
    assert of_another("%%px", "def f(x):\n    return x ** 2\nf(a)").shown.splitlines()[-2] == "rank 1: 49"

    of_another("%%distributed", "x = torch.full((10, 10), float(rank + 1))\ndist.all_reduce(x)")
    reply = of_another("%%distributed", "print(f'Rank {rank}: {x.mean():.3f}')")
    assert "Rank 0: 3.000" in reply.shown
    assert "Rank 1: 3.000" in opened.ok("%ddp logs 1").shown
    of_another("%%rank [0]", "model = torch.nn.Linear(10, 10)\nprint('Model created on rank 0')")
    of_another("%%rank [1]", "model = torch.nn.Linear(10, 10)")
    of_another("%%distributed", "for param in model.parameters():\n    dist.broadcast(param.data, src=0)")
    same = "nbddp.gather(model.weight.sum().item())[0] == model.weight.sum().item()"
    assert out(of_another("%%distributed", same)) == "True"


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
def test_nothing_is_left_of_a_session_when_it_is_closed_or_its_kernel_restarted_or_killed() -> None:
    with Notebook() as notebook:
        for end in ("close", "restart", "kill"):
            notebook.ok("%load_ext nbddp\n%ddp open -n 2 --device cpu")
            notebook.ok("%%ddp\nx = rank")
            pids = ranks_of(notebook.pid)
            assert len(pids) == 2
            if end == "close":
                notebook.ok("%ddp close")
            elif end == "restart":
                notebook.restart()
            else:
                notebook.kill()
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
