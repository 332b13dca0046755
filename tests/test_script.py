"""A whole script on every rank runs as under torchrun, and sees nothing of the notebook."""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

import nbddp
from tests.support import Cells, Notebook, out


def script(path: Path | str, argv: Any = (), *, nprocs: int = 2, **options: Any) -> nbddp.Run:
    return nbddp.run_script(path, argv, nprocs=nprocs, device="cpu", show=False, **options)


def test_a_script_is_main_with_arguments_import_path_and_process_group_of_its_own(in_folder: Path) -> None:
    (in_folder / "sub").mkdir()
    (in_folder / "sub" / "sibling.py").write_text("X = 5")
    (in_folder / "data.txt").write_text("by relative path")
    (in_folder / "sub" / "main.py").write_text("""\
import json, os, pickle, sys
import sibling, torch, torch.distributed as dist
names = sorted(k for k in globals() if not k.startswith("__"))
class Thing: number: int
assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
assert Thing.__annotations__ == {"number": int}
assert not dist.is_initialized()
dist.init_process_group("gloo")
dist.all_reduce(total := torch.ones(1))
dist.destroy_process_group()
print(json.dumps([__name__, __file__, sys.argv, sibling.X, open("data.txt").read(), names, __spec__ is None,
                  sys.path[0], os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], total.item()]))
""")
    before = (list(sys.argv), list(sys.path))
    run = script("sub/main.py", lambda rank: ["--lr", 0.1, Path("x"), rank])
    assert (run.value, run.remark) == (None, "")
    folder, names = str(in_folder / "sub"), ["dist", "json", "os", "pickle", "sibling", "sys", "torch"]
    for rank in range(2):
        argv = ["sub/main.py", "--lr", "0.1", "x", str(rank)]
        first = ["__main__", f"{folder}/main.py", argv, 5, "by relative path", names, True]
        assert json.loads(run.logs(rank)) == [*first, folder, str(rank), str(rank), "2", 2.0]
    assert (sys.argv, sys.path) == before


def test_a_module_is_main_as_with_python_m(in_folder: Path) -> None:
    (in_folder / "own_package").mkdir()
    (in_folder / "own_package" / "sibling.py").write_text("X = 5")
    file = in_folder / "own_package" / "__main__.py"
    file.write_text("""\
import json, os, pickle, sys, torch.distributed as dist
from .sibling import X
class Thing: pass
assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
print(json.dumps([__name__, __spec__.name, sys.argv, X, dist.is_initialized(), os.environ["RANK"]]))
if len(sys.argv) == 1: raise ValueError("no arguments")
""")
    run = script("own_package", ["--lr", 0.1], module=True)
    for rank in range(2):
        argv = [str(file), "--lr", "0.1"]
        assert json.loads(run.logs(rank)) == ["__main__", "own_package.__main__", argv, 5, False, str(rank)]
    assert run.name == "own_package"
    with pytest.raises(nbddp.RankError, match="no arguments") as caught:
        script("own_package", module=True)
    assert _frames(caught.value.cause) == [(str(file), 6)]
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
    assert "doesn't exist" in notebook.cell("%ddp run gone.py").evalue
    assert "--nprox" in notebook.cell("%ddp run --nprox 2 train.py").shown
    assert "required: script" in notebook.cell("%ddp run -n 2").shown
    notebook.ok("os.chdir(home)")


def test_exit_code_0_is_a_success_and_3_a_failure(in_folder: Path) -> None:
    for ending in ("", "sys.exit()", "sys.exit(0)", "raise SystemExit"):
        (in_folder / "a.py").write_text(f"import sys\nprint('worked')\n{ending}\n")
        run = script("a.py")
        assert (run.state, run.logs(1)) == ("finished", "worked\n")
    Path("a.py").write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(1000)")
    going = script("a.py", wait=False)
    with pytest.raises(nbddp.RankDied, match=r"rank 1 of 2 called sys.exit\(3\)") as caught:
        going.wait()
    assert caught.value.exitcode == 3
    (in_folder / "a.py").write_text("import sys\nsys.exit('no data')")
    with pytest.raises(nbddp.RankDied, match="no data"):
        script("a.py")


def _frames(error: BaseException) -> list[tuple[str, int | None]]:
    return [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]


def test_a_scripts_error_shows_only_its_frames_and_none_of_pythons_import_system(in_folder: Path, cell: Cells) -> None:
    file, import_module = str(in_folder / "a.py"), importlib.__file__
    Path("bad.py").write_text("1 / 0\n")
    found = []
    for source in (
        "def f():\n    return {}['gone']\n\nf()\n",
        "class Own(Exception): pass\nraise Own('of the script')\n",
        "x = 1\ny = (\n",
        "import importlib, runpy\nimportlib.import_module('gone')\n",
        "import runpy\nrunpy.run_path('bad.py')\n",
    ):
        Path(file).write_text(source)
        with pytest.raises(nbddp.RankError) as caught:
            script("a.py")
        found.append(caught.value.cause)
    missing, own, syntax, not_found, in_other = found
    assert isinstance(missing, KeyError)
    assert _frames(missing) == [(file, 4), (file, 2)]
    assert (type(own).__name__, str(own), _frames(own)) == ("Own", "of the script", [(file, 2)])
    assert isinstance(syntax, SyntaxError)
    assert (syntax.filename, syntax.lineno, _frames(syntax)) == (file, 2, [])
    assert [name for name, _ in _frames(not_found)] == [file, import_module]
    assert [name for name, _ in _frames(in_other)] == [file, "bad.py"]
    train = cell("import importlib\ndef train(): importlib.import_module('gone')").train
    with pytest.raises(nbddp.RankError, match="No module named 'gone'") as caught:
        nbddp.run(train, nprocs=1, device="cpu", show=False)
    assert [name for name, _ in _frames(caught.value.cause)] == [train.__code__.co_filename, import_module]


def test_a_wrong_call_is_refused_before_a_process_starts(in_folder: Path) -> None:
    (in_folder / "a.py").write_text("")
    before = nbddp.last_run()
    for path, argv, words in (
        ("gone.py", (), "doesn't exist"),
        (".", (), "is a folder"),
        ("a.py", "--lr 1", "list of arguments"),
        ("a.py", 5, "list"),
    ):
        with pytest.raises(nbddp.LaunchError, match=words):
            script(path, argv)
    assert nbddp.last_run() is before
    assert os.path.exists("a.py")
