"""The first run of a kernel waits only for the imports that it needs, and says what it waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nbddp.payload.light import is_light
from tests.support import Cells, script

BEGIN = """
import sys, time
import nbddp
from nbddp.forkserver import server as forkserver
from nbddp.forkserver import server_process
server_process.LATER = ("comes_last",)
def plain(name):
    import sys
    return name in sys.modules
def trains(name):
    import sys
    import torch
    torch.nn.Linear(1, 1)
    return name in sys.modules
def values(fn):
    return nbddp.run(fn, ("comes_last",), nprocs=2, device="cpu", show=False).values
"""


def program(folder: Path, source: str, comes_last: str = "") -> str:
    """What a program prints whose fork server imports a module of ours last."""
    (folder / "comes_last.py").write_text(comes_last)
    (folder / "program.py").write_text(BEGIN + textwrap.dedent(source))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_first_run_waits_for_the_last_imports_only_if_it_may_need_them(in_folder: Path) -> None:
    """And the server makes them when the run is over."""
    shown = program(
        in_folder,
        """
        print(values(plain))
        while forkserver.importing() is not None: time.sleep(0.01)
        print(values(plain))
        forkserver.shut_down()
        print(values(trains), values(plain))
        """,
    )
    assert shown.split("\n") == ["[False, False]", "[True, True]", "[True, True] [True, True]", ""]


@pytest.mark.slow
def test_a_run_in_a_script_imports_no_ipython(in_folder: Path) -> None:
    shown = program(in_folder, "nbddp.run(plain, ('x',), nprocs=1, device='cpu'); print('IPython' in sys.modules)")
    assert shown.endswith("\nFalse\n")


@pytest.mark.slow
def test_a_last_import_that_fails_leaves_the_server_as_it_is(in_folder: Path) -> None:
    assert program(in_folder, "print(values(trains))", "raise ImportError") == "[False, False]\n"


@pytest.mark.slow
def test_a_run_says_which_import_it_waits_for(in_folder: Path) -> None:
    shown = program(
        in_folder,
        """
        run = nbddp.run(trains, ("comes_last",), nprocs=1, device="cpu", show=False, wait=False)
        seen = set()
        while run.state == "starting":
            seen.add(repr(run).partition("importing ")[2].partition(",")[0])
            time.sleep(0.01)
        run.wait()
        print(sorted(seen - {""}), "importing" in repr(run))
        """,
        "import time; time.sleep(1)",
    )
    assert shown == "['comes_last', 'torch'] False\n"


@pytest.mark.slow
def test_a_light_run_does_not_wait_for_an_import_that_has_not_begun(in_folder: Path) -> None:
    """The run is over before the module could have been imported, which takes a minute."""
    began = time.monotonic()
    assert program(in_folder, "print(values(plain))", "import time; time.sleep(60)") == "[False, False]\n"
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_the_collector_is_as_before_the_imports() -> None:
    shown = script("""
        import gc
        gc.set_threshold(500, 7, 9)
        frozen = gc.get_freeze_count()  # 375 in Python 3.12.1
        import nbddp
        nbddp.run, nbddp.Session
        print(gc.get_threshold(), gc.isenabled(), gc.get_freeze_count() - frozen)
        """).stdout
    assert shown == "(500, 7, 9) True 0\n"


@pytest.mark.slow
def test_objects_that_the_user_has_frozen_stay_frozen() -> None:
    shown = script("""
        import gc
        gc.freeze()
        import nbddp
        nbddp.run
        print(gc.get_freeze_count() > 1000)
        """).stdout
    assert shown == "True\n"


@pytest.mark.slow
def test_runs_that_follow_each_other_wait_for_no_import_between_them(in_folder: Path) -> None:
    """The module takes longer than all of them, and is imported once no run has come for a second."""
    shown = program(
        in_folder,
        """
        began = time.monotonic()
        for _ in range(3):
            print(values(plain))
            time.sleep(0.3)
        print(time.monotonic() - began < 60)
        while forkserver.importing()[0] != "comes_last": time.sleep(0.01)
        print("now")
        """,
        "import time; time.sleep(60)",
    )
    assert shown == "[False, False]\n" * 3 + "True\nnow\n"


# ---------------------------------------------------------------------------- which calls need the last imports

LIGHT = {
    "an all-reduce": "def fn(): dist.all_reduce(torch.ones(1)); return nbddp.rank()",
    "the standard library": "def fn():\n import os, time\n from concurrent import futures\n return os.getpid()",
    "tensors and arrays": "x = torch.ones(3); a = np.ones(3)\ndef fn(): return x.sum() + a.sum()",
    "a function that it calls": "def inner(): return torch.zeros(1)\ndef fn(): return inner()",
}
HEAVY = {
    "a layer": "def fn(): return torch.nn.Linear(1, 1)",
    "an optimizer": "def fn(ps): return torch.optim.SGD(ps)",
    "nbddp's own DDP": "def fn(model): return nbddp.wrap(model)",
    "a library": "def fn():\n import accelerate",
    "part of torch": "def fn():\n from torch.distributed.fsdp import fully_shard",
    "in a function that it calls": "def inner(): return torch.compile(len)\ndef fn(): return inner()",
    "in a function inside of it": "def fn():\n def inner(): return torch.nn.ReLU()\n return inner",
    "a model": "net = torch.nn.Linear(1, 1)\ndef fn(): return net(1)",
    "a class with a layer as its base": "class Net(torch.nn.Module): pass\ndef fn(): return Net",
    "code from text": "def fn(): exec('import torch.optim')",
}
IMPORTS = "import torch, nbddp, numpy as np\nimport torch.distributed as dist\n"


@pytest.mark.parametrize("kind", [*LIGHT, *HEAVY])
def test_what_trains_needs_the_last_imports(cell: Cells, kind: str) -> None:
    from nbddp import payload

    fn = cell(IMPORTS + (LIGHT | HEAVY)[kind]).fn
    assert payload.prepare((fn, (), {})).packed.is_light() == (kind in LIGHT)


@pytest.mark.parametrize(
    ("source", "light"),
    [
        ("print(rank)", True),
        ("x = await fetch()", True),
        ("model = torch.nn.Linear(1, 1)", False),
        ("import pandas", False),
        ("def broken(", False),
    ],
)
def test_the_source_of_a_cell_counts_as_well(source: str, light: bool) -> None:
    assert is_light((), (), [source]) == light
