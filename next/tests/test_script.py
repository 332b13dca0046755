"""A whole script on every rank runs as under torchrun, and sees nothing of the notebook."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import nbddp
from tests.support import Cells, Notebook, out


def script(path: Path | str, argv: Any = (), *, nprocs: int = 2, **options: Any) -> nbddp.Run:
    return nbddp.run_script(path, argv, nprocs=nprocs, device="cpu", show=False, **options)


def test_a_script_is_main_with_its_own_arguments_and_import_path(in_folder: Path) -> None:
    (in_folder / "sub").mkdir()
    (in_folder / "sub" / "sibling.py").write_text("X = 5")
    (in_folder / "data.txt").write_text("by relative path")
    (in_folder / "sub" / "main.py").write_text(
        """\
import json, os, pickle, sys
import sibling
names = sorted(k for k in globals() if not k.startswith("__"))
class Thing:
    pass
assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
print(json.dumps([__name__, __file__, sys.argv, sibling.X, open("data.txt").read(), names, __spec__ is None,
                  sys.path[0], os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]]))
"""
    )
    before = (list(sys.argv), list(sys.path))
    run = script("sub/main.py", ["--lr", 0.1, Path("x")])
    folder = str(in_folder / "sub")
    for rank in range(2):
        assert json.loads(run.logs(rank)) == [
            "__main__",
            f"{folder}/main.py",
            ["sub/main.py", "--lr", "0.1", "x"],
            5,
            "by relative path",
            ["json", "os", "pickle", "sibling", "sys"],
            True,
            folder,
            str(rank),
            str(rank),
            "2",
        ]
    assert (sys.argv, sys.path) == before


def test_a_module_is_main_as_with_python_m(in_folder: Path) -> None:
    (in_folder / "own_package").mkdir()
    (in_folder / "own_package" / "sibling.py").write_text("X = 5")
    file = in_folder / "own_package" / "__main__.py"
    file.write_text(
        """\
import json, os, pickle, sys, torch.distributed as dist
from .sibling import X
class Thing:
    pass
assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
print(json.dumps([__name__, __spec__.name, sys.argv, X, dist.is_initialized(), os.environ["RANK"]]))
if len(sys.argv) == 1: raise ValueError("no arguments")
"""
    )
    run = script("own_package", ["--lr", 0.1], module=True)
    for rank in range(2):
        argv = [str(file), "--lr", "0.1"]
        assert json.loads(run.logs(rank)) == ["__main__", "own_package.__main__", argv, 5, False, str(rank)]
    assert run.name == "own_package"
    with pytest.raises(nbddp.RankError, match="no arguments") as caught:
        script("own_package", module=True)
    assert _frames(caught.value.cause) == [(str(file), 7)]
    with pytest.raises(nbddp.RankError, match="No module named gone"):
        script("gone", module=True)


def test_ddp_run_takes_torchruns_command_line(notebook: Notebook, in_folder: Path) -> None:
    (in_folder / "train.py").write_text(
        "import os, sys, torch.distributed as dist\n"
        "if os.environ['RANK'] == '0': print(sys.argv, os.environ['WORLD_SIZE'], dist.is_initialized())\n"
        "sys.exit()\n"
    )
    notebook.ok(f"%load_ext nbddp\nimport nbddp, os\nhome = os.getcwd()\nos.chdir({str(in_folder)!r})")
    arguments = "--lr 0.1 -- -n 5 --nproc_per_node=7 'two words'"
    ran = "['{}', '--lr', '0.1', '--', '-n', '5', '--nproc_per_node=7', 'two words'] {} False"
    for line, name, nprocs in (
        ("-n 3 --device cpu train.py", "train.py", 3),
        ("torchrun --standalone --nproc-per-node=1 train.py", "train.py", 1),
        ("--standalone --nproc_per_node gpu -m train", f"{in_folder}/train.py", 2),  # on a machine without one
    ):
        reply = notebook.ok(f"run = %ddp run {line} {arguments}\nrun.state, run.name, run.value")
        assert ran.format(name, nprocs) in reply.shown
        assert out(reply) == f"('finished', '{'train' if '-m' in line else 'train.py'}', None)"
    assert "does not exist" in notebook.cell("%ddp run gone.py").evalue
    assert "--nprox" in notebook.cell("%ddp run --nprox 2 train.py").shown
    assert "required: script" in notebook.cell("%ddp run -n 2").shown
    notebook.ok("os.chdir(home)")


def test_each_rank_can_have_its_own_arguments(in_folder: Path) -> None:
    (in_folder / "a.py").write_text("import sys; print(sys.argv[1:])")
    run = script("a.py", lambda rank: ["--part", rank], nprocs=3)
    assert [run.logs(rank) for rank in range(3)] == [f"['--part', '{rank}']\n" for rank in range(3)]


def test_a_script_opens_its_own_group_and_has_none_before(in_folder: Path) -> None:
    (in_folder / "a.py").write_text(
        """\
import torch, torch.distributed as dist
assert not dist.is_initialized()
dist.init_process_group("gloo")
dist.all_reduce(total := torch.ones(1))
dist.destroy_process_group()
print(total.item())
"""
    )
    run = script("a.py")
    assert (run.value, run.remark) == (None, "")
    assert [run.logs(rank) for rank in range(2)] == ["2.0\n"] * 2


@pytest.mark.long
def test_processes_that_a_script_starts_find_its_classes(in_folder: Path) -> None:
    """DataLoader's workers by fork and by spawn, and ``mp.spawn``'s."""
    (in_folder / "a.py").write_text(
        """\
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset
class Tens(Dataset):
    def __len__(self): return 2
    def __getitem__(self, i): return i * 10
def child(i, data): print(data[i])
if __name__ == "__main__":
    mp.set_start_method("spawn")
    for how in ("fork", "spawn"):
        print([b.tolist() for b in DataLoader(Tens(), num_workers=1, multiprocessing_context=how)])
    mp.spawn(child, (Tens(),), nprocs=1)
"""
    )
    assert script("a.py", nprocs=1).logs(0) == "[[0], [10]]\n" * 2 + "0\n"


SPAWNS = """
import os, sys
import torch, torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

def main(rank, world_size, port, out):
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(rank)  # DDP sends rank 0's weights to all
    model = DDP(torch.nn.Linear(20, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = torch.nn.functional.mse_loss(model(torch.rand(32, 20)), torch.rand(32, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.save((losses, model.module.weight.tolist()), f"{out}/{rank}.pt")
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, args=(2, *sys.argv[1:]), nprocs=2)
"""


@pytest.mark.long
def test_a_tutorial_pasted_into_a_cell_trains_to_the_same_numbers(
    in_folder: Path, cell: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one word changed; and as it is, as a script of one process."""
    (in_folder / "train.py").write_text(SPAWNS)
    found = []
    for how in ("python", "run_script", "cell"):
        (in_folder / how).mkdir()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            argv = [str(listener.getsockname()[1]), how]
        if how == "python":
            subprocess.run([sys.executable, "train.py", *argv], check=True, timeout=100)
        elif how == "run_script":
            script("train.py", argv, nprocs=1)
        else:
            monkeypatch.setattr(sys, "argv", ["kernel", *argv])
            cell("import nbddp\n" + SPAWNS.replace("    mp.spawn(", "    nbddp.spawn("))
        found.append([torch.load(f"{how}/{rank}.pt") for rank in range(2)])
    (losses, weights), (other_losses, same_weights) = found[0]
    assert losses != other_losses
    assert weights == same_weights
    assert found == [found[0]] * 3


# ---------------------------------------------------------------------------- ends


@pytest.mark.parametrize("ending", ["", "sys.exit()", "sys.exit(0)", "raise SystemExit"])
def test_sys_exit_0_is_a_success(in_folder: Path, ending: str) -> None:
    (in_folder / "a.py").write_text(f"import sys\nprint('worked')\n{ending}\n")
    run = script("a.py")
    assert run.state == "finished"
    assert run.logs(1) == "worked\n"


def test_exit_code_3_is_a_failure(in_folder: Path) -> None:
    (in_folder / "a.py").write_text(
        "import os, sys\nif os.environ['RANK'] == '1': sys.exit(3)\nimport time\ntime.sleep(60)"
    )
    began = time.monotonic()
    with pytest.raises(nbddp.RankDied, match=r"rank 1 of 2 called sys.exit\(3\)") as caught:
        script("a.py")
    assert caught.value.exitcode == 3
    assert time.monotonic() - began < 30
    (in_folder / "a.py").write_text("import sys\nsys.exit('no data')")
    with pytest.raises(nbddp.RankDied, match="no data"):
        script("a.py")


def _error(path: str) -> BaseException:
    with pytest.raises(nbddp.RankError) as caught:
        script(path)
    return caught.value.cause


def _frames(error: BaseException) -> list[tuple[str, int | None]]:
    return [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]


def test_a_scripts_error_shows_only_the_scripts_frames(in_folder: Path) -> None:
    file = str(in_folder / "a.py")
    Path(file).write_text("def f():\n    return {}['gone']\n\nf()\n")
    error = _error("a.py")
    assert isinstance(error, KeyError)
    assert _frames(error) == [(file, 4), (file, 2)]
    Path(file).write_text("class Own(Exception): pass\nraise Own('of the script')\n")
    error = _error("a.py")
    assert (type(error).__name__, str(error), _frames(error)) == ("Own", "of the script", [(file, 2)])
    Path(file).write_text("x = 1\ny = (\n")
    error = _error("a.py")
    assert isinstance(error, SyntaxError)
    assert (error.filename, error.lineno, _frames(error)) == (file, 2, [])


def test_an_import_error_shows_nothing_of_pythons_import_system(in_folder: Path, cell: Cells) -> None:
    (in_folder / "bad.py").write_text("1 / 0\n")
    (in_folder / "a.py").write_text("import importlib, runpy\nimportlib.import_module('gone')\n")
    (in_folder / "b.py").write_text("import runpy\nrunpy.run_path('bad.py')\n")
    import_module = importlib.__file__
    assert [file for file, _ in _frames(_error("a.py"))] == [str(in_folder / "a.py"), import_module]
    assert [file for file, _ in _frames(_error("b.py"))] == [str(in_folder / "b.py"), "bad.py"]
    train = cell("import importlib\ndef train(): importlib.import_module('gone')").train
    with pytest.raises(nbddp.RankError, match="No module named 'gone'") as caught:
        nbddp.run(train, nprocs=1, device="cpu", show=False)
    assert [file for file, _ in _frames(caught.value.cause)] == [train.__code__.co_filename, import_module]


@pytest.mark.parametrize(
    ("path", "argv", "words"),
    [
        ("gone.py", (), "does not exist"),
        (".", (), "is a folder"),
        ("a.py", "--lr 1", "list of arguments"),
        ("a.py", 5, "list"),
    ],
)
def test_a_wrong_call_is_refused_before_a_process_starts(in_folder: Path, path: str, argv: Any, words: str) -> None:
    (in_folder / "a.py").write_text("")
    before = nbddp.last_run()
    with pytest.raises(nbddp.LaunchError, match=words):
        script(path, argv)
    assert nbddp.last_run() is before
    assert os.path.exists("a.py")
