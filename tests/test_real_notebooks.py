"""What notebooks do that were written for other launchers, or by hand: it works, or a sentence says what to write."""

import copy
import io
import os
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch

import nbddp
from nbddp.kernel import advice
from nbddp.kernel.advice import advice as advised
from nbddp.kernel.page import Page
from nbddp.kernel.rank_state import RankState
from nbddp.process.machine import Event
from tests.support import Cells, Notebook, out, run, start, wait_until


def test_imports_for_their_effects_are_repeated_on_the_ranks(own_notebook: Notebook, tmp_path: Path) -> None:
    for name in ("plugin", "starred", "named", "absent"):
        (tmp_path / f"effect_{name}.py").write_text(f"import json\njson.{name} = 1\n")
    picky = "import sys\nif 'ipykernel' not in sys.modules: raise OSError('not here')"
    (tmp_path / "effect_picky.py").write_text(picky)
    own_notebook.ok(f"""
        import sys; sys.path.insert(0, {str(tmp_path)!r})
        %load_ext nbddp
        import effect_plugin, effect_named, pandas as pd
        from effect_starred import *
        try: import effect_picky, effect_missing
        except ImportError: pass
        def effects():
            import json
            return [hasattr(json, name) for name in ("plugin", "starred", "named", "absent")], "pandas" in sys.modules
    """)
    own_notebook.ok("def later(): return effect_named")
    reply = own_notebook.ok("print(nbddp.run(effects, nprocs=2, device='cpu', show=False).value)")
    assert reply.shown == "([True, True, False, False], False)\n"
    logs = own_notebook.ok("print(nbddp.last_run().logs(0), end='')").shown
    assert logs == "[import effect_picky failed on rank 0: OSError: not here]\n"
    cell = own_notebook.ok("%%ddp -n 1 --device cpu\nimport json\nhasattr(json, 'plugin')")
    assert cell.shown.endswith("OSError: not here]\nTrue\n")
    (tmp_path / "plain.py").write_text("import json\nprint(hasattr(json, 'plugin'))")
    plain = f"nbddp.run_script({str(tmp_path / 'plain.py')!r}, nprocs=1, device='cpu', show=False).logs(0)"
    assert out(own_notebook.ok(plain)) == r"'False\n'"


TRAINING = """
import nbddp, torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
model = torch.nn.Linear(2, 1)
data = TensorDataset(torch.arange(32.0).reshape(16, 2))
def step(trained, batch):
    trained = nbddp.wrap(trained)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    trained(batch).sum().backward()
    optimizer.step()
def on(batches):
    ddp = nbddp.wrap(torch.nn.Linear(2, 1))
    for x, in batches:
        step(ddp, x)
        for y, in DataLoader(data, 8): ddp(y)  # every rank evaluates all of it
def plain(): on(DataLoader(data, 4, shuffle=True))
def in_workers(): on(DataLoader(data, 4, num_workers=1))
def sampled(): on(DataLoader(data, 4, sampler=DistributedSampler(data)))
def dealt(): on(nbddp.loader(data, 4))
def split(): on(DataLoader(TensorDataset(data.tensors[0][nbddp.rank()::2]), 4))
def subset(): on(DataLoader(Subset(data, range(nbddp.rank(), 16, 2)), 4))
def own(): step(torch.nn.Linear(2, 1), torch.ones(1, 2))
def destroyed(): own(); torch.distributed.destroy_process_group()
def in_place(): step(model, torch.ones(1, 2)); return {"loss": 0.5, "steps": [1]}
def returned(): step(model, torch.ones(1, 2)); return [model]
def weights(): step(model, torch.ones(1, 2)); return {"weights": model.state_dict()}
def saved(): step(model, torch.ones(1, 2)); torch.save(model, "/dev/null")
losses = []
def fills(): losses.append(0.5)
def fills_and_returns(): losses.append(0.5); return losses
"""


@pytest.mark.parametrize(
    ("function", "remark"),
    [
        *[(name, "every rank trained on a DataLoader of 16 samples without") for name in ("plain", "in_workers")],
        *[(name, "") for name in ("sampled", "dealt", "split", "subset", "own", "destroyed")],
        *[(name, "") for name in ("returned", "weights", "saved", "fills_and_returns")],
        ("fills", "fills filled losses on the ranks: the notebook's own is unchanged. Return it"),
        ("in_place", "in_place trained a copy of the notebook's model: the notebook's own is unchanged. Return"),
    ],
)
def test_what_trained_something_else_than_intended_is_remarked_on(cell: Cells, function: str, remark: str) -> None:
    advice._said.clear()  # it's said once per kernel
    names = vars(cell(TRAINING))
    done = run(names[function])
    assert (done.remark[: len(remark)], bool(done.remark)) == (remark, bool(remark))
    assert run(names[function]).remark == ""


def test_exit_ends_a_function_as_in_python(notebook: Notebook) -> None:
    notebook.ok("""
        import nbddp
        def leaves(*code):
            if nbddp.rank() == 1: exit(*code)
            return 5
        def fails(): quit(3)
        def own(): return quit
    """)
    options = "nprocs=2, device='cpu', show=False"
    both = out(notebook.ok(f"[nbddp.run(leaves, code, {options}).values for code in ((), (0,))]"))
    assert both == "[[5, None], [5, None]]"
    assert "called sys.exit(3)" in notebook.cell(f"nbddp.run(fails, {options})").evalue
    assert notebook.ok("before, quit = quit, False\ntype(exit).__name__").result == "'ZMQExitAutocall'"
    assert out(notebook.ok(f"(nbddp.run(own, {options}).value, quit := before)[0]")) == "False"


class _Named(ValueError):
    def __init__(self, path: str) -> None:
        super().__init__(f"bad {path}")
        self.path, self.rank = path, "mine"


@pytest.mark.parametrize(
    ("cause", "fields"),
    [
        (FileNotFoundError(2, "Not there", "/nowhere"), {"errno": 2, "filename": "/nowhere"}),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad byte"), {"start": 0, "reason": "bad byte"}),
        (_Named("/data"), {"path": "/data"}),
        (torch.OutOfMemoryError("memory"), {}),
        (KeyError("x"), {}),
    ],
)
def test_the_error_of_a_run_is_an_instance_of_its_causes_class_too(cause: Exception, fields: dict[str, Any]) -> None:
    error = nbddp.RankError(1, 2, cause, advice="Try that")
    for each in (error, copy.copy(error)):
        assert {nbddp.RankError, type(cause)} <= {*type(each).__mro__}
        assert {name: getattr(each, name) for name in fields} == fields
        assert (each.rank, each.cause, type(each).__name__) == (1, cause, "RankError")
        assert re.fullmatch("rank 1 of 2 failed: (.|\n)*\nTry that", str(each))


class _New(Exception):
    def __new__(cls, a: int, b: int) -> Any:
        return super().__new__(cls)


class _Property(Exception):
    rank = property(lambda _: 7)


@pytest.mark.parametrize("cause", [_New(1, 2), _Property(), StopIteration(), ExceptionGroup("x", [OSError()])])
def test_the_error_of_a_run_is_plain_where_it_cannot_be_of_two_classes(cause: Exception) -> None:
    assert (type(error := nbddp.RankError(1, 2, cause)), error.rank) == (nbddp.RankError, 1)


def test_a_cell_can_catch_what_its_function_raises(notebook: Notebook) -> None:
    notebook.ok("import nbddp\nclass Pruned(Exception): pass\ndef train(): raise Pruned('enough')")
    caught = "try: nbddp.run(train, nprocs=2, device='cpu', show=False)\nexcept Pruned as error: print(error.rank >= 0)"
    assert notebook.ok(caught).shown == "True\n"


def test_a_stopped_runs_values_are_in_partial_as_far_as_there_are_any(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import nbddp, time
        from pathlib import Path
        def train(folder, is_deaf):
            try:
                Path(folder, f"{nbddp.rank()} {is_deaf}").touch()
                time.sleep(1000)
            except KeyboardInterrupt:
                if nbddp.rank() == 1 and is_deaf: deaf()
                return nbddp.rank(), "so far"
        def deaf():
            while True:
                try: time.sleep(1000)
                except KeyboardInterrupt: pass
    """)
    started = start(names.train, str(tmp_path), False, timeout=1000)
    wait_until(lambda: len(os.listdir(tmp_path)) == 2)
    started._attempt._deadline = 0.0  # its time is up
    assert (type(started.exception()), started.partial) == (nbddp.RunTimeout, [(0, "so far"), (1, "so far")])
    started = start(names.train, str(tmp_path), True)
    wait_until(lambda: len(os.listdir(tmp_path)) == 4)
    started.stop(grace=0.5)
    assert (started.state, started.partial) == ("stopped", [(0, "so far"), None])
    told = r"train is stopped: it has no value, but \.partial has what the ranks returned"
    with pytest.raises(nbddp.NbddpError, match=told):
        _ = started.value
    with nbddp.Session(nprocs=1, device="cpu", show=False) as session:
        assert session.run(lambda: 1).partial == []


def test_a_save_that_was_cut_short_is_said(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok(f"""
        import nbddp, signal, time, torch
        class Slow:
            def __reduce__(self):
                print("saving", flush=True)
                time.sleep(1000)
        def train():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            torch.save(Slow(), {str(tmp_path / "weights.pt")!r})
        from nbddp.kernel import start, attempt
        before, start.OF_A_RUN = start.OF_A_RUN, attempt.Patience(0.3, (0.5, 0.0))
    """)
    going = notebook.begin("nbddp.run(train, nprocs=1, device='cpu', show='text')")
    notebook.shown_so_far(going, "saving")
    notebook.interrupt()
    text = notebook.end_of(going).evalue
    notebook.ok("start.OF_A_RUN = before")
    assert text.endswith("Rank 0 was killed while saving (__reduce__, line 5), so the file may be incomplete")


def test_an_interrupt_while_the_fork_server_imports_is_not_kept_waiting(own_notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "endless_import.py").write_text("open('importing', 'w').close()\nimport time\ntime.sleep(1000)")
    own_notebook.ok(f"""
        import os, sys; os.chdir({str(tmp_path)!r}); sys.path.insert(0, '')
        from nbddp.process import server
        nbddp.preload("endless_import")
    """)
    going = own_notebook.begin("nbddp.run(print, nprocs=2, device='cpu', show=False)")
    wait_until((tmp_path / "importing").exists)
    own_notebook.interrupt()
    assert own_notebook.end_of(going, 20.0).ename == "KeyboardInterrupt"
    own_notebook.ok("server._preloaded.remove('endless_import')\nserver.shut_down()\n%reset -f")  # without __spec__
    assert out(own_notebook.ok("import nbddp\nnbddp.run(lambda: 1, nprocs=2, device='cpu').values")) == "[1, 1]"


def test_weak_references_of_a_value_are_dead_in_the_notebook_which_is_said(cell: Cells) -> None:
    names = cell("""
        import weakref
        class Trainer: pass
        def train():
            trainer, loader = Trainer(), Trainer()
            trainer.loader, trainer.step, trainer.known = weakref.ref(loader), 7, weakref.WeakKeyDictionary({loader: 1})
            return trainer
    """)
    advice._said.clear()
    done = run(names.train)
    assert (done.value.step, done.value.loader()) == (7, None)
    assert done.remark.startswith("what train returned came back without its weak references")


@pytest.mark.parametrize(
    "code",
    [
        "def train():\n    from accelerate import notebook_launcher\n    notebook_launcher(print, num_processes=2)",
        "def train():\n    def inner(): return Trainer(strategy='ddp_notebook', devices=2)\n    inner()",
        "from accelerate import notebook_launcher\ndef train(): return notebook_launcher",
    ],
)
def test_another_launcher_in_a_function_is_refused_before_ranks_start(notebook: Notebook, code: str) -> None:
    what = (
        "'ddp_notebook' in train: write 'ddp'" if "ddp_" in code else "notebook_launcher() in train: call the function"
    )
    notebook.ok("import sys, types, nbddp\nsys.modules['accelerate'] = fake = types.ModuleType('accelerate')")
    notebook.ok(f"def notebook_launcher(*a, **k): pass\nfake.notebook_launcher = notebook_launcher\n{code}")
    failed = notebook.cell("nbddp.run(train, nprocs=2, device='cpu')")
    assert (failed.ename, what in failed.evalue) == ("LaunchError", True)
    notebook.ok("%load_ext nbddp\ndel sys.modules['accelerate']")
    cell = notebook.cell("%%ddp -n 2 --device cpu\nTrainer(strategy='ddp_notebook_find_unused_parameters_true')")
    assert "in this cell: write 'ddp_find_unused_parameters_true'" in cell.evalue


@pytest.mark.parametrize(
    ("text", "how", "says"),
    [
        ("AttributeError: 'DistributedDataParallel' object has no attribute 'encode'", {}, "model.module.encode"),
        ('Missing key(s) in state_dict: "a".\n\tUnexpected key(s) in state_dict: "module.a"', {}, "model.module.state"),
        ("RuntimeError: received 0 items of ancdata", {}, "set_sharing_strategy('file_system')"),
        ("name: EADDRINUSE, message: address already in use", {}, "don't set MASTER_PORT"),
        ("Expected to mark a variable ready only once.", {}, "use_reentrant=False"),
        ("FileExistsError: [Errno 17] File exists: 'out'", {"alike": False}, "exist_ok=True"),
        ("FileExistsError: [Errno 17] File exists: 'out'", {}, ""),
        ("FileNotFoundError: 'out/x'", {"alike": False, "rank": 1}, "If rank 0 creates it"),
        ("FileNotFoundError: 'out/x'", {"alike": False}, ""),
        ("PytorchStreamReader failed reading zip archive", {"alike": False, "rank": 1}, "nbddp.barrier()"),
        ("PytorchStreamReader failed reading zip archive", {"alike": False}, "write it only if nbddp.is_primary()"),
        ("EOFError: Ran out of input", {"rank": 1}, ""),
        ("UnboundLocalError: cannot access local variable 'x' where", {"alike": False, "rank": 1}, "broadcast(x)"),
        ("NameError: name 'x' is not defined", {"alike": False, "rank": 1}, ""),
        ("EOFError: no interactive input here", {"alike": False}, ""),
        ("DDP expects same model across all ranks, but Rank 0 has 2 params", {}, "nbddp.broadcast(x)"),
        ("You must call `wandb.init()` before `wandb.log()`", {}, "log_to=wandb.run"),
        ("default_collate: batch must contain tensors; found <class 'Data'>", {}, "nbddp.loader() takes that one"),
        ("SyncBatchNorm layers only work with GPU modules", {}, "don't convert the model"),
        ("AssertionError: Torch not compiled with CUDA enabled", {}, ".to(nbddp.device())"),
        ("AssertionError: Torch not compiled with CUDA enabled", {"device": "cuda"}, ""),
        ("Expected to have finished reduction in the prior iteration before", {}, "find_unused_parameters=True"),
        ("NCCL error in: x.cpp, unhandled system error", {"device": "cuda"}, "NCCL_DEBUG"),
        ("ValueError: boom", {}, ""),
    ],
)
def test_errors_of_several_processes_say_what_to_do(text: str, how: dict[str, Any], says: str) -> None:
    found = advised(text, **{"device": "cpu", **how})
    assert (says in found, bool(found)) == (True, bool(says))


def test_a_cells_error_has_advice_and_the_innermost_lines_of_a_recursion(notebook: Notebook) -> None:
    notebook.ok("%load_ext nbddp")
    unused = "raise RuntimeError('Expected to have finished reduction in the prior iteration')"
    assert "find_unused_parameters=True" in notebook.cell(f"%%ddp -n 2 --device cpu\n{unused}").traceback
    deep = "def deep(n):\n    if n == 0: raise ValueError('bottom')\n    deep(n - 1)\ndeep(300)"
    assert re.search("> 3 +if n == 0: raise", notebook.cell(f"%%ddp -n 1 --device cpu\n{deep}").traceback)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("rank=0, world_size=2", r"init_process_group\(rank=0\) on rank 1: write nbddp.rank\(\)"),
        ("rank=nbddp.rank(), world_size=4", r"world_size=4\) in a run of 2 ranks: write nbddp.world_size\(\)"),
        ("None, None, 1, nbddp.rank()", r"world_size=1\) in a run of 2 ranks"),
    ],
)
def test_a_number_that_was_typed_for_all_ranks_is_an_error_and_no_hang(cell: Cells, arguments: str, says: str) -> None:
    source = f"import nbddp, torch.distributed as dist\ndef train(): dist.init_process_group('gloo', {arguments})"
    with pytest.raises(nbddp.RankError, match=says):
        run(cell(source).train)


def test_what_is_open_or_locked_in_the_notebook_is_refused_by_name(cell: Cells) -> None:
    names = cell("import nbddp\nconnection = None\ndef train(): return connection")
    names.train.__globals__["connection"] = database = sqlite3.connect(":memory:")
    told = r"train → connection: a Connection is open .* sqlite3.connect\(path\)"
    with pytest.raises(nbddp.PayloadError, match=told):
        run(names.train)
    with pytest.raises(nbddp.PayloadError, match="print can't be sent to the ranks: end: a Connection is open"):
        run(print, kwargs={"end": database})
    database.close()


def test_progress_takes_what_tqdm_takes(cell: Cells) -> None:
    names = cell("""
        import nbddp, time, torch
        def train():
            bar = nbddp.progress(range(3), desc="epoch")
            for epoch in bar:
                (inner := nbddp.progress(range(2), desc="step", leave=False)).set_description("not yet")
                for _ in inner: pass
                for _ in nbddp.progress(range(9), desc="never", disable=True): pass
                bar.set_postfix({"loss": torch.tensor(0.123456)}, best=3, name="x")
                time.sleep(0.15)
                bar.set_description(f"epoch {epoch}")
            return len(bar)
    """)
    (bar,) = (done := run(names.train)).history.ranks[0].bars
    assert (bar.desc, bar.done, bar.total, [*bar.postfix.values()]) == ("epoch 2", 3, 3, ["0.123", "3", "x"])
    assert (done.value, bar.rate < 10) == (3, True), "a new description begins no new loop"
    with pytest.raises(TypeError, match="total="):
        len(nbddp.progress(iter("ab")))


@pytest.mark.parametrize("piece", [1, 7, 100_000])
@pytest.mark.parametrize("lines", [999, 1000, 1001, 1010, 1011, 10_000])
def test_after_a_thousand_lines_the_rest_is_in_the_logs(lines: int, piece: int) -> None:
    rank, shown = RankState(0), io.StringIO()
    page = Page([rank])
    page.write = shown.write  # type: ignore[assignment, method-assign]
    printed = [f"line {number}\n" for number in range(lines)]
    for at in range(0, lines, piece):
        data = "".join(printed[at : at + piece]).encode()
        rank.output.add(data)
        page.take(Event("output", 0, data))
    page.finish()
    more = [f"[{lines - 1010:,} more lines in the logs]\n"] if lines > 1010 else []
    note = ["[further lines are in the logs: %ddp logs 0]\n"] if lines > 1000 else []
    assert shown.getvalue() == "".join([*printed[:1000], *note, *more, *printed[max(1000, lines - 10) :]])
    page.take(Event("output", 0, b"after a prompt\n"))
    assert shown.getvalue().endswith("after a prompt\n")
