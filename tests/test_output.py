"""Output of every rank, from Python, C and subprocesses: whole lines, labelled, and a flood blocks nothing."""

from __future__ import annotations

import os
import re
import time

import pytest

import nbddp
from tests.support import Cells, Notebook, run, start, wait_until


def test_a_flood_on_stderr_does_not_block_a_rank(cell: Cells) -> None:
    """240 kB in one burst: a rank that writes into a pipe which nobody reads stops there for ever."""
    names = cell("""
        import sys, nbddp
        def train():
            for i in range(3000):
                sys.stderr.write(f"{nbddp.rank()} {i:05d} " + "x" * 71 + "\\n")
            return "done"
    """)
    done = run(names.train, nprocs=3, timeout=60)
    assert done.values == ["done"] * 3
    for rank in range(3):
        lines = done.logs(rank).splitlines()
        assert len(lines) == 3000
        assert lines == [f"{rank} {i:05d} " + "x" * 71 for i in range(3000)]


def test_output_of_python_c_and_subprocesses_arrives_in_order(cell: Cells) -> None:
    names = cell("""
        import ctypes, os, subprocess, sys
        def train():
            print("python out")
            print("python err", file=sys.stderr)
            os.write(1, b"raw fd 1\\n")
            os.write(2, b"raw fd 2\\n")
            libc = ctypes.CDLL(None)
            libc.puts(b"from C")
            libc.fflush(None)
            subprocess.run(["echo", "from a subprocess"])
            subprocess.run("echo err of a subprocess >&2", shell=True)
            os.system("echo from a shell")
            print("no newline at the end", end="")
    """)
    done = run(names.train)
    expected = (
        "python out\npython err\nraw fd 1\nraw fd 2\nfrom C\nfrom a subprocess\nerr of a subprocess\nfrom a shell\n"
        "no newline at the end"
    )
    assert [done.logs(0), done.logs(1)] == [expected, expected]


def test_logs_of_all_ranks_are_labelled_line_by_line(cell: Cells) -> None:
    names = cell("import nbddp\ndef train():\n    for i in range(3): print('line', i, 'of', nbddp.rank())")
    done = run(names.train)
    assert done.logs() == "".join(f"[rank {rank}] line {i} of {rank}\n" for rank in range(2) for i in range(3))
    with pytest.raises(ValueError, match="no rank 2"):
        done.logs(2)


def test_threads_and_children_of_one_rank_do_not_tear_lines(cell: Cells) -> None:
    names = cell("""
        import os, threading
        def train():
            def write(letter):
                for _ in range(500):
                    os.write(1, (letter * 200 + "\\n").encode())
            threads = [threading.Thread(target=write, args=(c,)) for c in "ab"]
            [t.start() for t in threads]
            child = os.fork()
            if not child:
                write("c")
                os._exit(0)
            [t.join() for t in threads]
            os.waitpid(child, 0)
    """)
    lines = run(names.train, nprocs=1).logs(0).splitlines()
    assert sorted(set(lines)) == ["a" * 200, "b" * 200, "c" * 200]
    assert len(lines) == 1500


def test_carriage_return_bars_are_folded(cell: Cells) -> None:
    pytest.importorskip("tqdm")
    names = cell("""
        import sys, time, tqdm
        def train():
            print("before")
            for _ in tqdm.tqdm(range(1000), file=sys.stdout, mininterval=0):
                pass
            print("10%\\r50%\\r100%")
            print("after")
    """)
    done = run(names.train)
    lines = done.logs(0).splitlines()
    assert [lines[0], lines[-2], lines[-1]] == ["before", "100%", "after"]
    assert len(lines) <= 5
    assert re.search(r"100%.*1000/1000", done.logs(0))
    assert "\r" not in done.logs()


def test_output_before_a_crash_is_kept(cell: Cells) -> None:
    names = cell("""
        import os, signal, nbddp
        def train():
            print("last words, of rank", nbddp.rank())
            if nbddp.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            nbddp.barrier()
    """)
    with pytest.raises(nbddp.RankDied, match="last words, of rank 1"):
        run(names.train)
    failed = nbddp.last_run()
    assert failed is not None
    assert failed.logs(1) == "last words, of rank 1\n"


def test_logs_can_be_read_during_the_run(cell: Cells) -> None:
    names = cell("""
        import time
        def train():
            print("started", flush=True)
            time.sleep(100)
    """)
    going = start(names.train)
    wait_until(lambda: going.logs().count("started") == 2)
    going.stop(0)
    assert going.logs() == "[rank 0] started\n[rank 1] started\n"


def test_two_hundred_mb_of_output_keep_the_last_4_mib(cell: Cells) -> None:
    """Scaled to 200 MB: what is kept must not grow with it, neither here nor, after the run, on the disk."""
    names = cell("""
        import os
        def train():
            block = b"".join(b"%099d\\n" % i for i in range(10_000))
            for _ in range(200):
                os.write(1, block)
    """)
    done = run(names.train, nprocs=1, timeout=100)
    text = done.logs(0)
    first, _, rest = text.partition("\n")
    assert re.fullmatch(r"\[195,805,696 older bytes are no longer kept\]", first)
    assert len(rest) == 4 << 20
    assert rest.endswith(f"{9999:099d}\n")


def test_invalid_utf8_is_replaced_and_unicode_kept(cell: Cells) -> None:
    names = cell("""
        import os, sys
        def train():
            print("größe → 日本")
            os.write(1, b"\\xff\\xfe broken\\n")
            print("\\ud800 lone surrogate")
            sys.stdout.buffer.write(b"binary\\n")
    """)
    assert run(names.train).logs(0) == "größe → 日本\n\ufffd\ufffd broken\n\\ud800 lone surrogate\nbinary\n"


def test_closing_or_replacing_stdout_does_not_break_the_rank(cell: Cells) -> None:
    names = cell("""
        import io, os, sys
        def close():
            print("before")
            sys.stdout.close()
            return 1
        def replace():
            sys.stdout = io.StringIO()
            print("into memory")
            return 2
        def close_fd():
            os.close(1); os.close(2)
            return 3
    """)
    assert run(names.close).values == [1, 1]
    assert run(names.replace).values == [2, 2]
    assert run(names.close_fd).values == [3, 3]


def test_logging_and_warnings_are_in_the_logs(cell: Cells) -> None:
    names = cell("""
        import logging, warnings
        def train():
            logging.getLogger("mine").warning("logged")
            warnings.warn("careful")
    """)
    text = run(names.train).logs(1)
    assert "logged\n" in text
    assert "UserWarning: careful" in text


def test_stdin_of_a_rank_is_empty(cell: Cells) -> None:
    names = cell("""
        def train():
            try:
                return input()
            except EOFError:
                return "end of file"
    """)
    assert run(names.train, timeout=30).values == ["end of file"] * 2


# ---------------------------------------------------------------------------- in a cell


def test_rank_0s_output_is_shown_in_the_cell_while_it_runs(notebook: Notebook) -> None:
    notebook.ok("""
        import nbddp, time, os
        def train(path):
            print("early", nbddp.rank())
            while not os.path.exists(path):
                time.sleep(0.01)
            print("late", nbddp.rank())
    """)
    path = f"{os.environ['TMPDIR']}/go"
    message = notebook.begin(f"nbddp.run(train, ({path!r},), nprocs=2, device='cpu')")
    shown = notebook.shown_so_far(message, until="early 0")
    assert "late" not in shown
    with open(path, "w"):
        pass
    shown += notebook.end_of(message).shown
    os.unlink(path)
    assert "late 0\n" in shown
    assert "early 1" not in shown
    assert "finished after" in shown


def test_a_flood_does_not_trip_the_servers_rate_limit(notebook: Notebook) -> None:
    """Past 1000 messages a second the Jupyter server drops output, this run's and everybody's."""
    notebook.ok("""
        import nbddp
        def flood():
            for i in range(50_000):
                print("line", i)
    """)
    began = time.monotonic()
    reply = notebook.ok("r = nbddp.run(flood, nprocs=2, device='cpu')")
    seconds = time.monotonic() - began
    assert reply.streams < 40 + 40 * seconds
    assert reply.shown.count("line") > 10_000
    assert len(reply.shown) < 1 << 20
    assert notebook.ok("len(r.logs(0).splitlines()), len(r.logs(1).splitlines())").shown.strip() == "(50000, 50000)"


def test_a_machine_without_a_gpu_is_mentioned_once(notebook: Notebook) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    shown = notebook.ok("import nbddp\nnbddp.run(lambda: 1).value").shown
    assert shown.count("no GPU: 2 processes on CPU with gloo") == 1
    assert "no GPU" not in notebook.ok("nbddp.run(lambda: 1, nprocs=2).value").shown


def test_show_false_shows_nothing(notebook: Notebook) -> None:
    notebook.ok("import nbddp")
    assert notebook.ok("x = nbddp.run(lambda: print('hidden'), nprocs=2, device='cpu', show=False)").shown == ""
    assert notebook.ok("print(x.logs(0), end='')").shown == "hidden\n"
