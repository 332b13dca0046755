"""``%%ddp`` on fresh ranks and ``%ddp``: what a cell reads, keeps, returns, and says when it cannot run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbddp.magic import reads
from tests.support import GONE_S, OUR_FILES, Notebook, wait_until


@pytest.fixture
def magic(notebook: Notebook) -> Iterator[Notebook]:
    """The shared notebook with the extension, two CPU ranks by default."""
    notebook.ok("%load_ext nbddp\nimport nbddp, torch\n%ddp --nprocs 2 --device cpu")
    yield notebook
    notebook.ok("%ddp --reset")


def test_the_first_cells_of_a_new_kernel_work_or_say_what_to_write() -> None:
    with Notebook() as new:
        new.ok("import nbddp\ndef train(epochs=1): return epochs")
        assert new.ok("%%ddp -n 2 --device cpu\nprint(rank)").shown == "0\n[rank 1] 1\n"
        reply = new.cell("nbddp.run(train, epochs=3)")
        assert (reply.evalue[-20:], OUR_FILES.search(reply.traceback)) == ('kwargs={"epochs": 3}', None)
        assert new.ok("nbddp.run(train, nprocs=2, device='cpu')").shown == ""  # below its panel
        new.ok("import torch\ndef fit(): torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1).step()")
        remarks = [new.ok(f"nbddp.run({f}, nprocs=2, device='cpu').remark") for f in ("train", "fit", "fit")]
        assert [each.result[:14] for each in remarks] == ["''", "'no collective", "''"]  # only of training, and once


def test_the_cell_reads_the_notebooks_names_and_sets_none_of_them(magic: Notebook) -> None:
    magic.ok("scale = input = 10\nx = 'mine'\ndef scaled(v): return v * scale")
    assert magic.ok("%%ddp\nx = scaled(rank + 1)\nextra = x\nnbddp.all_gather(x), input").shown == "([10, 20], 10)\n"
    assert magic.ok("x, 'extra' in globals()").shown == "('mine', False)\n"
    magic.ok("del input")


def test_rank_device_torch_and_dist_are_ready_in_the_cell(magic: Notebook) -> None:
    source = "t = torch.ones(1, device=device)\ndist.all_reduce(t)\nt.item(), rank * 0, world_size, nbddp.world_size()"
    assert magic.ok(f"%%ddp -n 3\n%reset -f\n{source}").status == "ok"
    assert magic.ok(f"%%ddp -n 3\n{source}").shown == "(3.0, 0, 3, 3)\n"
    magic.ok("for rank, dist in enumerate('ab'): world_size = 7\ndef helper(): return rank")
    cell = "%%ddp\nnbddp.all_gather((rank, helper())), world_size, dist"
    assert magic.ok(cell).shown == "([(0, 0), (1, 1)], 2, 'b')\n"
    magic.ok("del rank, world_size, dist")


def test_names_asked_for_with_o_come_from_the_lowest_rank_and_one_that_cannot_be_sent_is_named(magic: Notebook) -> None:
    magic.ok("kept, best = [1], 41")
    magic.ok("%%ddp -o weights,kept,best\nweights = torch.ones(2) * rank\nkept.append(2)\nfor best in []: pass")
    assert magic.ok("weights.tolist(), kept, best").shown == "([0.0, 0.0], [1, 2], 41)\n"
    magic.ok("class Net(torch.nn.Linear): pass")
    magic.ok("%%ddp -o both -o one,net\none, net = [rank], nbddp.wrap(Net(2, 1))\nboth = [one, one]")
    assert magic.ok("%%ddp -n 3 --ranks 1,2 -o first\nfirst = rank\nrank").shown == "1\n[rank 2] 2\n"
    assert magic.ok("both[0] is one, type(net) is Net, first").shown == "(True, True, 1)\n"
    assert "a name is missing: write -o a,b, without spaces" in magic.cell("%%ddp -o a, b\na = b = 1").shown
    reply = magic.cell("%%ddp -o bad,loss\nloss = 0.125\nbad = (i for i in range(3))")
    assert reply.evalue == "a variable can't be sent to the notebook: bad: cannot pickle 'generator' object"
    assert magic.ok("loss").shown == "0.125\n"


def test_an_error_of_syntax_or_another_points_at_the_cells_lines(magic: Notebook) -> None:
    magic.ok("def broken(x):\n    raise KeyError('no such digit')")
    reply = magic.cell("%%ddp --as failed\n\ndef half(x):\n    return broken(x)\n\nprint('before')\nhalf(1)  # here")
    assert (reply.status, reply.ename) == ("error", "KeyError")
    calls = "7 half(1)  # here", "in half(", "4     return broken(x)", "raise KeyError('no such digit')"
    assert all(text in reply.traceback for text in (*calls, "ranks 0 and 1 of 2"))
    assert not OUR_FILES.search(reply.traceback)
    kept = magic.ok("failed.state, failed.logs(0), type(failed.error).__name__").shown
    assert kept == "('failed', 'before\\n', 'KeyError')\n"
    assert "3 1 / 0" in magic.cell("%%local\n\n1 / 0").traceback
    reply = magic.cell("%%ddp\nx = 1\ny = = 2")
    assert (reply.ename, "line 3" in reply.traceback, "y = = 2" in reply.traceback) == ("SyntaxError", True, True)
    assert not OUR_FILES.search(reply.traceback)


def test_an_unpicklable_variable_is_named(magic: Notebook) -> None:
    magic.ok("log_file = open('/dev/null')\ndef note(): log_file.write('x')")
    assert "a variable can't be sent to the ranks: log_file" in magic.cell("%%ddp\nlog_file").evalue
    assert "note → log_file" in magic.cell("%%ddp\nnote()").evalue
    assert magic.ok("%%ddp\nif rank >= 0:\n    log_file = 7\nlog_file").shown == "7\n"


def test_a_wrong_option_or_rank_is_refused_before_a_process_starts(magic: Notebook) -> None:
    for line, words in {
        "--nprocs two": "invalid int value",
        "--gpus a,b": "invalid numbers value",
        "-o 1x": "'1x' isn't a valid name",
        "--nonsense": "unrecognized arguments",
        "-o 'x": "can't be parsed",
    }.items():
        reply = magic.cell(f"%%ddp {line}\nprint('it ran')")
        assert (reply.ename, words in reply.shown, "it ran" in reply.shown) == ("UsageError", True, False)
    assert magic.cell("%%ddp --ranks 5\n1").evalue == "there is no rank 5 (nprocs=2)"


def test_stop_ends_a_cell_whose_names_are_still_on_their_way(magic: Notebook) -> None:
    magic.ok("import time\nclass Slow:\n    def __reduce__(self): return time.sleep, (60,)\nslow = Slow()")
    magic.ok("%%ddp --background --as sent\nslow")
    magic.ok("time.sleep(0.3)\nbegan = time.monotonic(); sent.stop(0.5)")
    assert magic.ok("sent.state, time.monotonic() - began < 5").shown == "('stopped', True)\n"


def test_a_background_cell_returns_its_run_at_once(magic: Notebook, tmp_path: Path) -> None:
    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    magic.ok(f"%%ddp --background --as later -o answer\n{waits}\nprint('in its logs')\nanswer = 42\nanswer + 1")
    (tmp_path / "go").touch()
    assert magic.ok("later.wait().values, answer, later.logs(1)").shown == "([43, 43], 42, 'in its logs\\n')\n"


def test_ddp_stop_ends_a_background_cell_in_time(magic: Notebook) -> None:
    magic.ok("%%ddp --background\nimport time\ntime.sleep(60)")
    wait_until(lambda: "time.sleep(60)" in magic.ok("%ddp stacks").shown)
    reply = magic.ok("%ddp stop")
    assert ("stopped" in reply.shown, reply.seconds < GONE_S) == (True, True)
    assert magic.ok("%ddp stop").shown == "nothing is running\n"


def test_a_fresh_cell_has_the_time_and_the_restarts_of_a_run(magic: Notebook) -> None:
    assert magic.cell("%%ddp --timeout 0.5\nimport time\ntime.sleep(60)").ename == "RunTimeout"
    assert "\n1.0\n" in magic.ok("%%ddp --max-restarts 1\n1 / nbddp.restart_count()").shown
    timeout = "dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout.seconds"
    for option, seconds in ("", "3600\n"), ("--pg-timeout 7", "7\n"):
        assert magic.ok(f"%%ddp {option}\n{timeout}").shown == seconds


def test_an_interrupt_ends_the_cell_and_the_next_one_runs(magic: Notebook) -> None:
    reply = magic.interrupted("%%ddp\nprint('begun', flush=True)\nimport time\ntime.sleep(60)")
    assert reply.ename == "KeyboardInterrupt"
    assert "was stopped. Where the ranks were: both ranks are at line 4" in reply.evalue
    assert magic.ok("%%ddp\n5").shown == "5\n"


def test_magics_shell_commands_await_and_displays_work_in_a_fresh_cell(magic: Notebook) -> None:
    cell = "import asyncio\n!echo from the shell\nout = %sx echo captured\nawait asyncio.sleep(0.01)\ndisplay(out)\nout"
    assert magic.ok(f"%%ddp\n{cell}").shown.splitlines() == ["from the shell", "['captured']", "['captured']"]
    magic.ok("def f(x): return x\nbig = 3")
    assert "per loop" in magic.ok("%%ddp\n%timeit -n1 -r1 f(big)").shown
    assert "per loop" in magic.ok("%%ddp\n%%timeit -n1 -r1\nf(big)").shown


def test_what_is_shown_at_the_cells_end_is_shown_once(magic: Notebook) -> None:
    for source in ("'value'", "display('value')", "print(\"'value'\")"):
        assert magic.ok(f"%%ddp\n{source}").shown == "'value'\n"
    assert magic.ok("%%ddp\n'value';").shown == ""


def test_ddp_logs_and_show_print_output_and_metrics_of_the_run(magic: Notebook) -> None:
    magic.ok("%%ddp\nprint('I am', rank)\nnbddp.log(loss=0.5)")
    assert magic.ok("%ddp logs 1").shown == "I am 1\n"
    assert magic.ok("%ddp logs").shown == "[rank 0] I am 0\n[rank 1] I am 1\n"
    assert "there is no rank 2" in magic.cell("%ddp logs 2").shown
    assert "loss 0.5" in magic.ok("%ddp show").shown
    assert "2 ranks" in magic.ok("%ddp devices").shown


def test_defaults_hold_and_can_be_shown_overridden_and_reset(magic: Notebook) -> None:
    magic.ok("%ddp --nprocs 3 --device cpu --seed 7")
    assert magic.ok("%%ddp\nworld_size, torch.initial_seed() - rank").shown == "(3, 7)\n"
    assert magic.ok("%%ddp -n 1\nworld_size").shown == "1\n"
    assert magic.ok("%ddp run -m this\nnbddp.last_run().nprocs").result == "3"
    assert "defaults: --nprocs 3 --device cpu --seed 7" in magic.ok("%ddp status").shown
    assert magic.ok("%ddp --reset").shown == "defaults: none\n"


def test_the_help_has_an_example_and_all_options(magic: Notebook) -> None:
    text = magic.ok("print(get_ipython().object_inspect_text('%%ddp'))").shown
    assert all(part in text for part in ("%%ddp -n 2 -o model", "--background"))


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("x = 1\nx + y", {"y"}),
        ("x += 1", {"x"}),
        ("for i in items:\n    total += i", {"items", "total", "i"}),
        ("def f():\n    return model\nf()\nmodel = 3", {"model"}),
        ("def f():\n    global n\n    n += 1\nf()", {"n"}),
        ("def f(p):\n    with p as local:\n        return local", set()),
        ("@keep\ndef f(a=default):\n    return hidden", {"keep", "default", "hidden"}),
        ("class A:\n    lr = 1\n    def f(self):\n        return w\nlr", {"w", "lr"}),
        ("model = make(x).to(device)\nto", {"make", "x", "device", "to"}),
        ("[k * j for k in items]\nk", {"items", "j", "k"}),
        ("if flag:\n    m = 1\nm", {"flag", "m"}),
        ("import os.path as p\nos.x, p", {"os"}),
        ("f'{name!r:>{width}}'", {"name", "width"}),
        ("eval('x + y')", {"eval", "x", "y"}),
        ("print('a text of words')", {"print"}),
        ("await g()", {"g"}),
    ],
)
def test_the_names_that_a_cell_reads_are_found(source: str, read: set[str]) -> None:
    assert reads.names_read(source) - {"__name__"} == read
