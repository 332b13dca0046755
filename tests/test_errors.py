"""The first failure is the one that is raised, at once, with its type, its rank and the cell's lines."""

from __future__ import annotations

import contextlib
import multiprocessing.context
import os
import pickle
import resource
import shutil
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import nbddp
from nbddp.forkserver import server as forkserver
from nbddp.kernel import run as runs
from tests.support import Cells, Notebook, marked_pids, run, start, wait_until

IN_THE_CELL_S = 0.5


def _error(fn: Callable[..., Any], *args: Any, **options: Any) -> nbddp.RankError:
    with pytest.raises(nbddp.RankError) as caught:
        run(fn, *args, **options)
    return caught.value


# ---------------------------------------------------------------------------- what is raised


def test_the_cause_is_the_original_exception(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def helper(values):
            return values["missing"]
        def train():
            if nbddp.rank() == 1:
                helper({})
            nbddp.barrier()
    """)
    error = _error(names.train, nprocs=3)
    assert (error.rank, error.world_size) == (1, 3)
    assert type(error.cause) is KeyError
    assert error.cause is error.__cause__
    assert error.cause.args == ("missing",)
    assert str(error) == "rank 1 of 3 failed: KeyError: 'missing'"
    frames = traceback.extract_tb(error.cause.__traceback__)
    assert [frame.name for frame in frames] == ["train", "helper"]
    assert [frame.line for frame in frames] == ["helper({})", 'return values["missing"]']


def test_an_exception_class_of_a_cell_is_the_same_class(cell: Cells) -> None:
    names = cell("""
        class DataError(ValueError):
            def __init__(self, path, line):
                super().__init__(f"{path}:{line}")
                self.path, self.line = path, line
        class KeywordOnly(Exception):
            def __init__(self, *, code):
                super().__init__(f"code {code}")
                self.code = code
        def train(kind):
            if kind == "odd init":
                raise DataError("a.csv", 7)
            raise KeywordOnly(code=5)
    """)
    error = _error(names.train, "odd init").cause
    assert type(error) is names.DataError
    assert (error.path, error.line, str(error)) == ("a.csv", 7, "a.csv:7")
    error = _error(names.train, "keyword only").cause
    assert type(error) is names.KeywordOnly
    assert (error.code, str(error)) == (5, "code 5")


def test_causes_contexts_and_groups_of_an_exception_are_kept(cell: Cells) -> None:
    names = cell("""
        def inner(): return 1 / 0
        def train():
            try:
                inner()
            except ZeroDivisionError as error:
                raise RuntimeError("outer") from error
        def group():
            raise ExceptionGroup("several", [ValueError(1), TypeError(2)])
        def during():
            try:
                inner()
            except ZeroDivisionError:
                {}["k"]
    """)
    cause = _error(names.train).cause
    assert type(cause) is RuntimeError
    assert type(cause.__cause__) is ZeroDivisionError
    assert traceback.extract_tb(cause.__cause__.__traceback__)[-1].line == "def inner(): return 1 / 0"
    cause = _error(names.during).cause
    assert type(cause) is KeyError
    assert type(cause.__context__) is ZeroDivisionError
    if sys.version_info >= (3, 11):
        cause = _error(names.group).cause
        assert [type(e) for e in cause.exceptions] == [ValueError, TypeError]


def test_an_exception_that_does_not_pickle_keeps_name_text_and_lines(cell: Cells) -> None:
    names = cell("""
        import threading
        class Holder(Exception):
            def __init__(self, text):
                super().__init__(text)
                self.lock = threading.Lock()
        def train(): raise Holder("still readable")
    """)
    error = _error(names.train)
    assert type(error.cause).__name__ == "Holder"
    assert "still readable" in str(error)
    assert traceback.extract_tb(error.cause.__traceback__)[-1].name == "train"


def test_torch_errors_and_builtin_errors_keep_their_type(cell: Cells) -> None:
    names = cell("""
        import torch
        def shapes(): return torch.ones(2, 3) @ torch.ones(2, 3)
        def syntax(): compile("a b", "f", "exec")
        def unicode(): b"\\xff".decode()
        def recursion(): return recursion()
    """)
    assert type(_error(names.shapes).cause) is RuntimeError
    assert type(_error(names.syntax).cause) is SyntaxError
    assert type(_error(names.unicode).cause) is UnicodeDecodeError
    assert type(_error(names.recursion).cause) is RecursionError


def test_a_traceback_has_no_frame_of_nbddp_or_multiprocessing(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def train(): nbddp.log(loss="text")
        def collective():
            import torch.distributed as dist
            dist.all_reduce("no tensor")
    """)
    for function in (names.train, names.collective):
        files = [frame.filename for frame in traceback.extract_tb(_error(function).cause.__traceback__)]
        assert files[0].startswith("/tmp/ipykernel_")
        assert not [file for file in files if "/nbddp/" in file or "multiprocessing" in file]


def test_a_rank_error_can_be_pickled(cell: Cells) -> None:
    names = cell("def train(): raise ValueError('v')")
    error = _error(names.train)
    again = pickle.loads(pickle.dumps(error))
    assert (again.rank, again.world_size, str(again)) == (error.rank, 2, str(error))
    assert type(again.cause) is ValueError


# ---------------------------------------------------------------------------- the first one


def test_the_first_failure_in_time_is_raised(cell: Cells) -> None:
    """The peers' "connection closed by peer" follows from it, and is not what went wrong."""
    names = cell("""
        import nbddp, torch, torch.distributed as dist
        def train():
            dist.barrier()
            if nbddp.rank() == 2:
                raise ValueError("the cause")
            try:
                dist.all_reduce(torch.ones(1))
            except Exception as error:
                raise RuntimeError("a consequence") from error
    """)
    for _ in range(3):
        error = _error(names.train, nprocs=4)
        assert (error.rank, type(error.cause)) == (2, ValueError)


def test_an_earlier_failure_is_raised_even_if_it_is_reported_later(cell: Cells) -> None:
    names = cell("""
        import nbddp, time
        class Slow(Exception):
            def __reduce__(self):
                time.sleep(0.05)  # packing takes longer than the other rank's whole failure
                return Slow, self.args
        def train():
            nbddp.barrier()
            if nbddp.rank() == 1:
                raise Slow("first")
            time.sleep(0.02)
            raise ValueError("second")
    """)
    assert _error(names.train).rank == 1


@pytest.mark.parametrize("others", ["sleep", "collective", "c call", "swallow", "loader"])
def test_the_error_is_in_the_cell_within_half_a_second(cell: Cells, others: str) -> None:
    names = cell("""
        import collections, itertools, time, nbddp, torch, torch.distributed as dist
        class Slow(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, i):
                time.sleep(100)
        def train(others):
            dist.barrier()
            if nbddp.rank() == 0:
                time.sleep(0.1)
                raise ValueError(time.monotonic())
            if others == "sleep":
                time.sleep(100)
            elif others == "collective":
                dist.all_reduce(torch.ones(1))
            elif others == "c call":
                collections.deque(itertools.count(), maxlen=0)  # holds the GIL for ever
            elif others == "loader":
                list(torch.utils.data.DataLoader(Slow(), num_workers=2))
            else:
                while True:
                    try:
                        time.sleep(100)
                    except BaseException:
                        pass
    """)
    taken = []
    for _ in range(3):  # the machine may be busy with something else once
        error = _error(names.train, others, nprocs=3)
        taken.append(time.monotonic() - error.cause.args[0])
        assert type(error.cause) is ValueError
        if taken[-1] < IN_THE_CELL_S:
            return
    raise AssertionError(f"{others}: {taken} s from the raise to the cell")


def test_finally_blocks_of_the_other_ranks_run(cell: Cells, in_folder: Any) -> None:
    names = cell("""
        import nbddp, time
        def train():
            nbddp.barrier()
            if nbddp.rank() == 0:
                raise ValueError
            try:
                time.sleep(100)
            finally:
                open(f"closed-{nbddp.rank()}", "w").close()
    """)
    _error(names.train, nprocs=3)
    assert sorted(os.listdir(in_folder)) == ["closed-1", "closed-2"]


# ---------------------------------------------------------------------------- ranks that die


def _death(fn: Callable[..., Any], *args: Any, **options: Any) -> nbddp.RankDied:
    with pytest.raises(nbddp.RankDied) as caught:
        run(fn, *args, **options)
    return caught.value


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT, signal.SIGBUS])
def test_a_death_by_signal_is_named(cell: Cells, number: signal.Signals) -> None:
    names = cell("""
        import os, signal, nbddp
        def train(number):
            if nbddp.rank() == 1:
                os.kill(os.getpid(), number)
            nbddp.barrier()
    """)
    error = _death(names.train, int(number), nprocs=3)
    assert (error.rank, error.exitcode, error.signal_name) == (1, -number, number.name)
    assert str(error).startswith("rank 1 of 3 ")
    assert number.name in str(error)
    if number == signal.SIGKILL:
        assert "memory" in str(error)


def test_a_segmentation_fault_shows_where_it_was(cell: Cells) -> None:
    names = cell("""
        import ctypes, nbddp
        def crash(): ctypes.string_at(0)
        def train():
            if nbddp.rank() == 0:
                crash()
            nbddp.barrier()
    """)
    error = _death(names.train)
    assert (error.rank, error.signal_name) == (0, "SIGSEGV")
    last = nbddp.last_run()
    assert last is not None
    assert "in crash" in last.logs(0)


def test_the_error_names_the_exit_code_and_rank(cell: Cells) -> None:
    names = cell("""
        import os, sys, nbddp
        def leave(code):
            if nbddp.rank() == 1:
                sys.exit(code)
            nbddp.barrier()
        def vanish(code):
            if nbddp.rank() == 1:
                os._exit(code)
            nbddp.barrier()
    """)
    error = _death(names.leave, 3)
    assert (error.rank, error.exitcode, error.signal_name) == (1, 3, None)
    assert "sys.exit(3)" in str(error)
    error = _death(names.leave, "no data found")
    assert error.exitcode == 1
    assert "no data found" in str(error)
    error = _death(names.vanish, 0)
    assert (error.rank, error.exitcode) == (1, 0)
    assert "no result" in str(error)
    error = _death(names.vanish, 9)
    assert error.exitcode == 9


def test_sys_exit_0_ends_a_rank_without_a_value(cell: Cells) -> None:
    """A script's ``sys.exit(main())`` with success is a success."""
    names = cell("import sys\ndef train(code): sys.exit(code)")
    assert run(names.train, 0).values == [None, None]
    assert run(names.train, None).values == [None, None]


def test_a_rank_that_dies_while_unpacking_is_reported_as_that(cell: Cells) -> None:
    names = cell("""
        import os
        class Bomb:
            def __init__(self, how): self.how = how
            def __reduce__(self): return explode, (os.getpid(), self.how)
        def explode(pid, how):
            if os.getpid() == pid:
                return None
            if how == "raise":
                raise OSError("cannot open the archive")
            os._exit(7)
        def train(bomb): pass
    """)
    with pytest.raises(nbddp.PayloadError, match="cannot open the archive"):
        run(names.train, names.Bomb("raise"))
    error = _death(names.train, names.Bomb("exit"))
    assert error.exitcode == 7
    assert "unpack" in str(error)


def test_a_module_that_ranks_cannot_import_is_named(cell: Cells) -> None:
    module = types.ModuleType("only_in_the_notebook")
    exec("class Thing:\n    pass", module.__dict__)
    sys.modules["only_in_the_notebook"] = module
    try:
        with pytest.raises(nbddp.PayloadError, match="only_in_the_notebook"):
            run(cell("def train(thing): pass").train, module.Thing())
    finally:
        del sys.modules["only_in_the_notebook"]


def test_a_rank_killed_from_outside_is_named_with_sigkill(cell: Cells) -> None:
    names = cell("import time\ndef train(): time.sleep(100)")
    going = start(names.train, nprocs=3)
    os.kill(going.pids[2], signal.SIGKILL)
    with pytest.raises(nbddp.RankDied, match="rank 2 of 3 was killed by SIGKILL"):
        going.wait(30)
    assert going.state == "failed"


def test_a_suspended_rank_is_not_waited_for_after_a_failure(cell: Cells) -> None:
    """SIGSTOP: it answers nothing, not even SIGINT."""
    names = cell("""
        import os, signal, nbddp, time
        def train():
            nbddp.barrier()
            if nbddp.rank() == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.1)
            raise ValueError("fails")
    """)
    began = time.monotonic()
    assert _error(names.train).rank == 0
    assert time.monotonic() - began < 15


def test_a_keyboardinterrupt_raised_by_the_users_code_is_an_error(cell: Cells) -> None:
    """torch's launcher swallows it, and exits 0."""
    names = cell("""
        import nbddp
        def train():
            if nbddp.rank() == 1:
                raise KeyboardInterrupt("mine")
            nbddp.barrier()
    """)
    error = _error(names.train)
    assert error.rank == 1
    assert type(error.cause) is KeyboardInterrupt


# ---------------------------------------------------------------------------- times


@pytest.mark.slow
def test_a_timeout_says_where_every_rank_was(cell: Cells) -> None:
    names = cell("""
        import nbddp, time
        def stuck(): time.sleep(100)
        def train():
            if nbddp.rank() == 0:
                nbddp.barrier()
            else:
                stuck()
    """)
    began = time.monotonic()
    with pytest.raises(nbddp.RunTimeout) as caught:
        run(names.train, timeout=4.5)
    assert 4.5 < time.monotonic() - began < 30
    text = str(caught.value)
    assert "4.5 s" in text
    assert "rank 0" in text
    assert "rank 1" in text
    assert "in stuck" in text
    assert "time.sleep(100)" in text


@pytest.mark.slow
def test_pg_timeout_is_the_timeout_of_collectives(cell: Cells) -> None:
    names = cell("""
        import nbddp, time, torch, torch.distributed as dist
        def train():
            if nbddp.rank() == 0:
                dist.all_reduce(torch.ones(1))
            time.sleep(100)
    """)
    began = time.monotonic()
    error = _error(names.train, pg_timeout=3)
    assert error.rank == 0
    assert isinstance(error.cause, RuntimeError)
    assert 2.9 < time.monotonic() - began < 30


# ---------------------------------------------------------------------------- bad arguments

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("nprocs 0", {"nprocs": 0}, "device_count"),
    ("nprocs negative", {"nprocs": -1}, "too small"),
    ("nprocs float", {"nprocs": 2.0}, "whole number"),
    ("nprocs bool", {"nprocs": True}, "whole number"),
    ("nprocs text", {"nprocs": "2"}, "whole number"),
    ("unknown backend", {"backend": "carrier-pigeon"}, "torch knows"),
    ("backend this torch lacks", {"backend": "mpi"}, "built without mpi"),
    ("backend no text", {"backend": 3}, "backend is a name"),
    ("nccl on the cpu", {"backend": "nccl"}, "nccl"),
    ("gpus with cpu", {"gpus": [0]}, "exclude"),
    ("device index", {"device": "cuda:1"}, "gpus=\\[1\\]"),
    ("device unknown", {"device": "abacus"}, "not a torch device"),
    ("start method fork", {"start_method": "fork"}, "forkserver"),
    ("children kept by a fork server", {"keep_children": True, "start_method": "forkserver"}, "'spawn'"),
    ("start method unknown", {"start_method": "magic"}, "'forkserver' or 'spawn'"),
    ("timeout zero", {"timeout": 0}, "too small"),
    ("timeout text", {"timeout": "1h"}, "seconds"),
    ("pg_timeout negative", {"pg_timeout": -3}, "too small"),
    ("max_restarts negative", {"max_restarts": -1}, "too small"),
    ("seed float", {"seed": 1.5}, "whole number"),
    ("env not text", {"env": {"A": 1}}, "strings"),
    ("args text", {"args": "abc"}, "tuple"),
    ("args too many", {"args": (1, 2, 3)}, "cannot be called"),
    ("kwargs unknown", {"kwargs": {"nope": 1}}, "nope"),
    ("kwargs list", {"kwargs": [1]}, "dict"),
]


@pytest.mark.parametrize(("options", "match"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_arguments_are_refused_at_once(cell: Cells, options: dict[str, Any], match: str) -> None:
    names = cell("def train(a=1): return a")
    before = marked_pids()
    if "nccl" in match and torch.cuda.is_available():
        pytest.skip("nccl is there on this machine")
    with pytest.raises(nbddp.LaunchError, match=match):
        nbddp.run(names.train, **{"device": "cpu", "show": False, **options})
    assert marked_pids() == before


@pytest.mark.parametrize("bad", [None, 3, "train", "a generator", "a coroutine"])
def test_a_non_function_generator_or_coroutine_is_refused(cell: Cells, bad: Any) -> None:
    names = cell("def generator(): yield 1\nasync def coroutine(): pass")
    bad = {"a generator": names.generator, "a coroutine": names.coroutine}.get(bad, bad)
    with pytest.raises(nbddp.LaunchError) as caught:
        run(bad)
    if bad is None:
        assert "run(train), not run(train())" in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_gpus_on_a_machine_without_any_are_refused(cell: Cells) -> None:
    names = cell("def train(): pass")
    with pytest.raises(nbddp.LaunchError, match="no GPU"):
        nbddp.run(names.train, gpus=[9], show=False)
    with pytest.raises(nbddp.LaunchError, match="sees none"):
        nbddp.run(names.train, device="cuda", show=False)


@pytest.mark.gpu
def test_missing_or_repeated_gpus_are_refused_by_number(cell: Cells) -> None:
    names = cell("def train(): pass")
    count = torch.cuda.device_count()
    with pytest.raises(nbddp.LaunchError, match=f"there is no GPU {count}"):
        nbddp.run(names.train, gpus=[count], show=False)
    with pytest.raises(nbddp.LaunchError, match=f"nprocs={count}"):
        nbddp.run(names.train, nprocs=count + 1, show=False)
    with pytest.raises(nbddp.LaunchError, match=r"names GPU 0 twice.*backend='gloo'"):
        nbddp.run(names.train, gpus=[0, 0], show=False)


def test_the_next_run_works_after_every_kind_of_failure(cell: Cells) -> None:
    names = cell("""
        import os, signal
        def raises(): raise ValueError
        def dies(): os.kill(os.getpid(), signal.SIGKILL)
        def good(): return 1
    """)
    for bad in (names.raises, names.dies):
        with pytest.raises(nbddp.NbddpError):
            run(bad)
        assert run(names.good).values == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before the run", "once it was seen to be there"])
def test_a_killed_fork_server_is_replaced_and_leaves_nothing(
    when: str, cell: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And multiprocessing's own restart leaves nothing: no socket, no start method that is fixed."""
    names = cell("def good(): return 1")
    run(names.good)
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    pid = forkserver.pid()
    if when == "before the run":
        _kill_the_fork_server()
    else:
        looks = iter([_kill_the_fork_server])
        running = forkserver._current.running
        monkeypatch.setattr(forkserver._current, "running", lambda: (running(), next(looks, bool)())[0])
    assert run(names.good, timeout=60).values == [1, 1]
    assert forkserver.pid() != pid
    assert multiprocessing.get_start_method(allow_none=True) is None


# ---------------------------------------------------------------------------- as a cell shows it


def test_a_cells_traceback_shows_only_the_users_lines(notebook: Notebook) -> None:
    notebook.ok("""
        import nbddp
        def helper(x):
            return 1 / x  # the culprit
        def train():
            nbddp.barrier()
            if nbddp.rank() == 1:
                helper(0)
            nbddp.barrier()
    """)
    reply = notebook.cell("nbddp.run(train, nprocs=4, device='cpu')")
    assert reply.status == "error"
    assert reply.ename == "RankError"
    assert reply.evalue == "rank 1 of 4 failed: ZeroDivisionError: division by zero"
    assert "rank 1 of 4 failed" in reply.traceback.splitlines()[0]
    assert "return 1 / x  # the culprit" in reply.traceback
    assert "helper(0)" in reply.traceback
    assert "ZeroDivisionError: division by zero" in reply.traceback
    assert "/nbddp/" not in reply.traceback
    assert "multiprocessing" not in reply.traceback
    assert len(reply.traceback.splitlines()) < 40


def test_a_launch_error_in_a_cell_is_short(notebook: Notebook) -> None:
    reply = notebook.cell("import nbddp\nnbddp.run(lambda: 1, nprocs=0)")
    assert reply.ename == "LaunchError"
    assert "/nbddp/" not in reply.traceback
    assert "nbddp.run(lambda: 1, nprocs=0)" in reply.traceback
    assert len(reply.traceback.splitlines()) < 15


def test_an_error_stops_run_all(notebook: Notebook) -> None:
    """ipyparallel's cell ends "ok", and the cells after it train on nothing."""
    first = notebook.begin("import nbddp\nnbddp.run(lambda: 1 / 0, nprocs=2, device='cpu')", stop_on_error=True)
    second = notebook.begin("after_error = True")
    assert notebook.end_of(first).status == "error"
    assert notebook.end_of(second).status == "aborted"
    assert notebook.ok("'after_error' in globals()").shown.strip() == "False"


def test_an_exception_class_of_a_cell_can_be_caught_in_the_cell(notebook: Notebook) -> None:
    reply = notebook.ok("""
        import nbddp
        class Diverged(Exception): pass
        def train(): raise Diverged(7)
        try:
            nbddp.run(train, nprocs=2, device='cpu', show=False)
        except nbddp.RankError as error:
            print(type(error.cause) is Diverged, error.cause.args)
    """)
    assert reply.shown == "True (7,)\n"


def _kill_the_fork_server() -> None:
    server = forkserver.pid()
    assert server is not None
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(server) or psutil.Process(server).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.slow
def test_ranks_outlive_their_killed_fork_server(cell: Cells, in_folder: Path) -> None:
    train = cell("""
        import nbddp, os, time
        def train():
            print("here", flush=True)
            while not os.path.exists("go_on"): time.sleep(0.01)
            return nbddp.reduce(1.0, op="sum")
    """).train
    going = start(train)
    wait_until(lambda: "here" in going.logs(0) and "here" in going.logs(1))
    _kill_the_fork_server()
    time.sleep(0.3)
    assert run(cell("def one(): return 1").one).values == [1, 1]  # from a new one
    assert (going.state, going._state.rank_states()) == ("running", ["running", "running"])
    (in_folder / "go_on").touch()
    assert going.wait(30).values == [2.0, 2.0]


def test_the_death_of_a_rank_that_outlived_its_fork_server_is_reported(cell: Cells) -> None:
    going = start(cell("import time\ndef train():\n    time.sleep(1000)").train, nprocs=3)
    _kill_the_fork_server()
    time.sleep(0.2)
    began = time.monotonic()
    os.kill(going.pids[1], signal.SIGKILL)
    with pytest.raises(nbddp.RankDied, match="rank 1 of 3 ended with an unknown exit code"):
        going.wait()
    assert time.monotonic() - began < 10


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="another process's limit can be set on Linux alone")
@pytest.mark.parametrize("spare", range(8))
def test_a_fork_server_out_of_file_descriptors_refuses_a_rank_and_lives_on(
    cell: Cells, in_folder: Path, spare: int
) -> None:
    wait = cell("import os, time\ndef wait():\n    while not os.path.exists('go_on'): time.sleep(0.01)").wait
    other = start(wait)
    server = forkserver.pid()
    assert server is not None
    limits = resource.prlimit(server, resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir(f"/proc/{server}/fd"))) + 1
    resource.prlimit(server, resource.RLIMIT_NOFILE, (used + spare, limits[1]))
    one = cell("def one(): return 1").one
    try:
        with contextlib.suppress(nbddp.LaunchError):  # or by another server, if this one could not even say so
            assert run(one).values == [1, 1]
    finally:
        resource.prlimit(server, resource.RLIMIT_NOFILE, limits)
    assert (other.state, psutil.pid_exists(server)) == ("running", True)
    assert run(one).values == [1, 1]
    (in_folder / "go_on").touch()
    assert other.wait(30).state == "finished"


@pytest.mark.parametrize("spare", [3, 8, 14, 22, 30, 40])
def test_a_launch_with_too_few_file_descriptors_leaves_other_runs_running(
    cell: Cells, in_folder: Path, spare: int
) -> None:
    wait = cell("import os, time\ndef wait():\n    while not os.path.exists('go_on'): time.sleep(0.01)").wait
    other = start(wait)
    server = forkserver.pid()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + spare, limits[1]))
    try:
        with contextlib.suppress(nbddp.LaunchError):
            run(cell("def one(): return 1").one, nprocs=3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (other.state, forkserver.pid()) == ("running", server)
    (in_folder / "go_on").touch()
    assert other.wait(30).state == "finished"


def test_a_failure_is_raised_rather_than_its_echo_on_other_ranks(cell: Cells) -> None:
    names = cell("""
        import nbddp, os, time
        class Slow(Exception):
            def __reduce__(self):
                time.sleep(0.3)  # its report comes after its peers' echoes
                return Slow, ()
        def train():
            if nbddp.rank() == 1:
                import torch.distributed as dist
                dist.destroy_process_group()  # tears the connections before anything is raised
                raise Slow
            nbddp.barrier()
    """)
    with pytest.raises(nbddp.RankError) as raised:
        run(names.train, nprocs=3)
    assert (raised.value.rank, type(raised.value.cause).__name__) == (1, "Slow")


def test_runs_work_after_the_temporary_folder_was_cleaned(cell: Cells) -> None:
    """Systems remove what is old from /tmp, and a notebook may be open for weeks."""
    one = cell("def one(): return 1").one
    folder = get_temp_dir()
    try:
        for start_method in ("forkserver", "spawn", "forkserver"):
            shutil.rmtree(folder, ignore_errors=True)
            assert run(one, start_method=start_method).values == [1, 1]
    finally:
        os.makedirs(folder, mode=0o700, exist_ok=True)  # multiprocessing in this process needs it


@pytest.mark.parametrize("what", ["_thread.start_new_thread", "threading.Thread.start"])
def test_a_system_without_threads_is_a_launch_error_and_later_runs_work(
    cell: Cells, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    one = cell("def one(): return 1").one

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(what, refuse)
    with pytest.raises(nbddp.LaunchError, match="can't start new thread"):
        run(one)
    assert not runs._live
    monkeypatch.undo()
    assert run(one).values == [1, 1]
