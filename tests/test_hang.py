"""A stalled run says which rank is where, and a working run is not reported as stalled."""

import functools
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

import nbddp
from nbddp.kernel import hang
from nbddp.kernel.hang import Location, summary
from nbddp.panel import text_view
from nbddp.process.dumps import Frame
from tests.support import Cells, Notebook, error_of, gone, run, start, wait_until


def test_uneven_batches_are_named_as_the_likely_cause(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def train(batches):
            model = nbddp.wrap(torch.nn.Linear(4, 1))
            for step in range(batches[nbddp.rank()]):
                loss = model(torch.randn(2, 4)).sum()
                loss.backward()
                nbddp.log(loss=loss)
    """)
    going = start(names.train, [3, 5, 5], nprocs=3)
    expected = re.compile(
        r"rank 0 finished after step 2; ranks 1 and 2 are in (backward|DDP's forward) after step [23] "
        r"\(train, line [67]\)\. Most likely, rank 0 had fewer batches than the others\. nbddp\.loader without "
        r"exact=True gives every rank the same number\. With another loader, use .*, or nbddp\.join\(model\)\n"
    )
    text = wait_until(lambda: (found := going.stacks()) and expected.match(found) and found, what=going.stacks)
    assert "loss = model" in text or "loss.backward()" in text  # the reader's own line
    going.stop(0)


DIFFERENT_COLLECTIVES = """
    import nbddp, torch, torch.distributed as dist
    def train():
        for step in range(3):
            nbddp.log(loss=step)
            if step == 2 and nbddp.rank() == 1: dist.barrier()
            dist.all_reduce(torch.ones(1))
"""
ONLY_ONE_WRAPS = """
    import nbddp, torch, time
    def train():
        if nbddp.rank() == 0: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        time.sleep(1000)
"""
ONE_IS_LATE = """
    import nbddp, time
    def load(): time.sleep(1000)
    def train():
        nbddp.log(loss=nbddp.rank())
        if nbddp.rank() == 1: load()
        nbddp.barrier()
"""
SAME_ORDER = ". Every rank has to call the same collectives in the same order; uneven numbers of batches break that"


@pytest.mark.parametrize(
    ("source", "nprocs", "expected"),
    [
        (
            DIFFERENT_COLLECTIVES,
            2,
            "rank 0 is waiting in all_reduce after step 2 (train, line 7); rank 1 is waiting in barrier after step 2 "
            f"(train, line 6){SAME_ORDER}",
        ),
        (ONLY_ONE_WRAPS, 2, "rank 0 is in DDP's constructor (train, line 4); rank 1 is in train, line 5"),
        (
            ONE_IS_LATE,
            4,
            "ranks 0, 2, and 3 are waiting in barrier after step 0 (train, line 7); "
            "rank 1 is in load, line 3, after step 0",
        ),
    ],
    ids=["different collectives", "only one wraps", "one is late"],
)
def test_ranks_in_different_places_are_named_and_a_late_one_is_not_called_uneven(
    cell: Cells, source: str, nprocs: int, expected: str
) -> None:
    going = start(cell(source).train, nprocs=nprocs)
    wait_until(lambda: going.stacks().split("\n")[0] == expected, what=going.stacks)
    going.stop(0)


def test_a_stall_is_reported_until_it_is_over(cell: Cells, in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = cell("""
        import nbddp, os, time
        def train():
            if nbddp.rank() == 1:
                while not os.path.exists("go_on"): time.sleep(0.01)
            nbddp.barrier()
            print("on")
            while not os.path.exists("leave"): time.sleep(0.01)
    """)
    going = start(names.train)
    monkeypatch.setattr(hang, "STALL_AFTER_S", 1.0)
    told = wait_until(lambda: going._status().hang)
    expected = (
        r"Nothing has been logged or printed for \d+ s: rank 0 is waiting in barrier \(train, line 6\); "
        r"rank 1 is in train, line 5\n\n"
    )
    assert re.match(expected, told)
    assert "    nbddp.barrier()" in told
    assert going.state == "running"  # telling changes nothing
    Path("go_on").touch()
    wait_until(lambda: not going._status().hang)
    again = wait_until(lambda: going._status().hang)
    assert "both ranks are in train, line 8\n\nranks 0 and 1 are here (most recent call last)" in again
    Path("leave").touch()
    assert (going.wait().state, going._status().hang) == ("finished", "")


def test_a_collective_that_times_out_names_the_missing_rank(cell: Cells) -> None:
    names = cell("""
        import nbddp, time, torch, torch.distributed as dist
        def nap(): time.sleep(1000)
        def train():
            if nbddp.rank() == 2: nap()
            dist.all_reduce(torch.ones(1))
    """)
    error = error_of(names.train, nprocs=3, pg_timeout=2)
    assert error.rank in (0, 1)
    assert "ranks 0 and 1 failed in all_reduce (train, line 6); rank 2 is in nap, line 3" in error.where
    assert error.where in str(error)
    assert error.where in "\n".join(error._render_traceback_())


def test_a_timeout_says_where_the_ranks_were(cell: Cells) -> None:
    names = cell("import nbddp, time\ndef train():\n    if nbddp.rank(): time.sleep(99)\n    nbddp.barrier()")
    expected = r"Where the ranks were: rank 0 is waiting in barrier \(train, line 4\); rank 1 is in train, line 3\n"
    with pytest.raises(nbddp.RunTimeout, match=expected):
        run(names.train, timeout=2)


def test_a_suspended_rank_is_reported_as_giving_no_answer_also_after_the_stop_of_a_run_that_hangs(
    cell: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = cell("import nbddp\ndef train():\n    if nbddp.rank(): nbddp.barrier()\n    while True: pass")
    monkeypatch.setattr(hang, "STALL_AFTER_S", 1.0)
    going = start(names.train)
    os.kill(going.pids[1], signal.SIGSTOP)
    told = "rank 0 is in train, line 4; rank 1 is not responding"
    wait_until(lambda: going.stacks().split("\n")[0] == told, what=going.stacks)
    wait_until(lambda: told in going._status().hang)
    began = time.monotonic()
    going.stop(0.5)  # and does not keep the stop waiting
    assert time.monotonic() - began < 10
    assert [text in going._status().hang for text in (told, "while True: pass")] == [True, True]  # its stacks, too


RESTORES = """
    import nbddp, os, pathlib, signal, time
    def train(in_c):
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.getsignal(number))
        if nbddp.rank() and not in_c:
            for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1): signal.signal(number, signal.SIG_DFL)
        pathlib.Path(f"restored {nbddp.rank()}").touch()
        try:
            while not os.path.exists("go_on"): time.sleep(0.01)
            if nbddp.rank() and in_c: nbddp.barrier()
            while True: time.sleep(0.01)
        finally: pathlib.Path(f"ended {nbddp.rank()}").touch()
"""


def test_ranks_that_have_restored_all_signal_handlers_answer_and_stop(cell: Cells, in_folder: Path) -> None:
    """As every Lightning Trainer does: what is set in C, like faulthandler's handler, is gone then."""
    going = start(cell(RESTORES).train, True)
    wait_until(lambda: len(list(in_folder.glob("restored*"))) == 2)
    wait_until(lambda: going.stacks().split("\n")[0] == "both ranks are in train, line 10", what=going.stacks)
    Path("go_on").touch()  # now faulthandler answers again, also for a rank that is in a collective
    expected = "rank 0 is in train, line 12; rank 1 is waiting in barrier (train, line 11)"
    wait_until(lambda: going.stacks().split("\n")[0] == expected, what=going.stacks)
    assert not going.done()
    going.stop()
    assert (going.state, len(list(in_folder.glob("ended*")))) == ("stopped", 2)


def test_a_rank_without_a_handler_for_stacks_gives_no_answer_and_lives_on(cell: Cells, in_folder: Path) -> None:
    going = start(cell(RESTORES).train, False)
    wait_until(lambda: len(list(in_folder.glob("restored*"))) == 2)
    expected = "rank 0 is in train, line 10; rank 1 is not responding"
    for _ in range(2):
        wait_until(lambda: going.stacks().split("\n")[0] == expected, what=going.stacks)
    going.stop()
    assert (going.state, len(list(in_folder.glob("ended*")))) == ("stopped", 2)


def test_a_break_is_told_from_fewer_batches_and_a_worker_that_hangs_is_named_with_its_line(cell: Cells) -> None:
    names = cell("""
        import nbddp, subprocess, time, torch
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 16
            def __getitem__(self, i):
                if i == 5 and nbddp.rank() == 1: time.sleep(1000)  # the second worker; the first becomes idle
                return torch.ones(2)
        def train(workers, data=range(16)):
            print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
            for step, x in enumerate(torch.utils.data.DataLoader(data, 4, num_workers=workers)):
                if step == 2 and nbddp.rank() == 1: break
                nbddp.barrier()
    """)
    waits = "rank 0 is waiting in barrier (train, line 12); rank 1 "
    for workers, args, what in [
        (0, (), "finished. Most likely, rank 1 left the loop early (break or return) after batch 3. All ranks"),
        (2, (names.Data(),), "is waiting for a DataLoader worker, which is in __getitem__, line 6"),
    ]:
        going = start(names.train, workers, *args)
        wait_until(functools.partial(lambda run, text: text in run.stacks(), going, waits + what), what=going.stacks)
        assert not gone(int(wait_until(functools.partial(going.logs, 1)).split()[0]))  # nobody has killed it
        going.stop(0)


def test_an_interrupt_says_where_each_rank_was(notebook: Notebook) -> None:
    running = notebook.begin("""
        import nbddp, time
        def train():
            nbddp.barrier()
            print("here", flush=True)
            if nbddp.rank(): time.sleep(1000)
            nbddp.barrier()
        nbddp.run(train, nprocs=2, device="cpu")
    """)
    notebook.shown_so_far(running, "here")
    notebook.interrupt()
    reply = notebook.end_of(running)
    assert reply.ename == "KeyboardInterrupt"
    assert "rank 0 is waiting in barrier (train, line 6); rank 1 is in train, line 5" in reply.evalue
    assert reply.evalue.startswith("train was stopped. Where the ranks were: ")


def test_a_stop_gives_a_likely_reason_if_nothing_moves(cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "_STANDS_S", 1000.0)
    going = start(cell("import nbddp\ndef train():\n    if nbddp.rank(): nbddp.barrier()").train)
    wait_until(lambda: re.match(r"rank 0 finished; rank 1 is waiting in barrier \(train, line 3\)\n", going.stacks()))
    monkeypatch.setattr(hang, "_STANDS_S", 0.0)
    going.stop()
    told = r"rank 0 finished; rank 1 is waiting in barrier .*\. Every rank has to call the same collectives"
    assert re.search(told, going.stacks())


def _called(rank: int, function: str, line: int, *inner: Frame, step: int = -1) -> Location:
    return Location(rank, "running", (Frame("/tmp/ipykernel_1/2.py", line, function), *inner), step)


ALL_REDUCE = Frame("/venv/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce")
BARRIER = ALL_REDUCE._replace(function="barrier")


@pytest.mark.parametrize(
    ("locations", "text"),
    [
        ([Location(0, "setup"), Location(1, "setup")], "both ranks are still starting up"),
        (
            [_called(rank, "train", 6, ALL_REDUCE) for rank in range(3)] + [Location(3, "ended")],
            "ranks 0 to 2 are waiting in all_reduce (train, line 6); rank 3 ended",
        ),
        (
            [_called(0, "train", 6, ALL_REDUCE), Location(1, "finished", left_after=2)],
            "rank 0 is waiting in all_reduce (train, line 6); rank 1 finished. Most likely, rank 1 left the loop "
            "early (break or return) after batch 2. All ranks have to leave it after the same batch: decide together "
            "with nbddp.all_reduce(float(stop), 'max')",
        ),
        (
            [_called(0, "<module>", 1, BARRIER), Location(1, "outside")],
            "rank 0 is waiting in barrier (line 1); rank 1 is not part of this call. A collective over all ranks also "
            "waits for rank 1: call it on all ranks, or pass it a group that all ranks created earlier: "
            "dist.new_group([0])",
        ),
        (
            [Location(0, "unpack"), Location(1, "failed", error="ValueError: x"), Location(2, "left")],
            "rank 0 is unpacking the function and its data; rank 1 failed (ValueError: x); rank 2 called sys.exit",
        ),
    ],
)
def test_a_summary_says_what_each_rank_does_and_why_some_may_wait(locations: list[Location], text: str) -> None:
    assert summary(locations, stalled=True) == text


def test_a_place_is_the_users_innermost_line() -> None:
    torch, script = "/venv/lib/python3.11/site-packages/torch/x.py", "/home/me/train.py"
    generated = ("<eval_with_key>.1", "/tmp/torchinductor_me/ab/cd.py", threading.__file__)
    frames = [Frame(script, 7, "main"), *(Frame(file, 3, "inner") for file in (torch, *generated))]
    assert Location(0, "running", tuple(frames)).place == "main, train.py, line 7"
    assert Location(0, "running", tuple(frames[1:])).place == "inner, x.py, line 3"  # of a function that is torch's own


def test_advice_on_a_known_error_is_in_the_error_of_the_run(cell: Cells) -> None:
    error = error_of(cell("def train(): raise AssertionError('Torch not compiled with CUDA enabled')").train)
    assert error.advice.startswith("This run is on the CPU. Write .to(nbddp.device())")
    assert str(error).endswith(f"not compiled with CUDA enabled\n{error.advice}")
    assert error.advice in error._render_traceback_()


def test_a_hang_in_a_sessions_cell_is_shown(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "STALL_AFTER_S", 0.5)
    monkeypatch.setattr(text_view.TextView, "_say", lambda view, status, text: Path("told").write_text(text))
    wait = "for _ in range(1500): rank and not os.path.exists('told') and time.sleep(0.01)"
    with nbddp.Session(nprocs=2, device="cpu") as session:
        session.cell(f"import os, time\n{wait}\nnbddp.barrier()")
    assert Path("told").read_text().startswith("Nothing has been logged or printed for")
