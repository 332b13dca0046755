"""A rank has the process state of a plain child started at the same moment, not what the fork server had once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbddp
from nbddp import process_state
from tests.present_state import Program
from tests.support import Cells, run, script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="affinity and limits are Linux's")
STATES = {
    "TZ": "os.environ['TZ'] = 'America/New_York'",
    "a private umask": "os.umask(0o077)",
    "nice": "os.nice(2)",
    "a limit of files": "resource.setrlimit(resource.RLIMIT_NOFILE, (500, 20_000))",
    "small files": "resource.setrlimit(resource.RLIMIT_FSIZE, (9 << 30, resource.RLIM_INFINITY))",
    "large stacks": "resource.setrlimit(resource.RLIMIT_STACK, (16 << 20, resource.RLIM_INFINITY))",
    "one core": "os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})",
    "TMPDIR": "os.environ['TMPDIR'] = folder",
}


@pytest.fixture(scope="module")
def _program(_warm: None) -> Iterator[Program]:
    program = Program()
    assert program.value("value = ranks(lambda: 1)") == [[1, 1], ""]  # the fork server begins with the usual state
    yield program
    program.close()


@pytest.fixture
def program(_program: Program) -> Program:
    """A notebook whose fork server began long ago."""
    return _program


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_a_rank_has_the_notebooks_present_state(program: Program, state: str, tmp_path: Path) -> None:
    _compare(program, STATES[state], "forkserver", tmp_path)


def test_a_spawned_rank_has_the_notebooks_present_state(program: Program, tmp_path: Path) -> None:
    _compare(program, "; ".join(STATES.values()), "spawn", tmp_path)


def _compare(program: Program, state: str, method: str, folder: Path) -> None:
    before, expected, found, after = program.value(f"""
folder = {str(folder)!r}
value = [child(f"look({{folder!r}})")]
{state}
value.append(child(f"look({{folder!r}})"))
value.append(ranks(look, folder, start_method={method!r})[0])
value.append(child(f"look({{folder!r}})"))
""")
    assert expected != before, "nothing is to be seen"
    assert found == [expected, expected]
    assert after == expected, "the run changed the notebook's own"


# ---------------------------------------------------------------------------- variables that are read at the start

SEEN = """
def seen():
    import os
    with open(f"/proc/{os.getppid()}/cmdline") as file:
        return effects(), "forkserver" if "forkserver" in file.read() else "spawn"
"""
ONLY_AT_THE_START = {
    "PYTORCH_JIT": "0",
    "TORCHDYNAMO_VERBOSE": "1",
    "TORCH_LOGS": "+graph_breaks",
    "PYTHONHASHSEED": "7",
    "PYTHONWARNINGS": "ignore::ResourceWarning",
    "OPENBLAS_NUM_THREADS": "1",
}
NEW_SERVER = "A new fork server has the present value; it imports torch once more]\n"
BY_SPAWN = "This run's ranks are started by spawn, and each imports torch itself, which takes longer]\n"
COUNTS = ": only what a process starts with, or imports torch with, counts. "


@pytest.mark.slow
def test_a_variable_read_only_at_process_start_leads_to_one_new_server(program: Program) -> None:
    """Their effect is that in a plain child of the notebook, whose environment has changed since."""
    before, expected, (found, note), (again, silence) = program.value(f"""
{SEEN}
value = [child("effects()")]
os.environ.update({ONLY_AT_THE_START!r})
value += [child("effects()"), ranks(seen), ranks(seen)]
""")
    assert {name for name in ONLY_AT_THE_START if expected[name] != before[name]} == set(ONLY_AT_THE_START)
    assert found == [[expected, "forkserver"]] * 2
    assert note == f"[{', '.join(sorted(ONLY_AT_THE_START))}{COUNTS}{NEW_SERVER}"
    assert (again, silence) == (found, "")


@pytest.mark.slow
def test_a_run_whose_env_has_such_a_variable_is_spawned(program: Program) -> None:
    expected, (found, note), (others, silence) = program.value(f"""
{SEEN}
env = {ONLY_AT_THE_START!r}
ranks(seen)  # by the present server, of the environment that the cell before left
value = [child("effects()", env), ranks(seen, env=env), ranks(seen)]
""")
    assert found == [[expected, "spawn"]] * 2
    assert note == f"[{', '.join(sorted(ONLY_AT_THE_START))}{COUNTS}{BY_SPAWN}"
    assert [method for _, method in others] == ["forkserver"] * 2
    assert silence == ""


@pytest.mark.slow
def test_a_variable_that_a_forked_rank_can_apply_needs_neither(program: Program, tmp_path: Path) -> None:
    env = {
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TZ": "Asia/Tokyo", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "NCCL_DEBUG": "INFO", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "MY_OWN": "x",
        "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(tmp_path), "WORLD_SIZE_OF_MINE": "3",
    }  # fmt: skip
    (found, note), expected = program.value(f"""
{SEEN}
def all_seen(folder): return seen(), look(folder)
folder, env = {str(tmp_path)!r}, {env!r}
value = [ranks(all_seen, folder, env=env), [child("effects()", env), child(f"look({{folder!r}})", env)]]
""")
    assert found == [[[expected[0], "forkserver"], expected[1]]] * 2
    assert note == ""


@pytest.mark.slow
def test_a_runs_environment_is_that_of_its_call_even_if_it_changes_while_it_starts(cell: Cells) -> None:
    """No new server could have it: the notebook's has changed once more."""
    names = cell("""
        import os
        def train(): return os.environ.get("PYTORCH_JIT_STATS"), os.getppid() == KERNEL
    """)
    cell(f"import os\nKERNEL = {os.getpid()}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_JIT_STATS", "1")
        going = run(names.train, wait=False)
        patch.delenv("PYTORCH_JIT_STATS")
        assert going.wait(120).values == [("1", True)] * 2


@pytest.mark.slow
def test_a_preloaded_module_sees_the_present_variables(in_folder: Path) -> None:
    packages = in_folder / "site-packages"
    packages.mkdir()
    (packages / "reads_it.py").write_text("import os\nfound = os.environ.get('READ_AT_IMPORT', 'nothing')\n")
    done = script(f"""
        import os, sys
        sys.path.append({str(packages)!r})
        import nbddp
        def found():
            import reads_it
            return reads_it.found
        nbddp.preload("reads_it")
        for value in ("a", "b", "b"):
            os.environ["READ_AT_IMPORT"] = os.environ["READ_BY_NOBODY"] = value
            run = nbddp.run(found, nprocs=1, device="cpu", show=False)
            print(run.value, "fork server" in run.logs())
    """)
    assert (done.stdout, done.stderr) == ("a True\nb True\nb False\n", "")


def test_numpys_blas_has_as_many_threads_as_its_rank(program: Program) -> None:
    """It reads OMP_NUM_THREADS when it is loaded, which is set for each rank; torch's own setting does not reach it."""
    found, expected = program.value("""
def threads():
    import numpy
    from threadpoolctl import threadpool_info
    return [i["num_threads"] for i in threadpool_info() if i["internal_api"] == "openblas"]
source = "import numpy; from threadpoolctl import threadpool_info as t; print([i['num_threads'] for i in t()])"
env = {**os.environ, "OMP_NUM_THREADS": "1"}
value = [ranks(threads), json.loads(subprocess.check_output([sys.executable, "-c", source], env=env))]
""")
    assert expected == [1]
    assert found == [[expected, expected], ""]


def test_threads_of_blas_start_when_they_are_needed(program: Program) -> None:
    """Until then they would turn for 25 ms in every rank, on cores that the ranks need to start."""
    (before, after, cores), notes = program.value("""
def threads():
    import numpy, os
    before = len(os.listdir("/proc/self/task"))
    numpy.ones((700, 700)) @ numpy.ones((700, 700))
    return before, len(os.listdir("/proc/self/task")), len(os.sched_getaffinity(0))
run = nbddp.run(threads, nprocs=1, device="cpu", show=False)
value = [run.value, run.logs()]
""")
    assert after - before == cores - 1
    assert notes == ""


def test_an_impossible_variable_name_is_refused(cell: Cells) -> None:
    for env in ({"A=B": "x"}, {"": "x"}, {"A": "x\0y"}):
        with pytest.raises(nbddp.LaunchError, match="env"):
            run(cell("def train(): pass").train, env=env)


@pytest.mark.parametrize("on_linux", [True, False])
def test_the_umask_is_read_without_being_set(on_linux: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be making a file meanwhile."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("there is no /proc")

    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "umask", pytest.fail)
            if not on_linux:
                patched.setattr(process_state, "open", refuse, raising=False)
            assert process_state.umask() == 0o027
            assert process_state.present().umask == 0o027
    finally:
        os.umask(before)
