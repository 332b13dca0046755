"""``%%ddp`` and ``%ddp`` in a real notebook: what a cell reads, keeps, returns, and says when it cannot run."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbddp.errors import LaunchError
from nbddp.magic import analysis
from tests.support import GONE_S, Notebook, out, tab, wait_until


@pytest.fixture
def magic(notebook: Notebook) -> Iterator[Notebook]:
    """The shared notebook with the extension, two CPU ranks by default."""
    notebook.ok("%load_ext nbddp\nimport nbddp, json\n%ddp --nprocs 2 --device cpu")
    yield notebook
    notebook.ok("%ddp --reset")


# ---------------------------------------------------------------------------- names and values


def test_the_cell_reads_the_notebooks_names_and_sets_none_of_them(magic: Notebook) -> None:
    magic.ok("scale = 10\nx = 'mine'\ndef scaled(v): return v * scale")
    reply = magic.cell("%%ddp\nx = scaled(rank + 1)\nextra = x\nnbddp.gather(x)")
    assert out(reply) == "[10, 20]"
    assert out(magic.ok("x, 'extra' in globals()")) == "('mine', False)"


def test_an_edited_variable_is_the_new_one_in_the_next_cell(magic: Notebook) -> None:
    for value in (1, 2):
        magic.ok(f"edited = {value}")
        assert out(magic.cell("%%ddp\nedited * 100")) == str(value * 100)


def test_rank_device_torch_and_dist_are_ready_in_the_cell(magic: Notebook) -> None:
    reply = magic.cell(
        "%%ddp -n 3\nt = torch.tensor([float(rank)], device=device)\ndist.all_reduce(t)\n"
        "(t.item(), rank, world_size, str(device), nbddp.world_size(), __name__)"
    )
    assert out(reply) == "(3.0, 0, 3, 'cpu', 3, '__main__')"


def test_the_notebooks_own_world_size_takes_precedence(magic: Notebook) -> None:
    magic.ok("world_size = 'as I said'")
    assert out(magic.cell("%%ddp\nworld_size")) == "'as I said'"
    magic.ok("del world_size")
    assert out(magic.cell("%%ddp\nworld_size")) == "2"


def test_functions_and_classes_of_the_cell_find_each_other_and_pickle(magic: Notebook) -> None:
    reply = magic.cell(
        """\
        %%ddp
        import pickle
        from dataclasses import dataclass
        from torch.utils.data import DataLoader, Dataset
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)
        @dataclass
        class Point:
            x: int
        class Tens(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return Point(i).x * 10
        batches = [b.tolist() for b in DataLoader(Tens(), batch_size=2, num_workers=1)]
        (even(10), pickle.loads(pickle.dumps(Point(3))), batches)"""
    )
    assert out(reply) == "(True, Point(x=3), [[0, 10], [20, 30]])"


def test_names_asked_for_with_o_come_from_rank_0(magic: Notebook) -> None:
    magic.ok("kept = [1]")
    magic.ok("%%ddp -o best,weights,kept\nbest = f'rank {rank}'\nweights = torch.ones(2) * rank\nkept.append(2)")
    assert out(magic.ok("best, weights.tolist(), kept")) == "('rank 0', [0.0, 0.0], [1, 2])"


def test_a_trained_model_comes_back_with_the_notebooks_class(magic: Notebook) -> None:
    magic.ok("import torch\nclass Net(torch.nn.Linear): pass\nbefore = Net(2, 1)")
    magic.ok(
        """\
        %%ddp -o model,first
        torch.manual_seed(rank)
        model = nbddp.wrap(Net(2, 1))
        first = model.module.weight.detach().clone()
        model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= p.grad"""
    )
    assert out(magic.ok("type(model) is Net, (first - model.weight).tolist()")) == "(True, [[1.0, 1.0]])"


def test_a_function_brought_back_uses_the_notebooks_globals(magic: Notebook) -> None:
    magic.ok("both_have = 'mine'\nt = 1")
    reply = magic.ok(
        "%%ddp -o f\nboth_have = 'the cell\\'s'\nthe_cell_makes = 'in the cell'\n"
        "def reads_t(): return t\ndef f(): return both_have, reads_t(), the_cell_makes"
    )
    words = "f reads both_have, whose value in the notebook differs from the rank's"
    assert f"\n[rank 0: {words}]\n" in reply.shown
    assert out(magic.ok("both_have, f()")) == "('mine', ('mine', 1, 'in the cell'))"
    magic.ok("t = 2")
    assert out(magic.ok("f()")) == "('mine', 2, 'in the cell')"
    magic.ok("del the_cell_makes, reads_t")


def test_names_brought_back_together_refer_to_each_other(magic: Notebook) -> None:
    magic.ok("rate = 0.1")
    reply = magic.ok("%%ddp -o f,rate,step\nrate = 0.5\ndef step(x): return x * rate\ndef f(): return step(2), f")
    assert "reads" not in reply.shown
    assert out(magic.ok("f()[0], f()[1] is f, rate")) == "(1.0, True, 0.5)"


def test_names_that_only_ranks_have_do_not_come_back(magic: Notebook) -> None:
    reply = magic.ok("%%ddp -o f\ndef f(): return rank, dist.is_available()")
    assert "[rank 0: f reads rank, which only a %%ddp cell has]" in reply.shown
    assert magic.cell("f()").ename == "NameError"
    assert out(magic.ok("'rank' in globals(), 'dist' in globals()")) == "(False, True)"
    assert out(magic.cell("%%ddp\nnbddp.gather(rank)")) == "[0, 1]"
    magic.ok("del dist")


def test_an_unpicklable_last_line_does_not_lose_the_outputs(magic: Notebook) -> None:
    reply = magic.cell("%%ddp -o loss\nloss = 0.25\n(i for i in range(3))")
    assert reply.status == "ok"
    assert "<generator object" in reply.shown
    assert "stayed on its rank" in reply.shown
    assert out(magic.ok("loss")) == "0.25"


def test_a_semicolon_hides_the_value(magic: Notebook) -> None:
    assert "12345" not in magic.ok("%%ddp\n12345;").shown
    assert "12345" in magic.ok("%%ddp\n12345").shown


def test_ranks_of_a_cell_do_not_import_ipython(magic: Notebook) -> None:
    reply = magic.cell(
        "%%ddp\nimport sys\nopen('/dev/null').close()\n[m for m in ('IPython', 'ipywidgets') if m in sys.modules]"
    )
    assert out(reply) == "[]"


# ---------------------------------------------------------------------------- what cannot run


def test_an_error_points_at_the_cells_lines(magic: Notebook) -> None:
    reply = magic.cell("\n%%ddp\n\ndef half(x):\n    return x / (rank * 0)\n\nhalf(1)  # here")
    assert (reply.status, reply.ename) == ("error", "RankError")
    assert "both ranks failed, rank " in reply.traceback
    assert "line 5, in half" in reply.traceback or "in half()\n" in reply.traceback  # IPython 7
    assert "7 half(1)  # here" in reply.traceback
    assert "ZeroDivisionError: division by zero" in reply.traceback
    assert "nbddp/" not in reply.traceback


def test_an_error_in_a_function_of_another_cell_shows_its_lines(magic: Notebook) -> None:
    magic.ok("def broken(x):\n    raise KeyError('no such digit')")
    reply = magic.cell("%%ddp\nbroken(1)")
    assert "raise KeyError('no such digit')" in reply.traceback
    assert "2 broken(1)" in reply.traceback


def test_a_syntax_error_points_at_its_line(magic: Notebook) -> None:
    reply = magic.cell("%%ddp\nx = 1\ny = (2,\n")
    assert reply.status == "error"
    assert "line 3" in reply.traceback
    assert "y = (2," in reply.traceback
    assert "SyntaxError: '(' was never closed" in reply.traceback
    assert "nbddp/" not in reply.traceback


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        ("x = 1\nawait thing()", 3, "asyncio.run"),
        ("async with lock:\n    pass", 2, "asyncio.run"),
        ("x = [i async for i in things]", 2, "asyncio.run"),
        ("x = 1\n\n%matplotlib inline", 4, "a magic"),
        ("files = !ls", 2, "subprocess.run"),
        ("if True:\n    !ls -l", 3, "subprocess.run"),
        ("nbddp.run?", 2, "a help request"),
        ("x = 1\ndisplay(x)", 3, "-o"),
        ("get_ipython().ex('1')", 2, "separate cell"),
    ],
)
def test_await_magics_and_shell_commands_are_refused_by_line(magic: Notebook, body: str, line: int, words: str) -> None:
    reply = magic.cell(f"%%ddp\n{body}")
    assert (reply.status, reply.ename) == ("error", "LaunchError")
    assert f"LaunchError: line {line}: " in reply.traceback
    assert words in reply.evalue
    assert "During handling" not in reply.traceback


def test_await_inside_an_async_function_is_allowed(magic: Notebook) -> None:
    reply = magic.cell(
        "%%ddp\nimport asyncio\nasync def two():\n    await asyncio.sleep(0)\n    return 2\nasyncio.run(two())"
    )
    assert out(reply) == "2"


def test_an_o_name_that_the_cell_never_sets_is_refused_before_it_runs(magic: Notebook) -> None:
    reply = magic.cell("%%ddp -o acuracy\nraise RuntimeError('it ran')\naccuracy = 1")
    assert reply.evalue == "-o acuracy: the cell never sets acuracy; did you mean accuracy?"
    reply = magic.cell("%%ddp -o maybe\nif rank == 1: maybe = 1")
    assert "rank 0 has no maybe" in reply.evalue


def test_an_unpicklable_variable_is_named(magic: Notebook) -> None:
    magic.ok("log_file = open('/dev/null')\ndef note(): log_file.write('x')")
    reply = magic.cell("%%ddp\nlog_file")
    assert reply.ename == "PayloadError"
    assert "to the ranks: log_file: an open file" in reply.evalue
    reply = magic.cell("%%ddp\nnote()")
    assert "note → log_file" in reply.evalue
    # One that the cell sets itself need not.
    assert out(magic.cell("%%ddp\nlog_file = 7\nlog_file")) == "7"


def test_an_unpicklable_variable_that_the_cell_may_set_itself_is_left_out(magic: Notebook) -> None:
    magic.ok("import contextlib\nlog_file = open('/dev/null')")
    reply = magic.cell("%%ddp\nwith contextlib.suppress(OSError):\n    log_file = 7\nlog_file")
    assert out(reply) == "7"
    reply = magic.cell("%%ddp\nwith contextlib.suppress(ValueError):\n    log_file = int('x')\nlog_file")
    assert "NameError: name 'log_file' is not defined" in reply.traceback


@pytest.mark.parametrize(
    "body",
    [
        "for best in []:\n    pass",
        "for i in range(3):\n    break\n    best = i",
        "from contextlib import suppress\nwith suppress(ValueError):\n    best = int('x')",
        "match world_size:\n    case 1:\n        best = 1",
        "best: int",
        "try:\n    best = int('x')\nexcept ValueError:\n    pass",
        "rank < 0 and (best := 1)",
    ],
)
def test_a_name_that_the_cell_did_not_set_has_the_notebooks_value(magic: Notebook, body: str) -> None:
    magic.ok("best = 41")
    assert out(magic.cell(f"%%ddp\n{body}\nbest + 1")) == "42"
    magic.ok(f"%%ddp -o best\n{body}")
    assert out(magic.ok("best")) == "41"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nprocs two", "invalid int value"),
        ("--gpus a,b", "not a list of numbers"),
        ("-o 1x", "not a list of names"),
        ("--nonsense", "unrecognized arguments"),
    ],
)
def test_a_wrong_option_is_refused_before_a_process_starts(magic: Notebook, line: str, words: str) -> None:
    reply = magic.cell(f"%%ddp {line}\n1")
    assert reply.status == "error"
    assert words in reply.shown + reply.evalue
    assert "process" not in reply.shown


def test_a_cell_of_comments_is_refused(magic: Notebook) -> None:
    assert "no statement to run" in magic.cell("%%ddp\n# later").evalue


# ---------------------------------------------------------------------------- background, runs, defaults


def test_a_background_cell_returns_its_run_at_once(magic: Notebook, tmp_path: Path) -> None:
    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    reply = magic.cell(f"%%ddp --background --as later -o answer\n{waits}\nanswer = 42\nanswer + 1")
    (tmp_path / "go").touch()
    assert "<Run In[" in out(reply)
    assert "starting" in reply.shown or "running" in reply.shown
    assert out(magic.ok("later.wait().values, answer, nbddp.last_run() is later")) == "([43, 43], 42, True)"


def test_a_failed_cells_run_is_kept_with_its_logs(magic: Notebook) -> None:
    magic.cell("%%ddp --as failed\nprint('before')\n1 / 0")
    assert out(magic.ok("failed.state, failed.logs(0), type(failed.error).__name__")) == (
        "('failed', 'before\\n', 'RankError')"
    )


def test_ddp_stop_ends_a_background_cell_in_time(magic: Notebook) -> None:
    magic.ok("%%ddp --background\nimport time\ntime.sleep(60)")
    wait_until(lambda: "running" in magic.ok("%ddp status").shown, 10)
    wait_until(lambda: "sleep(60)" in magic.ok("%ddp stacks").shown, 10)
    began = time.monotonic()
    assert "stopped" in magic.ok("%ddp stop").shown
    assert time.monotonic() - began < GONE_S
    assert "nothing is running" in magic.ok("%ddp stop").shown


def test_an_interrupt_ends_the_cell_and_the_next_one_runs(magic: Notebook) -> None:
    message = magic.begin("%%ddp\nprint('begun')\nimport time\ntime.sleep(60)")
    magic.shown_so_far(message, "begun")
    magic.interrupt()
    reply = magic.end_of(message)
    assert (reply.status, reply.ename) == ("error", "KeyboardInterrupt")
    assert out(magic.cell("%%ddp\nrank")) == "0"


def test_ddp_logs_and_show_print_output_and_metrics_of_the_run(magic: Notebook) -> None:
    magic.ok("%%ddp\nprint('I am', rank)\nnbddp.log(loss=0.5)")
    assert magic.ok("%ddp logs 1").shown == "I am 1\n"
    assert magic.ok("%ddp logs").shown == "[rank 0] I am 0\n[rank 1] I am 1\n"
    assert "no rank 2" in magic.cell("%ddp logs 2").shown
    assert "loss 0.5" in magic.ok("%ddp show").shown
    assert "process" in magic.ok("%ddp devices").shown or "×" in magic.ok("%ddp devices").shown


def test_defaults_hold_and_can_be_shown_overridden_and_reset(magic: Notebook) -> None:
    magic.ok("%ddp --nprocs 3 --device cpu --seed 7")
    assert out(magic.cell("%%ddp\nworld_size, torch.initial_seed()")) == "(3, 7)"
    assert out(magic.cell("%%ddp -n 1\nworld_size")) == "1"
    assert "defaults: --nprocs 3 --device cpu --seed 7" in magic.ok("%ddp status").shown
    assert "defaults: none" in magic.ok("%ddp --reset").shown


def test_ddp_run_passes_a_scripts_arguments_as_torchrun_does(magic: Notebook, in_folder: Path) -> None:
    (in_folder / "train.py").write_text("import sys, os\nprint(sys.argv[1:], os.environ['WORLD_SIZE'])\nsys.exit()")
    magic.ok(f"import os\nhome = os.getcwd()\nos.chdir({str(in_folder)!r})")
    reply = magic.ok("%ddp run -n 3 --as script train.py --lr 0.1 -n 5 'two words'")
    assert "['--lr', '0.1', '-n', '5', 'two words'] 3" in reply.shown
    assert "train.py: finished" in out(reply)
    assert "is not there" in magic.cell("%ddp run gone.py").evalue
    magic.ok("os.chdir(home)")


def test_tab_completes_options_subcommands_and_devices(magic: Notebook) -> None:
    assert tab(magic, "%%ddp --ba") == ["--background", "--backend"]
    assert tab(magic, "x = 1\n%ddp sta") == ["status", "stacks"]
    assert tab(magic, "%%ddp --device c")[0] == "cpu"
    assert "%%ddp" in tab(magic, "%%dd")


def test_the_help_has_examples_and_all_options(magic: Notebook) -> None:
    text = magic.ok("print(get_ipython().object_inspect_text('%%ddp'))").shown
    assert "%%ddp -n 2 -o model" in text
    assert "--background" in text
    assert next(line for line in text.splitlines() if "[-o NAMES]" in line).split()[0] == "%%ddp"


# ---------------------------------------------------------------------------- which names a cell needs


@pytest.mark.parametrize(
    ("source", "needed"),
    [
        ("x = 1\nx + y", {"y"}),
        ("x += 1", {"x"}),
        ("def f():\n    return model(x)\nmodel = 3\nx = 1\nf()", set()),
        ("def f():\n    return model\nf()\nmodel = 3", {"model"}),
        ("def f():\n    return model\nif flag:\n    model = 3\n    f()\nelse:\n    f()", {"flag", "model"}),
        ("def f():\n    global n\n    n += 1\nf()", {"n"}),
        ("@keep\ndef f(a=default):\n    return hidden", {"keep", "default", "hidden"}),
        ("class A:\n    z = q\n    def f(self):\n        return A, w\nw = 1\nA()", {"q"}),
        ("class A(Base):\n    def f(self):\n        return A, w\nw = 1\nA()", {"Base", "A", "w"}),
        ("class A:\n    x = 1\n    y = [x for _ in items]\n    z = x", {"items", "x"}),
        ("for i in items:\n    print(i)", {"items", "print"}),
        ("for i in items:\n    loss = i\nloss", {"items", "loss"}),
        ("for table[row] in items:\n    pass", {"items", "table", "row"}),
        ("while True:\n    m = 1\n    if done: break\nm", {"done"}),
        ("while True:\n    if done: break\n    m = 1\nm", {"done", "m"}),
        ("if flag:\n    m = 1\nm", {"flag", "m"}),
        ("if flag:\n    m = 1\nelse:\n    m = 2\nm", {"flag"}),
        ("if flag:\n    m = 1\nelse:\n    raise Error\nm", {"flag", "Error"}),
        ("[k * j for k in items]\nk", {"items", "j", "k"}),
        ("with make(p) as f:\n    d = f", {"make", "p"}),
        ("with make(p) as f:\n    d = f\nd", {"make", "p", "d"}),
        ("try:\n    import a\nexcept E as e:\n    a = e\na", {"E"}),
        ("try:\n    m = 1\nfinally:\n    n = 1\nm, n", set()),
        ("try:\n    m = 1\nexcept E:\n    pass\nm", {"E", "m"}),
        ("(q := 5)\nq", set()),
        ("flag and (q := 5)\nq", {"flag", "q"}),
        ("del model", {"model"}),
        ("x: int\nx", {"x", "int"}),
        ("x: int = 1\nx", {"int"}),
        ("f'{name!r:>{width}}'", {"name", "width"}),
        ("import os.path as p\nos.x, p", {"os"}),
        ("lambda a, b=c: a + d", {"c", "d"}),
        ("obj.field = value\nobj[i] = 1", {"obj", "value", "i"}),
        ("async def f():\n    await g()\nf", {"g"}),
        ("match point:\n    case (0, y):\n        y", {"point"}),
        ("match point:\n    case (0, y):\n        pass\ny", {"point", "y"}),
        ("match point:\n    case (0, y):\n        pass\n    case y:\n        pass\ny", {"point"}),
        ("eval('x + y')", {"eval", "x", "y"}),
        ("print('a text of words')", {"print"}),
    ],
)
def test_the_names_that_a_cell_needs_are_found(source: str, needed: set[str]) -> None:
    assert analysis.names_of(ast.parse(source)).needed == needed


@pytest.mark.parametrize(
    ("source", "optional"),
    [
        ("x + 1\nx = 2", set()),
        ("if flag:\n    x = 1\nx", {"x"}),
        ("for i in items:\n    x = i\nelse:\n    x", {"x"}),
        ("def f():\n    global x\n    x = 1\nf()\nx", {"x"}),
        ("def f():\n    return x, y\nf()\nx = 1", {"x"}),
        ("from os import *\npath", {"path"}),
    ],
)
def test_the_names_that_a_cell_may_set_before_reading_are_found(source: str, optional: set[str]) -> None:
    assert analysis.names_of(ast.parse(source)).optional == optional


def test_a_name_to_bring_back_counts_as_read_at_the_end() -> None:
    tree = ast.parse("if flag:\n    x = 1")
    assert analysis.names_of(tree).needed == {"flag"}
    assert analysis.names_of(tree, ["x", "y"]).needed == {"flag", "x"}


def test_names_set_by_global_import_star_or_exec_are_found() -> None:
    names = analysis.names_of(ast.parse("def f():\n    global best\n    best = 1\n    local = 2\nf()"))
    assert names.bound == {"f", "best"}
    assert analysis.names_of(ast.parse("from os import *")).binds_unknown
    assert analysis.names_of(ast.parse("exec('x = 1')")).binds_unknown


def test_a_plain_syntax_error_is_not_reported_as_a_magic() -> None:
    with pytest.raises(SyntaxError):
        analysis.parse("x = 1 %\n", "cell")
    with pytest.raises(LaunchError, match="line 1: `%time x` is a magic"):
        analysis.parse("%time x\n", "cell")


def test_a_cell_that_calls_sys_exit_0_succeeds(magic: Notebook) -> None:
    reply = magic.cell("%%ddp\nimport sys\nsys.exit(0)")
    assert reply.status == "ok", reply.traceback


def test_an_unpicklable_o_name_is_an_error_and_the_others_come_back(magic: Notebook) -> None:
    reply = magic.cell("%%ddp -o loss,bad\nloss = 0.125\nbad = (i for i in range(3))")
    assert reply.status == "error"
    assert "-o bad" in reply.evalue
    assert out(magic.ok("loss")) == "0.125"
