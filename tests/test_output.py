"""What ranks print: whole lines, each with its rank; and a flood blocks nothing."""

import re
from pathlib import Path

import pytest

import nbddp
from tests.support import Cells, Notebook, run


def test_logs_of_all_ranks_are_labelled_line_by_line_and_kept_after_a_crash(cell: Cells) -> None:
    names = cell("""
        import os, signal, nbddp
        def train(crash):
            for i in range(3): print('line', i, 'of', nbddp.rank())
            nbddp.barrier()
            if crash and nbddp.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
            nbddp.barrier()
    """)
    done = run(names.train, False)
    lines = "".join(f"[rank {rank}] line {i} of {rank}\n" for rank in range(2) for i in range(3))
    assert done.logs() == lines
    with pytest.raises(ValueError, match="no rank 2"):
        done.logs(2)
    with pytest.raises(nbddp.RankDied, match="line 2 of 1"):
        run(names.train, True)
    failed = nbddp.last_run()
    assert (failed.logs(), failed.logs(1)) == (lines, "line 0 of 1\nline 1 of 1\nline 2 of 1\n")


def test_carriage_return_bars_are_folded(cell: Cells) -> None:
    pytest.importorskip("tqdm")
    names = cell("""
        import sys, time, tqdm
        def train():
            print("before")
            for _ in tqdm.tqdm(range(1000), file=sys.stdout, mininterval=0): pass
            print("10%\\r50%\\r100%")
            print("after")
    """)
    done = run(names.train)
    lines = done.logs(0).splitlines()
    assert [lines[0], lines[-2], lines[-1]] == ["before", "100%", "after"]
    assert len(lines) <= 5
    assert re.search(r"100%.*1000/1000", done.logs(0))
    assert "\r" not in done.logs()


def test_two_hundred_mb_of_output_keep_at_least_the_last_4_mib(cell: Cells) -> None:
    """Scaled to 200 MB: what is kept must not grow with it, neither here nor, after the run, on the disk."""
    names = cell("""
        import os
        def train():
            block = b"".join(b"%099d\\n" % i for i in range(10_000))
            for _ in range(200): os.write(1, block)
    """)
    done = run(names.train, nprocs=1, timeout=100)
    first, dropped, rest = re.split(r"\n\[([\d,]+) bytes were dropped\]\n", done.logs(0))
    assert len(first) == 256 << 10
    assert 4 << 20 <= len(rest) <= 8 << 20
    assert len(first) + int(dropped.replace(",", "")) + len(rest) == 200_000_000
    assert rest.endswith(f"{9999:099d}\n")


def test_rank_0s_output_is_shown_in_the_cell_while_it_runs(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok("""
        import nbddp, time, os
        def train(path):
            print("early", nbddp.rank())
            while not os.path.exists(path): time.sleep(0.01)
            print("late", nbddp.rank())
    """)
    message = notebook.begin(f"nbddp.run(train, ('{tmp_path}/go',), nprocs=2, device='cpu')")
    shown = notebook.shown_so_far(message, until="early 0")
    assert "late" not in shown
    (tmp_path / "go").touch()
    shown += notebook.end_of(message).shown
    assert [text in shown for text in ("late 0\n", "early 1", "<Run")] == [True, False, False]  # the panel says it
