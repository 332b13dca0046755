"""Whole scripts on every rank train bit for bit as under torchrun, and see nothing of the notebook."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import nbddp
from tests.support import Cells

PROGRAMS = Path(__file__).parent / "programs"
# So torch's own processes now and then end when all is done and they leave (2.13).
ABORTED = "terminate called without an active exception"
Found = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun sets it for its ranks; sums in another order would end in other bits."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def script(path: Path | str, argv: Any = (), *, nprocs: int = 2, **options: Any) -> nbddp.Run:
    return nbddp.run_script(path, argv, nprocs=nprocs, device="cpu", show=False, **options)


def written(folder: Path, ranks: int = 2) -> Found:
    """What every rank wrote at its end; takes it away."""
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    for rank in range(ranks):
        (folder / f"{rank}.json").unlink()
    return found


# One torchrun for all programs: each in turn, in a process of its own that is forked before the program's first line.
# After a failure torchrun starts the ranks again, which go on with the program that failed: the first fails on purpose,
# another may find its port taken, since torchrun has chosen it long before.
_IN_TURN = """
import ctypes, json, os, runpy, signal, sys, time, torch._dynamo  # what every program would import

def wait(pid, written, program):  # torch may never end: it frees a DDP model's group with the GIL, which gloo waits for
    ends_at = None
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if ends_at is None and os.path.exists(written):
            ends_at = time.monotonic() + 5
        elif ends_at is not None and time.monotonic() > ends_at:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)
        time.sleep(0.01)
    assert ended[1] == 0, program

def meet(folder):
    open(f"{folder}/done-{os.environ['RANK']}", "w").close()
    while len([name for name in os.listdir(folder) if name.startswith("done-")]) < 2: time.sleep(0.01)

for folder, program, argv in json.loads(sys.argv[1]):
    if os.path.exists(f"{folder}/done-{os.environ['RANK']}"):
        continue
    if pid := os.fork():
        wait(pid, f"{folder}/{os.environ['RANK']}.json", program)
        meet(folder)  # else a rank may find the store of the program before, as it ends
        continue
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # when torchrun ends this rank
    os.chdir(folder)
    sys.argv, sys.path[0] = [program, *argv], folder
    runpy.run_path(program, run_name="__main__")
    sys.stdout.flush()
    os._exit(0)
"""


def under_torchrun(folder: Path, turns: Sequence[tuple[str, Sequence[str]]]) -> list[Found]:
    """What the ranks of each program write at their end."""
    folders = [folder / str(number) for number in range(len(turns))]
    for own in folders:
        shutil.copytree(PROGRAMS, own)
    (folder / "in_turn.py").write_text(_IN_TURN)
    listed = [(str(own), str(own / program), argv) for own, (program, argv) in zip(folders, turns)]
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=3"]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),  # it leaves a folder there
        # Else its restarted gloo ranks read their dead predecessors' addresses, and wait for them.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [sys.executable, "-m", *command, str(folder / "in_turn.py"), json.dumps(listed)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=150)
    assert done.returncode == 0 or ABORTED in done.stderr, done.stderr
    return [written(own) for own in folders]


def by_itself(path: Path, argv: Sequence[str]) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(3):
        done = subprocess.run([sys.executable, str(path), *argv], capture_output=True, text=True, env=env, timeout=100)
        if ABORTED not in done.stderr:
            break
    assert done.returncode == 0, done.stderr


def assert_trained(found: Found, ranks: int = 2) -> None:
    assert [f["world_size"] for f in found] == [ranks] * ranks
    assert [f["threads"] for f in found] == [1] * ranks
    assert len({f["after"] for f in found}) == 1, "the ranks hold different weights"
    assert all(f["before"] != f["after"] for f in found), "the weights did not move"
    assert all(0 < loss < 100 for f in found for loss in f["losses"])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def beside(in_folder: Path) -> Path:
    """The programs in the current directory, for those that open files by relative path."""
    shutil.copytree(PROGRAMS, in_folder, dirs_exist_ok=True)
    return in_folder


# ---------------------------------------------------------------------------- equal to torchrun


PROGRAM_ARGV = {
    "multigpu_torchrun.py": ["3", "10", "--out", "."],
    "min_ddp.py": ["--epochs", "2", "--out", "."],
    "globals_config.py": ["--out_dir=.", "--steps=4", "--learning_rate=0.02"],
    "hydra_app.py": ["lr=0.2", "out=.", "hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none"],
}
CRASHES = ["6", "2", "--out", ".", "--crash_at", "3"]


@pytest.fixture(scope="module")
def torchruns(_warm: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What the ranks of each program write under torchrun."""
    turns = {"resumed": ("multigpu_torchrun.py", CRASHES), "imagenet_style.py": ("imagenet_style.py", [])}
    turns |= {program: (program, argv) for program, argv in PROGRAM_ARGV.items()}
    if importlib.util.find_spec("hydra") is None:
        del turns["hydra_app.py"]
    return dict(zip(turns, under_torchrun(tmp_path_factory.mktemp("torchrun"), list(turns.values()))))


@pytest.fixture(scope="module")
def spawned(_warm: None, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the ranks that the program starts itself write under plain Python."""
    folder = tmp_path_factory.mktemp("spawn")
    shutil.copytree(PROGRAMS, folder, dirs_exist_ok=True)
    by_itself(folder / "multigpu_spawn.py", [str(free_port()), str(folder)])
    return written(folder)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAM_ARGV)
def test_a_program_trains_to_the_same_numbers_as_under_torchrun(
    beside: Path, torchruns: dict[str, Found], program: str
) -> None:
    if program.startswith("hydra"):
        pytest.importorskip("hydra", reason="hydra-core is not installed")
    expected, argv = torchruns[program], PROGRAM_ARGV[program]
    assert_trained(expected)

    run = script(program, argv)
    assert run.value is None
    assert written(beside) == expected

    for leftover in beside.glob("snapshot.pt"):
        leftover.unlink()
    script(beside / program, argv, init=False)
    assert written(beside) == expected


@pytest.mark.slow
def test_resuming_after_a_failure_gives_the_same_numbers_as_under_torchrun(
    beside: Path, torchruns: dict[str, Found]
) -> None:
    expected = torchruns["resumed"]
    assert_trained(expected)
    assert len(expected[0]["losses"]) == 3 * 256 // 2 // 32  # epochs 3 to 5: the snapshot is that of epoch 2

    run = script("multigpu_torchrun.py", CRASHES, max_restarts=1)
    assert written(beside) == expected
    assert "Resuming training from snapshot at Epoch 3" in run.logs(0)


@pytest.mark.slow
def test_a_resumed_program_gives_the_numbers_of_an_uninterrupted_one_under_torchrun(
    beside: Path, torchruns: dict[str, Found]
) -> None:
    expected = torchruns["imagenet_style.py"]
    assert_trained(expected)
    assert expected[0]["losses"] == expected[1]["losses"]  # reduced over the ranks

    script("imagenet_style.py", ["--stop-after", 1])
    first = written(beside)
    run = script("imagenet_style.py")
    second = written(beside)
    assert run.logs() == "[rank 0] epochs 2 to 3\n"
    for rank in range(2):
        assert first[rank]["losses"] + second[rank]["losses"] == expected[rank]["losses"]
        assert first[rank]["before"] == expected[rank]["before"]
        assert second[rank]["after"] == expected[rank]["after"] != first[rank]["after"]


@pytest.mark.slow
def test_a_program_that_calls_mp_spawn_trains_to_the_same_numbers(beside: Path, spawned: Found) -> None:
    """As it is, on a port that it chooses itself."""
    assert_trained(spawned)
    script("multigpu_spawn.py", [str(free_port()), "."], nprocs=1)
    assert written(beside) == spawned


@pytest.mark.slow
def test_a_tutorial_pasted_into_a_cell_trains_to_the_same_numbers(
    beside: Path, spawned: Found, cell: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one word changed."""
    source = (beside / "multigpu_spawn.py").read_text()
    assert source.count("    mp.spawn(") == 1
    monkeypatch.setattr(sys, "argv", ["kernel", str(free_port()), "."])
    monkeypatch.syspath_prepend(str(beside))
    cell(source.replace("    mp.spawn(", "    nbddp.spawn(").replace("import os\n", "import os\nimport nbddp\n", 1))
    assert written(beside) == spawned


# ---------------------------------------------------------------------------- a script's surroundings


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


def test_each_rank_can_have_its_own_arguments(in_folder: Path) -> None:
    (in_folder / "a.py").write_text("import sys; print(sys.argv[1:])")
    run = script("a.py", lambda rank: ["--part", rank], nprocs=3)
    assert [run.logs(rank) for rank in range(3)] == [f"['--part', '{rank}']\n" for rank in range(3)]


def test_an_edited_sibling_module_runs_its_new_code(in_folder: Path) -> None:
    (in_folder / "a.py").write_text("import b; print(b.X)")
    for value in ("one", "twoo"):
        (in_folder / "b.py").write_text(f"X = {value!r}")
        assert script("a.py").logs(0) == f"{value}\n"


@pytest.mark.slow
def test_dataloader_workers_find_the_scripts_dataset(in_folder: Path) -> None:
    (in_folder / "a.py").write_text(
        """\
from torch.utils.data import DataLoader, Dataset
class Tens(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return i * 10
if __name__ == "__main__":
    for how in ("fork", "spawn"):
        print([b.tolist() for b in DataLoader(Tens(), batch_size=2, num_workers=1, multiprocessing_context=how)])
"""
    )
    assert script("a.py").logs(1) == "[[0, 10], [20, 30]]\n" * 2


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


def test_an_exception_arrives_with_its_own_fields() -> None:
    with pytest.raises(nbddp.RankError) as caught:
        nbddp.run(b"\xff".decode, nprocs=2, device="cpu", show=False)
    assert isinstance(caught.value.cause, UnicodeDecodeError)
    assert (caught.value.cause.start, caught.value.cause.reason) == (0, "invalid start byte")


def test_a_scripts_error_shows_only_the_scripts_frames(in_folder: Path) -> None:
    (in_folder / "a.py").write_text("def f():\n    return {}['gone']\n\nf()\n")
    with pytest.raises(nbddp.RankError) as caught:
        script("a.py")
    assert isinstance(caught.value.cause, KeyError)
    frames = []
    tb = caught.value.cause.__traceback__
    while tb is not None:
        frames.append((tb.tb_frame.f_code.co_filename, tb.tb_lineno))
        tb = tb.tb_next
    assert frames == [(str(in_folder / "a.py"), 4), (str(in_folder / "a.py"), 2)]


def test_a_syntax_error_names_the_scripts_file_and_line(in_folder: Path) -> None:
    (in_folder / "a.py").write_text("x = 1\ny = (\n")
    with pytest.raises(nbddp.RankError) as caught:
        script("a.py")
    assert isinstance(caught.value.cause, SyntaxError)
    assert (caught.value.cause.filename, caught.value.cause.lineno) == (str(in_folder / "a.py"), 2)


@pytest.mark.parametrize(
    ("path", "argv", "words"),
    [
        ("gone.py", (), "is not there"),
        (".", (), "is a folder"),
        ("a.py", "--lr 1", "list of words"),
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


@pytest.mark.slow
def test_a_group_that_a_fast_rank_destroys_at_once_does_not_fail_slow_ranks(in_folder: Path) -> None:
    (in_folder / "a.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.destroy_process_group()\n"
    )
    for _ in range(10):  # by chance: without care one run in ten failed on a busy machine
        runs = [script("a.py", nprocs=3, wait=False) for _ in range(3)]
        assert [run.wait().state for run in runs] == ["finished"] * 3


_OWN_RANKS = """
import multiprocessing, os, sys, time, torch, torch.distributed as dist, torch.multiprocessing as mp
def name_store(port):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", port)
def main(rank, where, port, folder):
    if where == "child": name_store(port)
    for turn in range(2):
        # Else it finds the store of the first turn, and loses it when rank 0 closes it.
        while rank and turn and not os.path.exists(f"{folder}/closed"): time.sleep(0.01)
        dist.init_process_group("gloo", rank=rank, world_size=2)
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        dist.destroy_process_group()
        if rank == 0: open(f"{folder}/closed", "w").close()
    with open(f"{folder}/{rank}", "w") as file: file.write(str(total.item()))
if __name__ == "__main__":
    for turn in sys.argv[1:]:
        method, where, port, folder = turn.split(",")
        if where == "parent": name_store(port)
        mp.start_processes(main, (where, port, folder), nprocs=2, start_method=method)
    assert "TORCHELASTIC_USE_AGENT_STORE" in os.environ or "RANK" not in os.environ
"""
OWN_RANKS_WAYS = [(method, where) for where in ("child", "parent") for method in ("fork", "spawn")]


def own_ranks_turn(folder: Path, method: str, where: str) -> str:
    """An argument of the script above; its ranks write into a new folder."""
    (own := folder / f"{method}-{where}").mkdir()
    return f"{method},{where},{free_port()},{own}"


def totals(folder: Path, method: str, where: str) -> list[str]:
    return [(folder / f"{method}-{where}" / str(rank)).read_text() for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "where"), OWN_RANKS_WAYS)
def test_a_script_that_starts_its_own_ranks_uses_its_own_port(tmp_path: Path, method: str, where: str) -> None:
    """``os.environ.setdefault``, as ignite's ``idist.Parallel(nproc_per_node=2)`` has it, too."""
    (tmp_path / "own.py").write_text(_OWN_RANKS)
    script(tmp_path / "own.py", [own_ranks_turn(tmp_path, method, where)], nprocs=1, timeout=100)
    assert totals(tmp_path, method, where) == ["3.0", "3.0"]


@pytest.mark.slow
def test_that_script_does_the_same_under_plain_python(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(_OWN_RANKS)
    by_itself(tmp_path / "own.py", [own_ranks_turn(tmp_path, *way) for way in OWN_RANKS_WAYS])
    assert [totals(tmp_path, *way) for way in OWN_RANKS_WAYS] == [["3.0", "3.0"]] * 4
