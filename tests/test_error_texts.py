"""Error texts: what happened and what to do come first, with the user's own lines, at a bounded length."""

import re
import signal
import traceback

import IPython
import pytest

import nbddp
from tests.support import OUR_FILES, Cells, Notebook, error_of, run


@pytest.mark.parametrize("deep", [0, 40])
def test_a_crash_shows_only_the_users_lines(cell: Cells, deep: int) -> None:
    names = cell("""
        import ctypes, nbddp
        def crash(deep):
            if deep: crash(deep - 1)
            ctypes.string_at(0)
        def train(deep):
            print("this far", end="", flush=True)
            if nbddp.rank() == 0:
                crash(deep)
            nbddp.barrier()
    """)
    text = str(error_of(names.train, deep, kind=nbddp.RankDied))
    head, *stack = text.partition("\nIts last lines")[0].splitlines()
    assert (head, stack[2]) == ("rank 0 of 2 crashed in native code (SIGSEGV)", "    crash(deep)")
    assert stack[0] == "It was here (most recent call last):"
    assert stack[1].endswith(", line 9, in train")
    assert stack[-2].endswith("in string_at")
    assert stack[-4].endswith(", line 5, in crash")
    assert text.endswith("\nIts last lines of output:\nthis far")
    last = nbddp.last_run()
    for shown in (text, last.logs(0)):
        assert not re.search(f"{OUR_FILES.pattern}|multiprocessing|Extension modules", shown)
    assert "in crash" in last.logs(0)


@pytest.mark.parametrize("thread", ["of Python", "of C"])
def test_a_crash_in_another_thread_says_where_the_rank_was(cell: Cells, thread: str) -> None:
    names = cell("""
        import ctypes, nbddp, threading
        def train(thread):
            libc, number = ctypes.CDLL(None), ctypes.byref(ctypes.c_ulong())
            if thread == "of Python": threading.Thread(target=ctypes.string_at, args=(0,)).start()
            else:  # strlen(NULL)
                libc.pthread_create(number, None, ctypes.cast(libc.strlen, ctypes.c_void_p), None)
            libc.sleep(100)
    """)
    text = str(error_of(names.train, thread, kind=nbddp.RankDied))
    head, words, *stack = text.splitlines()
    assert re.fullmatch(r"rank \d of 2 crashed in native code \(SIGSEGV\)", head)
    assert words == "It was here (most recent call last):"
    assert ("in string_at" if thread == "of Python" else ", in train") in "\n".join(stack)
    assert "Thread 0x" not in text


def test_a_crash_is_located_after_code_that_has_restored_all_handlers() -> None:
    """As every Lightning Trainer does."""
    with nbddp.Session(nprocs=1, device="cpu") as session:
        session.cell("import ctypes, signal")
        session.cell("for n in signal.valid_signals() - {9, 19}: signal.signal(n, signal.getsignal(n))")
        with pytest.raises(nbddp.NbddpError, match="crashed in native code") as caught:
            session.cell("def crash(): ctypes.string_at(0)\ncrash()")
        assert "in crash" in str(caught.value)


def test_a_crash_of_a_ranks_child_is_in_the_ranks_output_and_does_not_locate_its_own_end(cell: Cells) -> None:
    names = cell("""
        import ctypes, os, signal
        def train(killed):
            pid = os.fork()
            if not pid: ctypes.string_at(0)
            code = os.WTERMSIG(os.waitpid(pid, 0)[1])
            if killed: os.kill(os.getpid(), signal.SIGKILL)
            return code
    """)
    ended = run(names.train, False, nprocs=1)
    assert ended.value == signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in ended.logs(0)
    error = error_of(names.train, True, nprocs=1, kind=nbddp.RankDied)
    assert [text in str(error) for text in ("was killed by SIGKILL", "It was here")] == [True, False]
    assert "Fatal Python error: Segmentation fault" in nbddp.last_run().logs(0)


def test_a_cells_traceback_folds_library_frames(notebook: Notebook) -> None:
    notebook.ok("""
        import nbddp, torch
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return {}["image"]  # the culprit
        def train():
            for _ in torch.utils.data.DataLoader(Data(), 2): pass
        def forward():
            torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(2, 3))(x := torch.ones(1, 2))
        def during():
            try: forward()
            except RuntimeError as error: raise ValueError("outer") from error
    """)
    shown = notebook.cell("nbddp.run(train, nprocs=1, device='cpu', show=False)").traceback
    lines = re.sub(r"\d+", "N", shown).splitlines()
    fold = lines.index("    [N frames in torch]")
    assert "in train()" in "".join(lines[:fold])
    assert "__getitem__(" in "".join(lines[fold:])
    assert [text in shown for text in ("# the culprit", "-packages/")] == [True, False]
    shown = notebook.cell("nbddp.run(forward, nprocs=1, device='cpu', show=False)").traceback
    assert re.search(r"on rank 0:\s+x +Tensor \(1, 2\)", shown)  # of the user's line, not of torch's
    shown = notebook.cell("nbddp.run(during, nprocs=1, device='cpu', show=False)").traceback
    counted = "frames in torch]", "-packages/torch", "skipping hidden"  # the second: torch's line that raised
    assert [shown.count(text) for text in counted] == [1, 1, 0]
    assert shown.index("frames in torch]") < shown.index("direct cause") < shown.index("ValueError: outer")


def test_what_cannot_be_sent_is_shown_with_the_users_lines_only(notebook: Notebook) -> None:
    shown = notebook.cell('log_file = open("/dev/null")\nnbddp.run(lambda: log_file, nprocs=2, show=False)')
    assert (shown.ename, "direct cause" in shown.traceback) == ("PayloadError", False)
    assert "log_file: an open file" in shown.evalue
    shown = notebook.cell("""
        class Model:
            def __getstate__(self): raise ValueError("not yet")
        nbddp.run(print, (Model(),), nprocs=2, show=False)
    """)
    for text in ('raise ValueError("not yet")', "direct cause", "PayloadError"):
        assert text in shown.traceback
    assert not OUR_FILES.search(shown.traceback)


def test_a_recursions_error_shows_six_frames_and_says_how_many_are_left_out(notebook: Notebook, cell: Cells) -> None:
    """IPython shows all thousand, which takes it half a minute."""
    source = "import nbddp\ndef even(n): return odd(n + 1)\ndef odd(n): return even(n + 1)"
    note = re.compile(r"\[9\d\d frames omitted between the first three and the last three\]")
    notebook.ok(source)
    reply = notebook.cell("nbddp.run(even, (0,), nprocs=2, device='cpu', show=False)")
    assert reply.ename == "RankError"
    assert note.search(reply.traceback) or IPython.version_info < (8,)  # which shows no notes
    assert len(re.findall(r"in (even|odd)\(", reply.traceback)) == (3 if IPython.version_info < (8,) else 6)
    assert "RecursionError: maximum recursion depth exceeded" in reply.traceback
    assert reply.seconds < 20
    error = error_of(cell(source).even, 0, nprocs=1)
    assert [name.split(" = ")[0] for name in error.locals] == ["n + 1", "n"]  # those of the innermost frame
    assert note.search("".join(traceback.format_exception(error)))
    with nbddp.Session(nprocs=1, device="cpu") as session:
        session.cell(source)
        with pytest.raises(nbddp.NbddpError) as caught:
            session.cell("even(0)")
    assert note.search("\n".join(caught.value._render_traceback_())) or IPython.version_info < (8,)
