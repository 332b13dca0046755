"""The debugger in the cell: breakpoints, prompts of several ranks, after errors, in the background, in a session."""

from __future__ import annotations

import bdb
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import _pytest.debugging
import psutil
import pytest

import nbddp
from nbddp import wire
from nbddp.kernel.dialog import Dialog
from nbddp.launch.interface import RankBase
from nbddp.worker import breakpoints
from tests.support import Notebook, Talk, ranks_of, wait_until

SOON_S = 2.0  # the figure is 0.1 s; here only a prompt that waits for a timeout fails


@pytest.fixture(scope="module")
def shared() -> Iterator[Notebook]:
    with Notebook() as notebook:
        notebook.ok("%load_ext nbddp\nimport nbddp, torch, time, os\nimport torch.distributed as dist")
        notebook.ok("nbddp.run(lambda: 1, nprocs=2)")
        yield notebook


@pytest.fixture
def cell(shared: Notebook) -> Iterator[Notebook]:
    yield shared
    wait_until(lambda: not ranks_of(shared.pid), what="the ranks' end")


def lines(talk: Talk) -> list[str]:
    return talk.shown.splitlines()


def answer_and_interrupt(cell: Notebook, line: str) -> Callable[[], None]:
    """Return what answers with a line that takes long, and interrupts the kernel meanwhile."""

    def answer() -> None:
        cell._client.input(line)
        threading.Timer(0.5, cell.interrupt).start()

    return answer


# ---------------------------------------------------------------------------- commands


def test_a_breakpoint_opens_pdb_in_the_users_frame_with_the_cells_lines(cell: Notebook) -> None:
    source = """
    def inner(x):
        y = x * 2
        breakpoint()
        return y
    def outer():
        return inner(nbddp.rank() + 20)
    nbddp.run(outer, nprocs=1).value
    """
    talk = cell.talk(source, ["p x, y", "l", "w", "up", "p nbddp.rank()", "down", "pp [y]", "a", "c"])
    assert talk.prompts == ["rank 0 (Pdb) "] * 9
    assert "(20, 40)" in talk.shown
    assert "-> breakpoint()" in talk.shown
    assert "def inner(x):" in talk.shown
    assert "inner(nbddp.rank() + 20)" in talk.shown
    assert "[40]" in talk.shown
    assert "x = 20" in talk.shown
    assert "nbddp/worker" not in talk.shown
    assert "multiprocessing" not in talk.shown
    assert talk.result == "40"


def test_stepping_until_return_and_into(cell: Notebook) -> None:
    source = """
    def double(x):
        z = x * 2
        return z
    def f():
        breakpoint()
        a = double(4)
        b = a + 1
        return b
    nbddp.run(f, nprocs=1).value
    """
    talk = cell.talk(source, ["n", "s", "s", "r", "n", "n", "p a", "c"])
    assert "--Call--" in talk.shown
    assert "->8" in talk.shown
    assert talk.result == "9"


def test_a_cell_is_stepped_from_line_to_line_to_its_last(cell: Notebook) -> None:
    talk = cell.talk("%%ddp -n 1\nx = 20\nbreakpoint()\nx + 1", ["n", "n", "c"])
    assert [line for line in lines(talk) if line.startswith("->")][-3:-1] == ["-> breakpoint()", "-> x + 1"]
    assert talk.shown.count("--Return--") == 1  # after the last line, not before it
    assert talk.result == "21"


def test_values_can_be_changed(cell: Notebook) -> None:
    source = """
    def f():
        a = 1
        breakpoint()
        return a
    nbddp.run(f, nprocs=1).value
    """
    assert cell.talk(source, ["!a = 5", "p a + 1", "c"]).result == "5"
    assert cell.talk(source, ["!a = 5", "interact", "a * 2", "exit()", "c"]).shown.count("\n10\n") == 1


def test_a_conditional_breakpoint_stops_again_and_display_shows_what_changed(cell: Notebook) -> None:
    source = """
    %%ddp -n 1
    breakpoint()
    total = 0
    for i in range(100):
        total += i
    total
    """
    talk = cell.talk(source, ["b 6, i == 40", "display i", "c", "p i, total", "cl 1", "c"])
    assert "(40, 780)" in talk.shown
    assert "display i: 40" in talk.shown
    assert talk.result == "4950"


def test_pdb_set_trace_and_torchs_breakpoint_open_the_same_prompt(cell: Notebook) -> None:
    talk = cell.talk("%%ddp -n 1\nimport pdb\nx = 3\npdb.set_trace()\nx", ["!x = 4", "c"])
    assert (talk.prompts, talk.result) == (["rank 0 (Pdb) "] * 2, "4")
    talk = cell.talk("%%ddp -n 2\ndist.breakpoint(rank=1)\ndist.barrier()\nrank", ["p rank", "c"])
    assert (talk.prompts, talk.result) == (["rank 1 (Pdb) "] * 2, "0")


def test_in_a_script_and_in_a_module_beside_the_notebook(cell: Notebook, tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("def f(x):\n    y = x + 1\n    breakpoint()\n    return y\n")
    (tmp_path / "train.py").write_text("import sys\nfrom beside_it import f\nprint('value', f(int(sys.argv[1])))\n")
    talk = cell.talk(f"%ddp run -n 1 {tmp_path}/train.py 6", ["p y", "l", "up", "l", "c"])
    assert "\n7\n" in talk.shown
    assert "y = x + 1" in talk.shown
    assert "from beside_it import f" in talk.shown
    assert "value 7" in talk.shown


def test_nbddp_breakpoint_stops_one_rank_under_a_condition(cell: Notebook) -> None:
    source = """
    %%ddp -n 2
    for i in range(6):
        loss = torch.tensor(float("nan") if i == 4 else 1.0)
        nbddp.breakpoint(rank=1, when=loss.isnan())
        dist.barrier()
    i
    """
    talk = cell.talk(source, ["p i", "c"])
    assert (talk.prompts, talk.result) == (["rank 1 (Pdb) "] * 2, "5")
    assert "\n4\n" in talk.shown


@pytest.mark.parametrize("stop", ["breakpoint()", "nbddp.breakpoint()"])
def test_pythonbreakpoint_0_is_honoured(cell: Notebook, stop: str) -> None:
    talk = cell.talk(f"nbddp.run(lambda: [{stop}, 7][1], nprocs=1, env={{'PYTHONBREAKPOINT': '0'}}).value", [])
    assert talk.result == "7"


def test_a_breakpoint_in_what_is_typed_at_the_prompt_is_passed_over(cell: Notebook) -> None:
    source = """
    def f():
        def g():
            breakpoint()
            return 3
        y = 4
        breakpoint()
        return y + g()
    nbddp.run(f, nprocs=1).value
    """
    talk = cell.talk(source, ["p g() + 50", "p y + 50", "c", "p 'in g'", "c"])
    assert {"53", "54"} <= set(lines(talk))
    assert talk.result == "7"


def test_the_prompt_is_known_after_long_output_and_in_the_middle_of_a_line(cell: Notebook) -> None:
    source = "%%ddp -n 2\nbreakpoint()\nrank"
    answers = [
        "rank 0",
        "p 'x' * 300_000",
        "rank all",
        "!print(rank, end='')",
        "rank 1",
        "!print('a\\nb', end='')",
        "q",
    ]
    talk = cell.talk(source, answers)
    both = "ranks 0 and 1 (Pdb) "
    assert talk.prompts == [both, *["rank 0 (Pdb) "] * 2, both, both, *["rank 1 (Pdb) "] * 2]
    assert {"rank 0: 0", "rank 1: 1", "a", "b"} <= set(lines(talk))
    assert "… 100,003 more characters\n" in talk.shown
    assert talk.ename == "KeyboardInterrupt"


def test_text_that_is_not_unicode_can_be_shown(cell: Notebook) -> None:
    source = "nbddp.run(lambda: [breakpoint(), 1 / 0], nprocs=1)"
    talk = cell.talk(source, ["!print('a' + chr(0xD800) + 'b')", "c"])
    assert "a\\ud800b" in lines(talk)
    assert talk.ename == "RankError"


def test_a_variable_named_rank_can_be_used_at_the_prompt(cell: Notebook) -> None:
    talk = cell.talk("%%ddp -n 1\nbreakpoint()\nrank", ["rank + 70", "rank", "c"])
    assert "70" in lines(talk)
    assert "p rank shows the variable" in talk.shown


def test_a_breakpoint_in_a_thread(cell: Notebook) -> None:
    source = """
    import threading
    def f():
        thread = threading.Thread(target=lambda: breakpoint())
        thread.start()
        thread.join()
        return 1
    nbddp.run(f, nprocs=1).value
    """
    assert cell.talk(source, ["p 1", "c"]).result == "1"
    began = time.monotonic()
    assert cell.talk(source, ["q"]).ename == "KeyboardInterrupt"
    assert time.monotonic() - began < SOON_S


def test_a_thread_at_the_prompt_goes_on_when_the_function_has_returned(cell: Notebook) -> None:
    source = """
    import threading
    def f():
        threading.Thread(target=lambda: [breakpoint(), print('thread', 'ends')]).start()
        time.sleep(0.5)
        return 1
    run = nbddp.run(f, nprocs=1)
    run.value, 'thread ends' in run.logs()
    """
    began = time.monotonic()
    talk = cell.talk(source, [lambda: None])
    assert (talk.prompts, talk.result) == (["rank 0 (Pdb) "], "(1, True)")
    assert time.monotonic() - began < 0.5 + SOON_S


# ---------------------------------------------------------------------------- code that may stop


def defined_by(source: str, **names: Any) -> dict[str, Any]:
    namespace = {"__name__": "defined_here", **names}
    exec(source, namespace)
    return namespace


def test_breakpoints_in_functions_classes_and_modules_are_found() -> None:
    for source in (
        "def f(): breakpoint()",
        "def f(): return lambda: breakpoint()",
        "class f:\n @staticmethod\n def g(): breakpoint()",
        "class f:\n @property\n def g(self): breakpoint()",
        "class f:\n class G:\n  def h(self): pdb.set_trace()",
    ):
        found = defined_by(source)["f"]
        module = ModuleType("defined_here")
        module.__dict__.update(f=found)
        assert breakpoints.are_in([], [found]), source
        assert breakpoints.are_in([], [module]), source
    assert not breakpoints.are_in([], [defined_by("def f(): pass")["f"]])


def test_classes_that_refer_to_each_other_are_searched_once() -> None:
    names = defined_by("class A: pass\nclass B: pass\nA.b, B.a = B, A\ndef f(): breakpoint()")
    assert not breakpoints.are_in([], [names["A"]])
    names["A"].f = names["f"]
    assert breakpoints.are_in([], [names["B"]])


def test_a_search_runs_no_code_of_objects_in_a_module() -> None:
    class Proxy:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(f"{name} outside of a request")

    class LazyModule(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(f"{name} is imported")

    module = ModuleType("defined_here")
    module.__dict__.update(request=Proxy(), lazy=LazyModule("lazy"), f=defined_by("def f(): breakpoint()")["f"])
    assert breakpoints.are_in([], [LazyModule("lazy"), module])


def test_installed_libraries_are_not_searched() -> None:
    assert breakpoints.are_in([], [bdb.set_trace])
    assert not breakpoints.are_in([], [bdb, _pytest.debugging])


def test_a_dataloader_worker_says_what_to_do(cell: Notebook) -> None:
    source = """
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, i):
            breakpoint()
            return i
    nbddp.run(lambda: list(torch.utils.data.DataLoader(Data(), num_workers=1)), nprocs=1)
    """
    talk = cell.talk(source, [])
    assert talk.ename == "RankError"
    assert "num_workers=0" in talk.evalue


# ---------------------------------------------------------------------------- several ranks


def test_ranks_at_one_line_are_one_prompt_and_each_can_be_visited(cell: Notebook) -> None:
    source = """
    %%ddp -n 4
    x = torch.full((), 10.0 * rank)
    breakpoint()
    dist.all_reduce(x)
    x.item()
    """
    answers = ["p rank", "rank 3", "p rank", "rank 0", "p x.item()", "all p x.item()", "rank all", "ranks", "n", "c"]
    talk = cell.talk(source, answers)
    both, one = "ranks 0 to 3 (Pdb) ", "rank {} (Pdb) "
    assert talk.prompts == [both, both, *[one.format(3)] * 2, *[one.format(0)] * 3, both, both, both]
    assert {f"rank {r}: {r}" for r in range(4)} <= set(lines(talk))
    assert {f"rank {r}: {10.0 * r}" for r in range(4)} <= set(lines(talk))
    assert "stopped: ranks 0 to 3 at line 4" in talk.shown
    assert talk.result == "60.0"


def test_ranks_at_different_lines_have_prompts_of_their_own(cell: Notebook) -> None:
    source = """
    %%ddp -n 3
    if rank == 0:
        breakpoint()
    else:
        breakpoint()
    dist.barrier()
    """
    talk = cell.talk(source, ["ranks", "rank 2", "p rank", "rank all", "c", "c"])
    assert "stopped: rank 0 at line 4" in talk.shown
    assert "stopped: ranks 1 and 2 at line 6" in talk.shown
    assert talk.prompts[0] == "rank 0 (Pdb) "
    assert talk.prompts[-1] == "ranks 1 and 2 (Pdb) "


def test_a_rank_that_has_not_stopped_is_said_to_be_elsewhere(cell: Notebook) -> None:
    source = """
    %%ddp -n 2
    if rank == 1:
        time.sleep(0.3)
        breakpoint()
    dist.all_reduce(torch.ones(1))
    """
    talk = cell.talk(source, ["rank 0", "ranks", "c"])
    assert "rank 0 has not stopped" in talk.shown
    assert "rank 0 waits in all_reduce" in talk.shown


def test_a_step_into_a_collective_of_ranks_that_are_stopped_does_not_block_the_prompt(cell: Notebook) -> None:
    source = """
    %%ddp -n 2
    breakpoint()
    dist.all_reduce(torch.ones(1))
    rank
    """
    talk = cell.talk(source, ["rank 0", "n", "n", "p rank", "p 1", "p 2", "c", "c"])
    assert talk.prompts[2:4] == ["rank 0 (Pdb) ", "rank 1 (Pdb) "]
    assert talk.result == "0"
    assert max(talk.waits[4:6]) < 0.3  # the rank in the collective is waited for once, 0.5 s, and not at every prompt


def test_timeouts_stand_still_at_the_prompt(cell: Notebook) -> None:
    source = """
    def f():
        if nbddp.rank() == 1:
            breakpoint()
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()
    nbddp.run(f, nprocs=2, pg_timeout=1, timeout=4, stall_after=1).value
    """
    talk = cell.talk(source, ["p 1", lambda: time.sleep(6) or cell._client.input("c")])
    assert (talk.ename, talk.result) == ("", "2.0")
    assert "Nothing has been logged" not in talk.shown


# ---------------------------------------------------------------------------- how it ends


LOOP = "%%ddp -n 2\nimport os\nbreakpoint()\ndist.barrier()\ntime.sleep(60)"


def test_q_ends_the_run_as_stop_does(cell: Notebook) -> None:
    began = time.monotonic()
    talk = cell.talk(LOOP, ["q"])
    assert talk.ename == "KeyboardInterrupt"
    assert "was stopped" in talk.evalue
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("line", ["all q", "p 1;;q"])
def test_q_ends_the_run_in_a_longer_line_too(cell: Notebook, line: str) -> None:
    talk = cell.talk(LOOP, [line])
    assert talk.ename == "KeyboardInterrupt"
    assert "was stopped" in talk.evalue


def test_q_ends_at_once_a_rank_that_has_stepped_into_a_collective(cell: Notebook) -> None:
    talk = cell.talk("%%ddp -n 2\nbreakpoint()\ndist.barrier()\nrank", ["rank 0", "n", "n", "q"])
    ended_at = time.monotonic()
    assert talk.prompts[-1] == "rank 1 (Pdb) "
    assert talk.ename == "KeyboardInterrupt"
    assert ended_at - talk.answered_at < SOON_S


@pytest.mark.parametrize("line", ["p time.sleep(60)", "n", "interact"])
def test_an_interrupt_while_a_command_runs_ends_the_run(cell: Notebook, tmp_path: Path, line: str) -> None:
    source = f"""
    def f():
        try:
            breakpoint()
            time.sleep(60)
        finally:
            open("{tmp_path}/finally", "w").close()
    nbddp.run(f, nprocs=1)
    """
    began = time.monotonic()
    before = {"p time.sleep(60)": [], "n": ["n"], "interact": ["interact"]}[line]
    slow = "n" if line == "n" else "time.sleep(60)" if line == "interact" else line
    talk = cell.talk(source, [*before, answer_and_interrupt(cell, slow)])
    assert talk.ename == "KeyboardInterrupt"
    assert time.monotonic() - began < 0.5 + SOON_S
    assert os.listdir(tmp_path) == ["finally"]


def test_an_interrupt_at_the_prompt_ends_the_run(cell: Notebook) -> None:
    talk = cell.talk(LOOP, ["p 1", cell.interrupt])
    assert talk.ename == "KeyboardInterrupt"
    assert cell.talk("nbddp.last_run().state", []).result == "'stopped'"


def test_stop_at_the_prompt_ends_the_wait_for_a_line(cell: Notebook) -> None:
    source = """
    import threading
    threading.Timer(0.7, lambda: nbddp.last_run()._viewable.stop()).start()
    nbddp.run(lambda: breakpoint(), nprocs=2)
    """
    talk = cell.talk(source, [lambda: None])
    assert talk.ename == "KeyboardInterrupt"
    assert "was stopped" in talk.evalue


def test_users_finally_runs_when_the_run_is_ended_at_the_prompt(cell: Notebook, tmp_path: Path) -> None:
    source = f"""
    def f():
        try:
            breakpoint()
        except Exception:
            open("{tmp_path}/caught", "w").close()
        finally:
            open("{tmp_path}/finally", "w").close()
    nbddp.run(f, nprocs=1)
    """
    assert cell.talk(source, ["q"]).ename == "KeyboardInterrupt"
    assert os.listdir(tmp_path) == ["finally"]


def test_a_rank_that_dies_at_the_prompt_is_the_error_of_the_cell(cell: Notebook) -> None:
    def kill() -> None:
        os.kill(max(ranks_of(cell.pid)), signal.SIGKILL)

    talk = cell.talk("%%ddp -n 2\nnbddp.breakpoint(rank=0)\ndist.barrier()", [kill])
    assert talk.ename == "RankDied"


def test_the_kernel_killed_at_the_prompt_leaves_nothing() -> None:
    with Notebook() as notebook:
        notebook.ok("%load_ext nbddp")
        notebook.begin(LOOP)
        assert "Pdb" in notebook._client.get_stdin_msg(timeout=30)["content"]["prompt"]
        ranks = ranks_of(notebook.pid)
        assert len(ranks) == 2
        notebook.kill()
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ranks), 5, "the ranks' end")


def test_where_nobody_can_answer_the_run_goes_on_and_says_so_once(cell: Notebook) -> None:
    source = "%%ddp -n 2 --background\nfor i in range(3):\n    breakpoint()\nprint('through')"
    cell.talk(source, [])
    talk = cell.talk("nbddp.last_run().wait(); print(nbddp.last_run().logs())", [])
    assert talk.shown.count("breakpoint skipped: nobody can answer here") == 1
    assert talk.shown.count("through") == 2


def test_a_skipped_breakpoint_leaves_the_panel_of_a_background_run_idle(cell: Notebook) -> None:
    source = """
    def f():
        breakpoint()
        nbddp.log(loss=1.0)
        time.sleep(2.5)
    run = nbddp.run(f, nprocs=1, wait=False, show=True)
    """
    cell.talk(source, [])
    time.sleep(1)
    kernel = psutil.Process(cell.pid)
    before = sum(kernel.cpu_times()[:2])
    time.sleep(1)
    assert sum(kernel.cpu_times()[:2]) - before < 0.15  # 0.3 to 1 if its thread does not wait
    cell.talk("run.wait()", [])


def test_without_stdin_the_run_goes_on() -> None:
    def f() -> int:
        breakpoint()
        return nbddp.rank()

    run = nbddp.run(f, nprocs=2, pdb=True)
    assert run.values == [0, 1]
    assert run.logs().count("breakpoint skipped") == 1


def test_without_stdin_an_error_is_raised_as_ever() -> None:
    with pytest.raises(nbddp.RankError, match="ZeroDivisionError"):
        nbddp.run(lambda: 1 / 0, nprocs=2, pdb=True)
    run = nbddp.last_run()
    assert run is not None
    assert run.logs().count("debugger skipped: nobody can answer here") == 1


# ---------------------------------------------------------------------------- after an error


def test_pdb_opens_where_a_rank_failed_while_its_peers_wait(cell: Notebook) -> None:
    source = """
    def f(x):
        scale = 3
        if nbddp.rank() == 1:
            return torch.nn.functional.linear(torch.ones(2, x), torch.ones(3, 5)) * scale
        dist.all_reduce(torch.ones(1))
    nbddp.run(f, (4,), nprocs=3, pdb=True)
    """
    talk = cell.talk(source, ["p x, scale", "w", "q"])
    assert talk.prompts == ["rank 1 (Pdb) "] * 3
    assert "(4, 3)" in talk.shown
    assert re.search("RuntimeError: (mm: )?mat1 and mat2", talk.shown)  # mm: torch 2.15
    assert talk.ename == "RankError"
    assert "rank 1 of 3" in talk.evalue


def test_an_error_in_the_standard_library_opens_the_debugger_where_the_user_called_it(cell: Notebook) -> None:
    source = "import json\ndef f(text):\n    return json.loads(text)\nnbddp.run(f, ('{',), nprocs=1, pdb=True)"
    talk = cell.talk(source, ["p text * 3", "down", "q"])
    assert "'{{{'" in lines(talk)
    assert "json/__init__.py" in talk.shown
    assert talk.ename == "RankError"


def test_an_error_with_a_long_text_opens_the_debugger(cell: Notebook) -> None:
    talk = cell.talk("%%ddp -n 1 --pdb\nraise ValueError('x' * 2_000_000)", ["ranks", "q"])
    assert talk.ename == "RankError"
    assert "rank 0 of 1 failed: ValueError: xxx" in talk.evalue


def test_all_ranks_that_fail_alike_are_one_prompt(cell: Notebook) -> None:
    talk = cell.talk("%%ddp -n 3 --pdb\nw = rank\nraise ValueError('boom')", ["p w", "c"])
    assert talk.prompts == ["ranks 0 to 2 (Pdb) "] * 2
    assert {f"rank {r}: {r}" for r in range(3)} <= set(lines(talk))
    assert talk.ename == "RankError"


def test_a_rank_that_was_killed_opens_no_debugger_in_its_peers(cell: Notebook) -> None:
    source = "%%ddp -n 2 --pdb\nimport os\nif rank == 1:\n    os.kill(os.getpid(), 9)\ndist.all_reduce(torch.ones(1))"
    talk = cell.talk(source, [])
    assert talk.ename == "RankDied"


def test_pdb_on_opens_the_debugger_of_the_rank_and_not_also_ipythons(cell: Notebook) -> None:
    cell.ok("%pdb on")
    talk = cell.talk("nbddp.run(lambda a: 1 / a, (0,), nprocs=1)", ["p a", "q"])
    assert talk.prompts == ["rank 0 (Pdb) "] * 2
    assert talk.ename == "RankError"
    assert cell.talk("get_ipython().call_pdb", []).result == "True"
    cell.ok("%pdb off")


def test_debug_after_an_error_says_what_to_do_instead(cell: Notebook) -> None:
    cell.cell("nbddp.run(lambda a: 1 / a, (0,), nprocs=1)")
    talk = cell.talk("%debug", [])
    assert "--pdb" in talk.shown
    assert "error.locals" in talk.shown
    cell.cell("1 / 0")
    talk = cell.talk("%debug", ["q"])
    assert talk.prompts == ["ipdb> "]


# ---------------------------------------------------------------------------- running ranks, sessions


def test_a_running_rank_of_a_background_run_is_stopped_and_goes_on(cell: Notebook) -> None:
    cell.talk("%%ddp -n 2 --background\nfor i in range(60):\n    time.sleep(0.02)\n    dist.barrier()\ni", [])
    time.sleep(0.3)
    talk = cell.talk("%ddp debug 1", ["p rank, i < 60", "n", "n", "p 'stepped'", "c"])
    assert talk.prompts == ["rank 1 (Pdb) "] * 5
    assert "(1, True)" in talk.shown
    talk = cell.talk("%ddp debug", ["p rank", cell.interrupt])
    assert talk.ename == "KeyboardInterrupt"
    assert cell.talk("nbddp.last_run().wait().value", []).result == "59"


def test_a_rank_that_has_not_called_its_function_yet_stops_in_it(cell: Notebook) -> None:
    source = """
    def f():
        for _ in range(50):
            time.sleep(0.02)
        return 3
    run = nbddp.run(f, nprocs=1, wait=False)
    run.debug()
    """
    assert cell.talk(source, ["w", "n", "c"]).prompts == ["rank 0 (Pdb) "] * 3
    assert cell.talk("run.wait().value", []).result == "3"


class FakeRank(RankBase):
    """A rank that keeps what is sent to its debugger."""

    called = False

    def __init__(self, rank: int) -> None:
        super().__init__(rank, None, None)  # type: ignore[arg-type]
        self.sent: list[object] = []

    def answer(self, line: str | None) -> None:
        self.sent.append(line)

    def tell_debugger(self, message: object) -> None:
        self.sent.append(message)


def test_a_rank_that_calls_its_function_later_holds_its_timeouts_too() -> None:
    dialog, ranks = Dialog(lambda: None), [FakeRank(0), FakeRank(1)]
    dialog.attended = True
    ranks[0].called = True
    ranks[0].said.append(wire.Asks("", "(Pdb) ", "a.py", 1, "f"))
    dialog.exchange(ranks, lambda rank, line: None)
    assert (list(dialog.stops()), ranks[1].sent) == ([0], [])
    ranks[1].called = True
    dialog.exchange(ranks, lambda rank, line: None)
    dialog.exchange(ranks, lambda rank, line: None)
    assert ranks[1].sent == [wire.HoldTimeouts()]


def test_a_restarted_run_begins_with_nothing_of_the_last_attempts_debugger() -> None:
    dialog, ranks = Dialog(lambda: None), [FakeRank(0), FakeRank(1)]
    dialog.attended = True
    for attempt in ranks, [FakeRank(0), FakeRank(1)]:
        for rank in attempt:
            rank.called = True
        attempt[0].said.append(wire.Asks("", "(Pdb) ", "a.py", 1, "f"))
        dialog.exchange(attempt, lambda rank, line: None)
        assert (list(dialog.stops()), attempt[0].sent, attempt[1].sent) == ([0], [], [wire.HoldTimeouts()])
        dialog.answer([0], "n", lambda: None)
        dialog.close()


def test_in_a_collective_the_frame_that_called_it_is_shown(cell: Notebook) -> None:
    source = "if rank == 0:\n    time.sleep(1.5)\ndist.barrier()\nx = 1\ntime.sleep(0.3)"
    cell.talk(f"%%ddp -n 2 --background\n{source}", [])
    time.sleep(0.3)
    talk = cell.talk("%ddp debug 1", ["p rank", "c"])
    assert "rank 1 stops at its next line of Python" in talk.shown
    assert "rank 1 waits in barrier (line 4)" in talk.shown
    cell.talk("nbddp.last_run().wait()", [])


def test_nothing_to_debug_is_said(cell: Notebook) -> None:
    assert "nothing is running" in cell.talk("%ddp debug", []).shown


def test_a_session_lives_on_after_its_debugger(shared: Notebook) -> None:
    shared.ok("%ddp open -n 3 --device cpu")
    try:
        shared.ok("%%ddp\nx = torch.ones(1) * rank")
        talk = shared.talk(
            "%%ddp --pdb\ny = rank\nif rank == 2:\n    raise ValueError('s')\ndist.all_reduce(x)", ["p y", "q"]
        )
        assert talk.prompts == ["rank 2 (Pdb) "] * 2
        assert talk.ename == "RankError"
        assert shared.talk("%%ddp\nbreakpoint()\ndist.all_reduce(x)", ["q"]).ename == "KeyboardInterrupt"
        talk = shared.talk("%%ddp\ny = torch.ones(1)\nbreakpoint()\ndist.all_reduce(y)\ny.item()", ["n", "c"])
        assert talk.prompts == ["ranks 0 to 2 (Pdb) "] * 2
        assert talk.result == "3.0"
        assert "-> dist.all_reduce(y)" in talk.shown
    finally:
        shared.ok("%ddp close")


def test_after_a_debugged_call_a_sessions_collectives_have_their_own_timeout_again(shared: Notebook) -> None:
    shared.ok("session = nbddp.session(nprocs=2, device='cpu', pg_timeout=2)")
    try:
        wait = "lambda: [time.sleep(4 * (nbddp.rank() == 1)), dist.barrier()]"
        talk = shared.talk(f"session.run(lambda: [breakpoint(), ({wait})()], timeout=20)", ["c"])
        assert talk.ename == ""
        talk = shared.talk(f"session.run({wait}, timeout=20)", [])
        assert talk.ename == "RankError"
        assert "imed out" in talk.evalue
    finally:
        shared.ok("session.close()")


def test_the_panels_table_says_where_a_rank_has_stopped(cell: Notebook) -> None:
    source = """
    seen = []
    def look():
        status = nbddp.last_run()._viewable.status()
        seen.extend(rank.debugger for rank in status.ranks)
    import threading
    threading.Timer(0.8, look).start()
    def train():
        nbddp.breakpoint(rank=1)
        dist.barrier()
    nbddp.run(train, nprocs=2)
    """
    cell.talk(source, [lambda: (time.sleep(1.2), cell._client.input("c"))])
    assert cell.talk("seen", []).result == "['', 'train, line 8']"
