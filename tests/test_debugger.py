"""The debugger under the cell: breakpoints, prompts of several ranks, after errors, in the background, in a session."""

import os
import time
from collections.abc import Iterator

import IPython
import pytest

import nbddp
from tests.support import OUR_FILES, Notebook, wait_until

SOON_S = 2.0
BOTH, ZERO, ONE = "ranks 0 and 1 (Pdb) ", "rank 0 (Pdb) ", "rank 1 (Pdb) "


@pytest.fixture
def cell(notebook: Notebook) -> Iterator[Notebook]:
    notebook.ok("%load_ext nbddp\nimport nbddp, torch, time\nimport torch.distributed as dist")
    notebook.ok("%ddp -n 2 --device cpu\ndef run(f, n=1, **o): return nbddp.run(f, nprocs=n, device='cpu', **o)")
    yield notebook
    notebook.ok("%ddp --reset")


def test_a_breakpoint_opens_pdb_in_the_users_frame_with_the_cells_lines(cell: Notebook) -> None:
    source = """
    def inner(x):
        y = x * 2
        breakpoint()
        return y
    def outer(): return inner(nbddp.rank() + 20)
    run(outer).value
    """
    talk = cell.talk(source, ["p x, y", "l", "w", "up", "p nbddp.rank()", "down", "pp [y]", "!y = 7", "c"])
    assert talk.prompts == [ZERO] * 9
    for text in ("(20, 40)", "def inner(x):", "return inner(nbddp.rank() + 20)", "[40]"):
        assert text in talk.shown
    assert not OUR_FILES.search(talk.shown)
    assert "multiprocessing" not in talk.shown
    assert talk.result == "7"


@pytest.mark.skipif(IPython.version_info < (8,), reason="IPython 7 runs each statement of a cell in its own frame")
def test_stepping_until_return_into_and_from_line_to_line_to_a_cells_last(cell: Notebook) -> None:
    source = """
    def double(x):
        z = x * 2
        return z
    def f():
        breakpoint()
        start = 4
        a = double(start)
        b = a + 1
        return b
    run(f).value
    """
    talk = cell.talk(source, ["n", "n", "s", "r", "n", "n", "p a", "c"])
    for text in ("--Call--", "->8", "-> breakpoint()"):
        assert text in talk.shown
    assert talk.result == "9"
    talk = cell.talk("%%ddp -n 1\nx = 20\nbreakpoint()\nx += 1\nx", ["n", "n", "p x", "n"])
    lines = [line for line in talk.shown.splitlines() if line.startswith("->")]
    assert (lines, talk.shown.count("--"), talk.result) == (["-> breakpoint()", "-> x += 1", "-> x"], 0, "21")


def test_nbddp_breakpoint_stops_one_rank_under_a_condition(cell: Notebook) -> None:
    source = """\
    %%ddp
    for i in range(6):
        loss = torch.tensor(float("nan") if i > 3 else 1.0)
        nbddp.breakpoint(rank=5 - i, when=loss.isnan())
        dist.barrier()
    i
    """
    talk = cell.talk(source, ["p i", "c"] * 2)
    assert (talk.prompts, talk.result) == ([ONE] * 2 + [ZERO] * 2, "5")
    assert "[rank 1] 4\n" in talk.shown


def test_pdbs_torchs_and_no_breakpoints(cell: Notebook) -> None:
    talk = cell.talk("%%ddp -n 1\nimport pdb\nx = 3\npdb.set_trace()\nx", ["w", "!x = 4", "c"])
    assert (talk.prompts, talk.result) == ([ZERO] * 3, "4")
    assert "IPython/" not in talk.shown
    talk = cell.talk("%%ddp\ndist.breakpoint(rank=1)\ndist.barrier()\n5", ["p rank", "c"])
    assert (talk.prompts, talk.result) == ([ONE] * 2, "5")
    source = "%%ddp\nimport os\nos.environ['PYTHONBREAKPOINT'] = '0'\nbreakpoint()\nnbddp.breakpoint()\n7"
    assert cell.talk(source, []).result == "7"


def test_ranks_at_one_line_are_one_prompt_and_each_can_be_visited(cell: Notebook) -> None:
    source = """\
    %%ddp
    x = torch.full((), 10.0 * rank)
    breakpoint()
    dist.all_reduce(x)
    x.item()
    """
    talk = cell.talk(source, ["p rank", "rank 1", "p rank", "rank 5", "rank 0", "p x.item()", "rank all", "n", "c"])
    assert talk.prompts == [BOTH, BOTH, ONE, ONE, BOTH, ZERO, ZERO, BOTH, BOTH]
    assert "[rank 1] 1\n" in talk.shown
    assert "There is no rank 5 here, only ranks 0 and 1.\n" in talk.shown
    assert talk.result == "10.0"


def test_ranks_at_different_prompts_and_in_a_collective(cell: Notebook) -> None:
    talk = cell.talk("%%ddp\nbreakpoint()\ndist.barrier()\n1", ["rank 0", "n", "n", "n", "c", "c"])
    assert (talk.prompts[:2], ONE in talk.prompts, talk.result) == ([BOTH, ZERO], True, "1")  # rank 0 is in the barrier


def test_q_ends_the_run_as_stop_does(cell: Notebook) -> None:
    began = time.monotonic()
    talk = cell.talk("%%ddp\nif rank == 0:\n    breakpoint()\ndist.barrier()\ntime.sleep(60)", ["q"])
    assert (talk.ename, "was stopped" in talk.evalue) == ("KeyboardInterrupt", True)
    assert cell.talk("run(lambda: [breakpoint(), time.sleep(60)], 2)", ["q"]).ename == "KeyboardInterrupt"
    assert cell.talk("nbddp.last_run().state", []).result == "'stopped'"
    assert time.monotonic() - began < 2 * SOON_S


def test_an_interrupt_at_the_prompt_ends_the_run_and_users_finally_runs(cell: Notebook, tmp_path: object) -> None:
    source = f"""
    def f():
        try: breakpoint()
        finally: open("{tmp_path}/finally", "w").close()
    run(f)
    """
    assert cell.talk(source, ["p 1", cell.interrupt]).ename == "KeyboardInterrupt"
    assert os.listdir(str(tmp_path)) == ["finally"]


def test_pdb_opens_where_a_rank_failed_while_its_peers_wait(cell: Notebook) -> None:
    source = """
    def f(x):
        scale = 3
        if nbddp.rank() == 1: return torch.nn.functional.linear(torch.ones(2, x), torch.ones(3, 5)) * scale
        dist.all_reduce(torch.ones(1))
    nbddp.run(f, (4,), nprocs=2, device="cpu", pdb=True)
    """
    talk = cell.talk(source, ["p x, scale", "w", "q"])
    assert (talk.prompts, "(4, 3)" in talk.shown, "mat1 and mat2" in talk.shown) == ([ONE] * 3, True, True)
    assert not OUR_FILES.search(talk.shown)
    assert (talk.ename, "rank 1 of 2" in talk.evalue) == ("RankError", True)


def test_a_cells_error_opens_ipythons_debugger_with_pdb(cell: Notebook) -> None:
    source = "%%ddp --pdb\nw = rank\nraise ValueError('boom')"
    talk = cell.talk(source, ["rank all", "p w + 40", "c"])  # the first prompt may come before the other rank is there
    assert talk.prompts[0] in ("rank 0 ipdb> ", "rank 1 ipdb> ", "ranks 0 and 1 ipdb> ")
    assert talk.prompts[1:] == ["ranks 0 and 1 ipdb> "] * 2
    assert [text in talk.shown for text in ("ValueError: boom\n", "[rank 1] 41\n")] == [True, True]
    assert talk.ename == "ValueError"
    cell.ok("%pdb on")
    talk = cell.talk("run(lambda a=0: 1 / a)", ["p a", "q"])
    assert (talk.prompts, talk.ename) == ([ZERO] * 2, "RankError")  # and IPython's own stays closed
    talk = cell.talk("%%ddp -n 1\n1 / 0", ["q"])
    assert (talk.prompts, talk.ename) == (["rank 0 ipdb> "], "ZeroDivisionError")
    assert cell.talk("get_ipython().call_pdb", []).result == "True"
    cell.ok("%pdb off")


def test_where_nobody_can_answer_the_run_goes_on_and_says_so_once(cell: Notebook) -> None:
    cell.ok("%%ddp --background\nfor i in range(3):\n    breakpoint()\nprint('through')")
    shown = cell.ok("print(nbddp.last_run().wait().logs())").shown
    assert [shown.count(text) for text in ("debugger skipped: no interactive input here", "through")] == [1, 2]
    assert cell.ok("nbddp.last_run()").shown.startswith("<Run In[")
    # In a front end without stdin.
    message = cell._client.execute("%%ddp\nfor i in range(3):\n    breakpoint()\n'value'", allow_stdin=False)
    shown = cell.end_of(message).shown
    assert [shown.count(text) for text in ("debugger skipped: no interactive input here", "'value'")] == [1, 1]
    asks = "torch.utils.data.DataLoader([1], num_workers=1, collate_fn=lambda _: input())"
    assert "can't read input: use num_workers=0" in cell.cell(f"run(lambda: list({asks}), timeout=20)").evalue
    # In a script.
    run = nbddp.run(lambda: [breakpoint(), nbddp.rank()][1], nprocs=2, device="cpu", pdb=True)
    assert (run.values, run.logs().count("debugger skipped")) == ([0, 1], 1)


def test_a_session_lives_on_after_its_debugger(cell: Notebook) -> None:
    cell.ok("%ddp open")
    try:
        cell.ok("x = torch.ones(1) * rank")
        source = "%%ddp --pdb\ny = rank\nif rank == 1:\n    raise ValueError('s')\ndist.all_reduce(x)"
        talk = cell.talk(source, ["p y", "q"])
        assert (talk.prompts, talk.ename) == (["rank 1 ipdb> "] * 2, "ValueError")
        talk = cell.talk("%debug", ["p y * 7", "q"])
        assert "7\n" in talk.shown
        assert cell.talk("breakpoint()\ny = 1\ndist.all_reduce(x)", ["q"]).ename == "KeyboardInterrupt"
        talk = cell.talk("y = torch.ones(1)\nbreakpoint()\ndist.all_reduce(y)\ny.item()", ["n", "c"])
        assert (talk.prompts, talk.result) == ([BOTH] * 2, "2.0")
        assert "-> dist.all_reduce(y)" in talk.shown or IPython.version_info < (8,)
    finally:
        cell.ok("%ddp close")
    wait_until(lambda: "no session is open" in cell.ok("%ddp status").shown)
