"""What a function shows and asks in a notebook: displays, figures, ``input()``, debuggers."""

import textwrap
from pathlib import Path

import pytest

from tests.support import Notebook, out

SHOWS = """
import nbddp, sys
from IPython.display import HTML, display
assert "matplotlib" not in sys.modules
display(HTML(f"<b>{nbddp.rank()}</b>"))
import matplotlib.pyplot as plt
for name in (None, "named"): plt.figure(name), plt.plot([1, 2])
plt.show()
print(plt.get_fignums())
"""


@pytest.mark.parametrize("call", ["nbddp.run(show, ", "nbddp.run_script('show.py', "])
def test_plt_show_shows_rank_0s_figures_and_closes_them(call: str, notebook: Notebook, in_folder: Path) -> None:
    Path("show.py").write_text(SHOWS)
    notebook.ok(f"import nbddp, os\nos.chdir({str(in_folder)!r})\ndef show():{textwrap.indent(SHOWS, '  ')}")
    reply = notebook.ok(f"run = {call}nprocs=2, device='cpu')\nprint(run.logs(1))\nos.chdir('/')")
    assert [data["text/html"] for data in reply.data if "text/html" in data] == ["<b>0</b>"]
    assert (["image/png" in data for data in reply.data], reply.shown.count("[]\n")) == ([False, True, True], 2)


def test_input_asks_rank_0_and_every_rank_gets_its_own_answer(notebook: Notebook) -> None:
    notebook.ok("import nbddp\ndef ask(): return input('name? ') if nbddp.rank() == 0 else 'nobody'")
    talk = notebook.talk("nbddp.run(ask, nprocs=2, device='cpu', show=False).values", ["Ada"])
    assert (talk.prompts, talk.result) == (["[rank 0] name? "], "['Ada', 'nobody']")


def test_a_run_waits_in_an_async_cell(notebook: Notebook) -> None:
    notebook.ok("import nbddp\ndef train(): return nbddp.rank()")
    reply = notebook.ok("r = nbddp.run(train, nprocs=2, device='cpu', wait=False)\n(await r).values, r.state")
    assert out(reply) == "([0, 1], 'finished')"


def test_another_thread_stops_the_run_of_a_cell(notebook: Notebook) -> None:
    notebook.ok("""
        import nbddp, threading, time
        def train():
            while True: time.sleep(0.01)
        def end():
            while "both ranks are in train" not in (run := nbddp.last_run()).stacks(): time.sleep(0.01)
            run.stop()
        threading.Thread(target=end).start()
    """)
    reply = notebook.cell("nbddp.run(train, nprocs=2, device='cpu', name='waits', show=False)")
    assert reply.ename == "KeyboardInterrupt"
    assert reply.evalue == "waits was stopped. Where the ranks were: both ranks are in train, line 3"


def test_a_prompt_ends_with_its_rank_although_another_rank_prints_a_lot(notebook: Notebook) -> None:
    notebook.ok("""
        import nbddp, os, threading, time
        def floods():
            if nbddp.rank() == 0:
                threading.Timer(2.0, os._exit, [3]).start()
                return input("name? ")
            while True:
                print("x" * 100, flush=True)
                time.sleep(0.001)
    """)
    talk = notebook.talk("nbddp.run(floods, nprocs=2, device='cpu')", [lambda: None])
    assert (talk.ename, "exit code 3" in talk.evalue) == ("RankDied", True)


def test_what_cannot_be_displayed_is_an_error_where_it_is_displayed(notebook: Notebook) -> None:
    shown = notebook.ok("""
        from IPython.display import display
        import sys, threading, types
        def shows():
            lock = threading.Lock()
            try: display({"text/plain": lock}, raw=True)
            except TypeError as error: return str(error)
        nbddp.run(shows, nprocs=1, device="cpu").value
    """).shown
    assert "cannot pickle '_thread.lock' object" in shown
    shown = notebook.ok("""
        def shows_of_its_own():
            module = sys.modules["only_here"] = types.ModuleType("only_here")
            exec("class Own: pass", module.__dict__)
            display({"text/plain": module.Own()}, raw=True)
            return 5
        nbddp.run(shows_of_its_own, nprocs=1, device="cpu").value
    """).shown
    assert "output of rank 0 can't be shown here: ModuleNotFoundError: No module named 'only_here'" in shown
    assert shown.endswith("5\n")
