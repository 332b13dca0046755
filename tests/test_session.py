"""Sessions: from ``%ddp open`` to ``%ddp close`` every cell runs on the ranks, as in one kernel."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

import nbddp
from tests import support
from tests.support import OUR_FILES, Notebook, out, ranks_of, tab, wait_until, wait_until_alone

SESSION = "get_ipython().magics_manager.registry['DdpMagics'].session"
Capsys = pytest.CaptureFixture[str]
BEGIN = """
import os, time, torch, torch.distributed as dist, nbddp
rank = nbddp.rank()
t = torch.ones(2)
"""


@pytest.fixture(scope="module")
def _kernel(_notebook: Notebook) -> Iterator[Notebook]:
    _notebook.ok("%load_ext nbddp\nimport nbddp\nlr = 3\nclass Net: pass\n%ddp open -n 3 --device cpu")
    _notebook.ok(BEGIN)
    yield _notebook
    _notebook.cell("%ddp close")  # unless the last test has closed it


@pytest.fixture
def ranks(_kernel: Notebook) -> Iterator[Notebook]:
    """A notebook whose cells run on three ranks; after each test they must be able to meet."""
    yield _kernel
    assert _kernel.ok("t = torch.ones(2); dist.all_reduce(t); t").shown == "tensor([3., 3.])\n"


def test_names_stay_and_a_cells_value_is_rank_0s_then_what_others_return_or_print_differently(ranks: Notebook) -> None:
    ranks.ok("x = rank * 10 + 1")
    assert ranks.ok("x").shown.splitlines()[0] == "1"
    assert ranks.ok("_ + 1, x").shown.splitlines()[0] == "(2, 1)"
    shown = ranks.ok("print('hello', rank)\nrank").shown
    assert shown.startswith("hello 0\n0\n")
    assert all(f"hello {other}" in shown for other in (1, 2))
    assert ranks.ok("%ddp logs 1").shown.endswith("hello 1\n")
    assert ranks.ok("print('all alike')").shown == "all alike\n"
    shown = ranks.ok("for i in range(12): print(i * (rank + 1))").shown
    assert shown.splitlines()[12:] == [*(f"[rank 1] {2 * i}" for i in range(10)), "[14 more; see %ddp logs]"]


def test_names_from_before_are_sent_by_push_and_come_back_by_pull(ranks: Notebook) -> None:
    reply = ranks.cell("lr")
    assert (reply.status, reply.ename) == ("error", "NameError")
    assert "%ddp push lr" in reply.traceback
    ranks.ok("%ddp push lr Net")
    assert ranks.ok("type(Net()).__name__, lr").shown == "('Net', 3)\n"
    ranks.ok("net, lr = Net(), lr * 2")
    ranks.ok("%ddp pull net lr")
    assert ranks.ok("%%local\nlr, type(net) is Net").shown == "(6, True)\n"
    assert ranks.cell("%ddp pull nope").evalue == "rank 0 has no variable nope"
    assert "did you mean open?" not in ranks.cell("%ddp push opeen").shown  # open(), IPython's own name


def test_option_o_brings_names_back_and_says_which_cannot_be_sent_or_are_mistyped(ranks: Notebook) -> None:
    ranks.ok("%%ddp -o a,b --ranks 1\na = rank\nb = [a, a]")
    assert ranks.ok("%%local\na, b").shown == "(1, [1, 1])\n"
    reply = ranks.cell("%%ddp -o acuracy\naccuracy = 1")
    assert reply.shown == "UsageError: -o acuracy: the cell doesn't define it; did you mean accuracy?\n"
    assert ranks.cell("%%ddp --ranks 0,5\n1").evalue == "there is no rank 5 (nprocs=3)"
    reply = ranks.cell("%%ddp -o lock,loss --as failing\nimport threading\nlock, loss = threading.Lock(), 1.5\nloss")
    assert (reply.ename, "lock" in reply.evalue) == ("PayloadError", True)
    assert ranks.ok("%%local\nprint(failing.value, loss)").shown == "1.5 1.5\n"


def test_magics_shell_commands_help_and_await_work_on_the_ranks(ranks: Notebook, tmp_path: Path) -> None:
    assert "from the shell\n" in ranks.ok("!echo from the shell").shown
    assert ranks.ok("out = !echo captured\nout").shown == "['captured']\n"
    assert "Wall time" in ranks.ok("%time sum(range(10))").shown
    assert ranks.ok("import asyncio\nasync def g(): return 7\nawait asyncio.sleep(0.01)\nawait g()").shown == "7\n"
    assert "number of items" in ranks.ok("len?").payload[0]["data"]["text/plain"]
    assert ranks.cell("x = = 1").ename == "SyntaxError"
    (tmp_path / "program.py").write_text("x = 1\n")
    assert "x = 1" in ranks.ok(f"%load {tmp_path}/program.py").payload[0]["text"]


def test_displays_figures_handles_and_widgets_are_rank_0s(ranks: Notebook) -> None:
    shown = ranks.ok("""
        from IPython.display import HTML, display
        display(HTML(f"<b>{rank}</b>"))
        display("a", display_id=True).update("b")
    """)
    assert [data["text/html"] for data in shown.data if "text/html" in data] == ["<b>0</b>"]
    assert [data["text/plain"] for data in shown.data[1:]] == ["'a'", "'b'"]
    shown = ranks.ok("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
    assert ["image/png" in data for data in shown.data].count(True) == 1
    shown = ranks.ok("import ipywidgets\ndisplay(ipywidgets.IntSlider(value=3))")
    assert "application/vnd.jupyter.widget-view+json" in shown.data[0]


def test_libraries_show_on_a_rank_what_they_show_in_a_kernel(ranks: Notebook) -> None:
    source = "import pandas, tqdm.auto as t\npandas.options.display.max_columns, t.tqdm, type(get_ipython()).__name__"
    assert ranks.ok(source).shown == ranks.ok(f"%%local\n{source}").shown


def test_a_widgets_callback_runs_on_its_rank_between_cells_and_an_output_is_cleared(ranks: Notebook) -> None:
    shown = ranks.ok("""
        clicked = []
        button = ipywidgets.Button()
        button.on_click(lambda _: clicked.append(rank) or 1 / 0)
        button
    """)
    said = {"method": "custom", "content": {"event": "click"}}
    view: Any = shown.data[0]["application/vnd.jupyter.widget-view+json"]
    client, answer = ranks._client, support.Reply()
    client.shell_channel.send(click := client.session.msg("comm_msg", {"comm_id": view["model_id"], "data": said}))
    while not answer.over:
        ranks._read(answer, click["header"]["msg_id"], 20)
    assert answer.ename == "ZeroDivisionError"
    assert ranks.ok("nbddp.all_gather(clicked)").shown == "[[0], [], []]\n"
    source = "from IPython.display import clear_output\nprint('before')\nclear_output()\nprint('after')"
    assert ranks.ok(source).shown == "after\n"


def test_an_output_widget_takes_what_the_page_gets_for_a_click_or_a_cell(ranks: Notebook) -> None:
    shown = ranks.ok("""
        import ipywidgets
        taking, button = ipywidgets.Output(), ipywidgets.Button()
        button.on_click(taking.capture()(print))
        button
    """)
    view: Any = shown.data[0]["application/vnd.jupyter.widget-view+json"]
    client, said = ranks._client, {"method": "custom", "content": {"event": "click"}}
    client.shell_channel.send(click := client.session.msg("comm_msg", {"comm_id": view["model_id"], "data": said}))
    cell, taken = ranks.begin("with taking: print('taken')"), []
    while len(taken) < 4:
        state = client.get_iopub_msg(timeout=20)["content"].get("data", {}).get("state", {})
        taken += [state["msg_id"]] if "msg_id" in state else []
    assert taken == [click["header"]["msg_id"], "", cell, ""]
    ranks.end_of(cell)
    ranks.ok("import comm\ncomm.create_comm(target_name='own').send({'state': 'ready'})")
    displaying = "num_workers=1, collate_fn=lambda batch: display(batch) or batch"  # as tqdm.auto in a dataset does
    assert ranks.ok(f"list(torch.utils.data.DataLoader([4], {displaying}))").shown.startswith("[[4]]\n")


def test_input_asks_once_in_the_notebook_for_all_ranks(ranks: Notebook) -> None:
    talk = ranks.talk("name = input('name? ')\nnbddp.all_gather(name)", ["Ada"])
    assert (talk.prompts, talk.result) == (["name? "], "['Ada', 'Ada', 'Ada']")
    talk = ranks.talk("nbddp.all_gather(input(f'{rank % 2}? '))", ["even", "odd"])
    assert talk.prompts == ["[ranks 0 and 2] 0? ", "[rank 1] 1? "]
    assert talk.result == "['even', 'odd', 'even']"
    talk = ranks.talk("import getpass\nnbddp.all_gather(getpass.getpass('key? '))", ["secret"])
    assert (talk.prompts, talk.result) == (["key? (hidden) "], "['secret', 'secret', 'secret']")


def test_an_error_that_a_cell_shows_and_survives_is_shown_and_the_cell_can_be_interrupted(ranks: Notebook) -> None:
    reply = ranks.ok("get_ipython().run_cell('1 / 0')\nprint('goes on')")
    assert (reply.ename, reply.shown) == ("ZeroDivisionError", "goes on\n")
    source = "get_ipython().run_cell('1 / 0')\nprint('begun', flush=True)\ntime.sleep(60)"
    assert ranks.interrupted(source).ename == "KeyboardInterrupt"
    reply = ranks.interrupted("%%ddp --ranks 0\nprint('begun', flush=True)\ntime.sleep(60)")
    assert "Where the ranks were: rank 0 is" in reply.traceback
    assert "; ranks 1 and 2 are not part of this call" in reply.traceback


def test_cells_have_the_notebooks_numbers(ranks: Notebook) -> None:
    ranks.ok("%%local\nNone")
    number = int(out(ranks.ok("%%local\nlen(In) - 1")))
    assert ranks.ok("'mine'").shown == "'mine'\n"
    assert ranks.ok(f"Out[{number + 1}], In[{number + 1}], _{number + 1}").shown == """('mine', "'mine'", 'mine')\n"""


def test_tab_and_shift_tab_ask_rank_0_but_local_and_silent_cells_are_the_notebooks(ranks: Notebook) -> None:
    client = ranks._client
    ranks.ok("only_on_the_ranks = 1")
    assert "only_on_the_ranks" in tab(ranks, "only_on_")
    answer = support.answer_to(client, client.complete("x = only_on_", 12))
    assert (answer["cursor_start"], answer["cursor_end"]) == (4, 12)
    assert [*support.answer_to(client, client.inspect("only_on_the_ranks", 5))["data"]] == ["text/plain"]
    for name, how in ("silent", {"silent": True}), ("unstored", {"store_history": False}):
        support.answer_to(client, client.execute(f"{name} = 1", **how))
    assert ranks.ok("%%local\nsilent, unstored").shown == "(1, 1)\n"
    assert support.answer_to(client, client.inspect("%%local\nsilent", 12))["found"]


def test_a_failure_of_one_rank_ends_a_cell_with_its_lines_and_the_panel_shows_who_was_stopped(ranks: Notebook) -> None:
    ranks.ok("kept = [rank]\ng = dist.new_group()")
    reply = ranks.cell("if rank == 1:\n    raise ValueError('boom')\ndist.all_reduce(t)")
    assert "Re-create g: the failure ended its process group" in reply.traceback
    assert (reply.ename, reply.evalue) == ("ValueError", "boom")
    assert "raise ValueError('boom')" in reply.traceback
    assert "rank 1 of 3" in reply.traceback
    states = "%%local\nrun = nbddp.last_run()\nrun.state, [each.state for each in run._status().ranks]"
    assert ranks.ok(states).shown == "('failed', ['stopped', 'failed', 'stopped'])\n"
    assert ranks.ok("kept").shown.splitlines()[0] == "[0]"


def test_a_failure_of_all_ranks_names_them_and_shows_all_parts_of_an_exception_group(ranks: Notebook) -> None:
    reply = ranks.cell("1 / 0")
    assert reply.ename == "ZeroDivisionError"
    assert "ranks 0 to 2 of 3" in reply.traceback or "ranks 0, 1, and 2 of 3" in reply.traceback
    reply = ranks.cell("raise ExceptionGroup('several', [ValueError('inner'), KeyError('other')])")
    assert all(text in reply.traceback for text in ("several", "ValueError: inner", "KeyError: 'other'"))


ALONE = "time.sleep(60)", "while True: pass", "for _ in torch.utils.data.DataLoader(range(10**9), num_workers=1): pass"
MEET = [
    f"{call} if rank else time.sleep(60)" for call in ("dist.all_reduce(t)", "with torch.no_grad(): dist.barrier()")
]


@pytest.mark.parametrize("wait", [*ALONE, *MEET])
def test_an_interrupt_ends_the_cell_and_the_ranks_stay(ranks: Notebook, wait: str) -> None:
    before = ranks_of(ranks.pid)
    reply = ranks.interrupted(f"print('begun', flush=True)\n{wait}")
    assert (reply.ename, reply.seconds < 5) == ("KeyboardInterrupt", True)
    assert ranks.ok("torch.is_grad_enabled()").shown == "True\n"
    assert ranks_of(ranks.pid) == before


def test_a_failure_frees_the_others_and_the_next_call_works(ranks: Notebook) -> None:
    waits = (
        "dist.barrier()",
        "dist.recv(t, 0)",
        "nbddp.all_gather({'an': 'object'})",
        "work = dist.all_reduce(t, async_op=True)",  # they are done, and in another collective than rank 0
        *ALONE,
    )
    for wait in waits:
        reply = ranks.cell(f"if rank == 0:\n    time.sleep(0.1)\n    raise ValueError('the first')\n{wait}")
        assert (reply.evalue, reply.seconds < 5) == ("the first", True), wait
        assert ranks.ok("nbddp.all_reduce(1)").shown == "3\n"
    failed = ranks.cell(  # its iterator is half made when the workers of failed loops are ended
        "class Batches:\n    def __iter__(self): raise ValueError('no batches')\n"
        "list(torch.utils.data.DataLoader([1], batch_sampler=Batches(), num_workers=1))"
    )
    assert (failed.ename, failed.evalue) == ("ValueError", "no batches")
    collate = "num_workers=1, persistent_workers=True, collate_fn=lambda batch: 1 / batch[0]"
    ranks.ok(f"loader = torch.utils.data.DataLoader([0], {collate})")
    failed = [ranks.cell("%%ddp --ranks 0\nfor _ in loader: pass").ename for _ in range(2)]
    assert failed == ["ZeroDivisionError"] * 2  # its workers have survived the first
    ranks.ok("if rank == 0: loader._iterator._shutdown_workers()")


def test_failures_in_ddp_leave_the_training_as_if_they_had_never_been(ranks: Notebook) -> None:
    ranks.ok("""
        import itertools
        def build():
            torch.manual_seed(3)
            net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).double()
            model = nbddp.wrap(net)
            return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        def step(number, fails_in=""):
            optimizer.zero_grad()
            loss = model(torch.full((2, 8), float(rank + number)).double()).square().mean()
            if fails_in == "forward" and rank == number % 3: raise ValueError("boom")
            loss.backward()
            if fails_in == "backward" and rank == number % 3: raise ValueError("boom")
            optimizer.step()
    """)
    for failing in (False, True):
        ranks.ok("model, optimizer = build()")
        for number in range(5):
            if failing:
                assert ranks.cell(f"step({number}, 'forward')").evalue == "boom"
            ranks.ok(f"step({number})")
        ranks.ok(f"weights_{failing} = torch.cat([p.detach().flatten() for p in model.parameters()])")
    assert ranks.ok("torch.equal(*nbddp.all_gather(weights_True)[:2])").shown == "True\n"
    assert ranks.ok("torch.allclose(weights_True, weights_False, rtol=1e-12)").shown == "True\n"


def test_a_failure_names_what_to_recreate_and_a_hook_without_a_state_is_called_again(ranks: Notebook) -> None:
    ranks.ok("""
        called = []
        def hook(state, bucket):
            called.append(bucket.index())
            return hooks.allreduce_hook(state, bucket)
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
        hooked = nbddp.wrap(torch.nn.Linear(1, 1))
        hooked.register_comm_hook(None, hook)
        stateful = nbddp.wrap(torch.nn.Linear(1, 1))
        stateful.register_comm_hook(object(), hook)
        g, mesh = dist.new_group(), dist.init_device_mesh("cpu", (3,))
        own = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), process_group=g)
        def step(): hooked(torch.ones(1, 1)).sum().backward()
        step()
    """)
    reply = ranks.cell("hooked(torch.ones(1, 1))\nif rank == 1: raise ValueError\nstep()")
    assert "Re-create g, mesh, own, stateful: the failure ended their process groups" in reply.traceback
    ranks.ok("del g, mesh, own, stateful")
    assert ranks.ok("before = len(called)\nstep()\nnbddp.all_gather(len(called) - before)").shown == "[1, 1, 1]\n"


def test_an_interrupt_in_training_leaves_equal_models(ranks: Notebook) -> None:
    ranks.ok("""
        model = nbddp.wrap(torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())
        def step():
            optimizer.zero_grad()
            model(torch.ones(2, 4) * (rank + 1)).sum().backward()
            optimizer.step()
        for _ in range(3): step()
        done = 0
    """)
    reply = ranks.interrupted("print('begun', flush=True)\nwhile True: step(); done += 1")
    assert (reply.ename, OUR_FILES.search(reply.traceback)) == ("KeyboardInterrupt", None)
    weights = "torch.cat([p.detach().flatten() for p in model.parameters()])"
    assert ranks.ok(f"len({{str(w.tolist()) for w in nbddp.all_gather({weights})}})").shown == "1\n"
    ranks.ok("for _ in range(nbddp.all_reduce(done, 'max') + 5): step()")  # the stop was that cell's


def test_a_cell_that_catches_the_interrupt_and_ends_by_itself_leaves_a_group_that_works(ranks: Notebook) -> None:
    source = """
        print("begun", flush=True)
        try: dist.all_reduce(t) if rank else time.sleep(60)
        except BaseException as error:
            time.sleep(0.2)  # it saves the model
            kept = type(error).__name__
    """
    reply = ranks.interrupted(source)
    assert reply.ename == "KeyboardInterrupt"
    assert not OUR_FILES.search(reply.traceback)
    assert ranks.ok("kept").shown.splitlines()[0] == "'KeyboardInterrupt'"


def test_an_interrupt_of_a_slow_answer_leaves_the_answers_in_order(ranks: Notebook) -> None:
    ranks.ok("class Slow:\n    def __dir__(self): time.sleep(1.5); return ['speed']\nslow = Slow()")
    source = f"%%local\nprint('begun', flush=True)\n{SESSION}._complete('slow.', 5)"
    assert ranks.interrupted(source).ename == "KeyboardInterrupt"
    assert ranks.ok("rank").shown.splitlines()[0] == "0"


def test_functions_return_the_notebooks_classes_and_what_they_bind_stays_in_the_same_processes(ranks: Notebook) -> None:
    ranks.ok(f"%%local\nsession = {SESSION}")
    ranks.ok("""%%local
        import os, nbddp, time
        class First: pass
        class Second: pass
        def fails(): raise ValueError("boom")
        def bind(value):
            import __main__
            __main__.bound = value
            return os.getpid()
        def keeps():
            try: nbddp.barrier(), print("begun", flush=True), time.sleep(60)
            except KeyboardInterrupt: return 5
        def read():
            import __main__
            return __main__.bound, os.getpid()
    """)
    source = "[type(session.run(lambda: {0}()).value) is {0} for _ in range(2)]"
    assert ranks.ok("%%local\n" + source.format("First")).shown == "[True, True]\n"
    assert ranks.ok("%%local\n" + source.format("Second")).shown == "[True, True]\n"
    ranks.ok("%ddp push First Second")
    ranks.ok("both = [Second(), First()]")
    ranks.ok("%ddp pull both")
    assert ranks.ok("%%local\n[type(both[0]) is Second, type(both[1]) is First]").shown == "[True, True]\n"
    ranks.ok("%%local\npids = session.run(bind, ['here']).values")
    assert ranks.cell("%%local\nsession.run(fails)").ename == "RankError"
    assert ranks.ok("%%local\nsession.run(lambda: None).values").shown == "[None, None, None]\n"
    assert ranks.ok("%%local\nsession.run(read).values == [('here', pid) for pid in pids]").shown == "True\n"
    assert ranks.ok("bound").shown == "'here'\n"
    assert ranks.interrupted("%%local\nsession.run(keeps)").ename == "KeyboardInterrupt"
    assert ranks.ok("%%local\nnbddp.last_run().partial").shown == "[5, 5, 5]\n"


def test_each_call_has_its_own_curves_output_and_steps_and_a_pull_is_no_run(ranks: Notebook) -> None:
    shown = ranks.ok("for i in range(3): nbddp.log(loss=i)\nprint('loss', rank)")
    assert ["<img" in data["text/html"] for data in shown.data] == [True]
    ranks.ok("%%local\nfirst = nbddp.last_run()")
    ranks.ok("""\
        %%ddp --as second -o seen
        seen = [x for x in nbddp.loader(range(8), 2)]
        for _ in seen: nbddp.log(acc=1.0)
        print('acc', rank)
        rank * 10
    """)
    ranks.ok("%ddp pull seen")
    shown = ranks.ok("%%local\nfirst.state, first.history['loss'].values.tolist(), first.logs(1)").shown
    assert shown == "('finished', [0.0, 1.0, 2.0], 'loss 1\\n')\n"
    shown = ranks.ok("%%local\nsecond.history['acc'].steps.tolist(), second.logs(1), 'loss' in second.history").shown
    assert shown == "([0, 1], 'acc 1\\n', False)\n"
    assert ranks.ok("%%local\nsecond.values, nbddp.last_run() is second").shown == "([0, 10, 20], True)\n"


def test_a_pushed_function_leaves_each_rank_its_own_number(ranks: Notebook) -> None:
    ranks.ok("%%local\nrank = 7\ndef helper(): return rank\n%ddp push helper")
    assert ranks.ok("nbddp.all_gather((rank, helper()))").shown == "[(0, 0), (1, 1), (2, 2)]\n"
    ranks.ok("%%local\ndel rank, helper")


def test_a_cell_that_takes_a_while_or_fails_is_a_run(ranks: Notebook) -> None:
    ranks.ok("%%local\nbefore = nbddp.last_run()")
    ranks.ok("1")
    assert ranks.ok("%%local\nnbddp.last_run() is before").shown == "True\n"
    ranks.ok("time.sleep(0.6)")
    assert ranks.ok("%%local\nnbddp.last_run().state, nbddp.last_run() is before").shown == "('finished', False)\n"
    ranks.cell("1 / 0")
    assert ranks.ok("%%local\nstr(nbddp.last_run().error)").shown == "'division by zero'\n"


def test_ddp_and_other_lines_in_one_cell_are_refused(ranks: Notebook) -> None:
    assert "%ddp close must be in its own cell" in ranks.cell("x = 1\n%ddp close").traceback
    assert "'ddp_notebook' in this cell: write 'ddp'" in ranks.cell("Trainer(strategy='ddp_notebook')").evalue
    for option in ("--nprocs 2", "--background"):
        assert f"leave out {option}" in ranks.cell(f"%%ddp {option}\n1").shown


def test_cells_of_px_and_distributed_run_with_their_first_line_changed(ranks: Notebook) -> None:
    """``%%px`` and ``%%distributed`` become ``%%ddp``, ``--targets 1`` and ``%%rank [1]`` its ``--ranks 1``."""
    assert ranks.ok("%%ddp\na = 5\nb = 10\na + b").shown == "15\n"
    assert ranks.ok("%%ddp --ranks 1\na = 7\nrank").shown == "1\n"
    assert ranks.ok("%%ddp\na").shown == "5\n[rank 1] 7\n"
    for some in ("0,1", "2"):
        ranks.ok(f"%%ddp --ranks {some}\nmodel = torch.nn.Linear(10, 10)")
    ranks.ok("%%ddp\nfor param in model.parameters():\n    dist.broadcast(param.data, src=0)")
    assert ranks.ok("%%ddp\nlen(set(nbddp.all_gather(model.weight.sum().item())))").shown == "1\n"


def test_a_push_that_tears_an_optimizer_from_its_model_or_fails_has_sent_nothing(ranks: Notebook) -> None:
    ranks.ok("%%local\nimport threading, torch\nm, lock = torch.nn.Linear(2, 2), threading.Lock()")
    ranks.ok("%%local\no = torch.optim.Adam(m.parameters())")
    assert "lock" in ranks.cell("%ddp push m o lock").evalue
    ranks.ok("%ddp push m")
    assert ranks.cell("%ddp push o").evalue == "o shares parameters with m: push m and o together"
    ranks.ok("%ddp push m o")
    assert ranks.cell("%ddp push o").evalue == "o shares parameters with m: push m and o together"


def test_opening_again_keeps_the_names_and_other_options_are_refused(ranks: Notebook) -> None:
    ranks.ok("kept = 5")
    ranks.ok("%ddp open -n 3 --device cpu")
    assert ranks.ok("kept").shown == "5\n"
    assert "%ddp close" in ranks.cell("%ddp open -n 2 --device cpu").shown
    ranks.ok("%%local\n%reload_ext nbddp")
    ranks.ok("%ddp open -n 3 --device cpu")
    assert ranks.ok("kept").shown == "5\n"


def test_a_rank_that_dies_ends_the_session_whose_names_can_be_pulled_from_the_others(notebook: Notebook) -> None:
    notebook.cell("%ddp close")
    notebook.ok("%load_ext nbddp\n%ddp open -n 3 --device cpu")
    notebook.ok("import nbddp, os\nx = nbddp.rank() + 7")
    before = ranks_of(notebook.pid)
    reply = notebook.cell("if nbddp.rank() == 0: os.kill(os.getpid(), 9)\nnbddp.barrier()")
    assert "rank 0 of 3 was killed by SIGKILL" in reply.traceback
    notebook.ok("%ddp pull x")
    assert notebook.ok("%%local\nx").shown == "8\n"
    pulled = notebook.cell(f"%%local\n{SESSION}.pull('x', rank=0)")
    assert pulled.evalue.startswith("rank 0 of 3 was killed by SIGKILL")
    notebook.ok("%ddp open -n 2 --device cpu")  # ends the others
    assert not set(before) & set(ranks_of(notebook.pid))
    notebook.ok("exit()")
    wait_until_alone(notebook.pid)
    assert notebook.ok("x").shown == "8\n"


def test_close_ends_the_ranks_and_a_fresh_cell_has_its_own(notebook: Notebook) -> None:
    notebook.cell("%ddp close")
    defaults = "%ddp -n 1 --device cpu --timeout 60 --seed 7"  # a session has no timeout
    notebook.ok(f"%load_ext nbddp\n{defaults}\nlr = 3\n%ddp open -n 2\n%ddp --reset")
    assert len(ranks_of(notebook.pid)) == 2
    assert notebook.ok("torch.initial_seed() - rank").shown == "7\n"
    notebook.ok("%ddp close")
    wait_until_alone(notebook.pid)
    assert notebook.ok("%%ddp -n 2 --device cpu\nlr * world_size").shown == "6\n"
    notebook.ok("%%ddp -n 2 --device cpu --as left\nimport threading\nexit()\nthreading.Lock()")
    assert "<unlocked _thread.lock" in notebook.ok("left.value").result
    assert "unknown command %ddp opne; did you mean open?" in notebook.cell("%ddp opne").shown
    assert "%ddp logs takes one rank, or nothing" in notebook.cell("%ddp logs all").shown


def test_a_third_interrupt_gives_the_session_up(notebook: Notebook) -> None:
    notebook.ok("""
        import nbddp, time
        session = nbddp.Session(nprocs=2, device="cpu")
        def deaf():
            print("begun", flush=True)
            end = time.monotonic() + 60
            while time.monotonic() < end:
                try: time.sleep(60)
                except KeyboardInterrupt: pass
    """)
    running = notebook.begin("session.run(deaf)")
    notebook.shown_so_far(running, "begun")
    for _ in range(2):
        notebook.interrupt()
        time.sleep(0.2)
    assert len(ranks_of(notebook.pid)) == 2
    notebook.interrupt()
    reply = notebook.end_of(running)
    assert (reply.ename, reply.seconds < 5) == ("KeyboardInterrupt", True)
    assert notebook.ok("session.lost, nbddp.last_run().state").shown == "('the session is closed', 'stopped')\n"
    wait_until_alone(notebook.pid)


def test_an_interrupt_while_a_session_opens_ends_ranks_that_hang(notebook: Notebook) -> None:
    running = notebook.begin("import nbddp\nsession = nbddp.Session(nprocs=8, device='cpu')")
    os.kill(wait_until(lambda: ranks_of(notebook.pid))[0], signal.SIGSTOP)
    time.sleep(0.5)
    notebook.interrupt()
    reply = notebook.end_of(running)
    assert (reply.ename, reply.seconds < 5) == ("KeyboardInterrupt", True)
    wait_until_alone(notebook.pid)


def test_a_close_that_is_interrupted_has_closed_the_session(notebook: Notebook) -> None:
    notebook.ok("""
        import nbddp
        session = nbddp.Session(nprocs=2, device="cpu")
        session.cell("import threading, time\\nthreading.Thread(target=time.sleep, args=(60,)).start()")
    """)
    assert notebook.interrupted("print('begun', flush=True)\nsession.close()").ename == "KeyboardInterrupt"
    assert notebook.ok("session.close()\nsession").shown == "<Session: the session is closed, 2 ranks>\n"
    wait_until_alone(notebook.pid)


def test_ranks_not_put_right_run_nothing_and_lose_no_error(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    def fail() -> None:
        raise ValueError("the error")

    with nbddp.Session(nprocs=2, device="cpu", show=False) as session:
        with pytest.raises(ValueError, match="no rank 9"):
            session.pull("rank", rank=9)
        assert (session.cell("print(rank)\nrank"), capsys.readouterr().out) == (None, "")
        monkeypatch.setattr("nbddp.kernel.session.Mend", Mock(side_effect=nbddp.NbddpError("no answer")))
        for source in ("if rank: raise ValueError\nnbddp.barrier()", "the_next = 1"):
            with pytest.raises(nbddp.NbddpError) as caught:
                session.cell(source)
            shown = [str(caught.value), *getattr(caught.value, "shown", [])]
            assert "The ranks couldn't recover: NbddpError: no answer. Run %ddp close, then %ddp open" in shown
        monkeypatch.undo()
        session.cell("x = nbddp.all_reduce(1), 'the_next' in globals()")
        assert session.pull("x") == (2, False)
        session.cell("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()")
        monkeypatch.setattr(nbddp.Session, "_put_right", Mock(side_effect=KeyboardInterrupt))
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt), session:
            session.run(fail)
        assert time.monotonic() - began < 15  # it hasn't waited for the ranks' threads
        run = nbddp.last_run()
        assert (run.state, str(run.error.__cause__)) == ("failed", "the error")


def test_a_session_of_a_script_has_logs_takes_one_order_at_a_time_and_ends(capsys: Capsys) -> None:
    for name, value in {"timeout": 3, "max_restarts": 1, "stop_on_nan": True, "wait": False, "pdb": True}.items():
        with pytest.raises(nbddp.LaunchError, match=rf"^{name}= is an option of run\(\), not of a session$"):
            nbddp.Session(nprocs=2, device="cpu", **{name: value})
    with nbddp.Session(nprocs=2, device="cpu") as session:
        session.cell("from IPython.display import HTML, display\ndisplay(HTML('b'))\nprint('hello', rank)\nrank + 5")
        assert capsys.readouterr().out.endswith("hello 0\n5\n[rank 1] hello 1\n[rank 1] 6\n")
        assert session.logs(1).endswith("hello 1\n")
        assert "[rank 0] hello 0\n" in session.logs()
        session.cell("get_ipython().run_cell('1 / 0')")
        assert "ZeroDivisionError" in support.without_colours(capsys.readouterr().out)
        waits = threading.Thread(target=session.cell, args=("import time; time.sleep(1.5)",))
        waits.start()
        wait_until(lambda: session._busy)
        for use in (lambda: session.cell("1"), lambda: session.run(print), lambda: session.push(x=1)):
            with pytest.raises(nbddp.NbddpError, match=r"^the ranks are busy: wait until"):
                use()
        waits.join()
        session.cell("w = torch.nn.Linear(1, 1)\no = torch.optim.SGD(w.parameters())\nw(torch.ones(1)).backward()")
        note = "The ranks have taken 1 to 2 optimizer steps, so their models differ"
        steps = "for _ in range(rank + 1): o.step()\ng = torch.distributed.new_group()\n1 / (1 - rank)"
        for source, is_noted in (steps, True), ("1 / 0", False):
            with pytest.raises(nbddp.CellError) as caught:
                session.cell(source)
            assert (note in caught.value.shown) == is_noted
        session.run(print)
        session.cell("exit()")
        assert repr(session) == "<Session: the session is closed, 2 ranks>"
        for use in (lambda: session.cell("1"), lambda: session.run(print), lambda: session.push(x=1)):
            with pytest.raises(nbddp.SessionLost, match=r"^the session is closed. Open a new session$"):
                use()
        with pytest.raises(nbddp.SessionLost, match=r"^the session is closed$"):
            session.pull("x")


def error_of(session: nbddp.Session, source: str) -> str:
    with pytest.raises(nbddp.CellError) as caught:
        session.cell(source)
    return "\n".join(caught.value.shown)


def test_a_failure_leaves_whole_steps_and_no_process_that_has_just_been_started() -> None:
    fails = "if rank: time.sleep(0.1); raise ValueError\n"
    with nbddp.Session(nprocs=2, device="cpu", show=False) as session:
        session.cell("""if True:
            import multiprocessing.popen_fork as fork, time
            class Slow(torch.optim.SGD):
                def step(self):
                    with torch.no_grad():
                        for p in self.param_groups[0]["params"]:
                            time.sleep(0.1)
                            p.fill_(3.0)
            def launch(*args, launch=fork.Popen._launch):
                launch(*args)  # returns in the parent
                time.sleep(0.3)
            net = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(2)])
            optimizer = Slow(net.parameters())
            fork.Popen._launch = launch
        """)
        shown = error_of(session, f"{fails}optimizer.step()\ntime.sleep(60)")
        assert "The ranks have taken 0 to 1 optimizer steps, so their models differ" in shown
        session.cell("same = [float(p) for p in net.parameters()]")
        assert session.pull("same") == [3.0] * 4
        error_of(session, f"{fails}list(torch.utils.data.DataLoader([1], num_workers=1))")
        session.cell("import psutil\ntime.sleep(0.3)\nleft = [each.status() for each in psutil.Process().children()]")
        assert set(session.pull("left")) <= {psutil.STATUS_ZOMBIE}
        session.cell("import nbddp.worker.steps\nnbddp.worker.steps._LONGEST_S = 0.1")  # steps may take longer
        assert "The ranks have taken 0 to 0.5 optimizer steps" in error_of(session, f"{fails}optimizer.step()")


def test_after_a_failure_models_are_trained_as_before_or_refused_by_name() -> None:
    fails = "if rank: raise ValueError\n"
    block = "with nbddp.accumulate(model, 3) as complete: pass\n"
    with nbddp.Session(nprocs=2, device="cpu", show=False) as session:
        session.cell("""if True:
            import time
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks
            def make(**options):
                net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
                net.register_buffer("sent", torch.zeros(1))
                return nbddp.wrap(net, **options)
            x = torch.full((2, 1), rank + 1.0)
            def step(model):
                model(x).sum().backward()
                all = nbddp.all_gather([p.grad.tolist() for p in model.parameters() if p.requires_grad])
                model.zero_grad()
                return all[0] == all[1]
            model, static, quiet = make(find_unused_parameters=True), make(static_graph=True), make()
            model.module[0].requires_grad_(False)
            quiet.requires_grad_(False)
            hook = static.module[0].weight.register_hook(lambda grad: 1 / 0)
        """)
        session.cell(f"{block}group = id(dist.group.WORLD)")
        error_of(session, "step(static)")  # elsewhere than the micro-batches, on all ranks alike: their group stays
        session.cell(f"{block * 2}all = complete, group == id(dist.group.WORLD), hook.remove(), step(static)")
        assert session.pull("all") == (True, True, None, True)
        session.cell("with model.no_sync(): model(x)")
        error_of(session, "1 / 0")
        session.cell("broadcasts = model.require_forward_param_sync")  # as in a kernel, after a cell with a typo
        assert not session.pull("broadcasts")
        error_of(session, f"{block}1 / 0")
        session.cell(block * 3)
        assert session.pull("complete")
        session.cell(block)
        session.cell(
            "def fail(*_): time.sleep(rank / 4); 1 / (1 - rank)\nhook = model.module.register_forward_hook(fail)"
        )
        error_of(session, f"{block}with model.no_sync(): model(x)")  # rank 0 comes to its end
        session.cell(f"hook.remove()\n{block * 3}all = nbddp.all_gather(complete), step(model)")
        assert session.pull("all") == ([True, True], True)
        session.cell("listed, kept = [make()], model.reducer")
        session.cell("listed[0].register_comm_hook(hooks.PowerSGDState(None), hooks.powerSGD_hook)")
        source = f"out = model(x), listed[0](x)\n{fails}with nbddp.join(model): sum(out).sum().backward()"
        shown = error_of(session, source)
        assert "Re-create the DDP model of Sequential: the failure ended its process group" in shown
        assert "create it again, and its optimizer" in error_of(session, "step(listed[0])")
        session.cell("model.module[0].requires_grad_(True)\nquiet.requires_grad_(True)")
        session.cell("listed[0] = nbddp.wrap(listed[0].module)")
        session.cell("all = step(model), step(static), step(quiet), step(listed[0])")
        assert session.pull("all") == (True,) * 4
