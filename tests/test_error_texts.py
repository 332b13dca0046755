"""Error texts: what happened and what to do come first, with the user's own lines, at a bounded length."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nbddp
from nbddp import tracebacks
from nbddp.errors import CAUSE_CHARS, MESSAGE_CHARS, HostLost, LaunchError, RankError
from nbddp.history.history import History
from nbddp.kernel import failure, stacks
from nbddp.kernel.advice import advice, advice_on_a_host
from nbddp.kernel.stacks import Frame, Location
from nbddp.panel import summary
from nbddp.text import LINE_CHARS, bounded, in_a_line
from nbddp.wire import Failed, Finished
from tests.support import Cells, Notebook, run, script

HUGE = 100 << 20


def _error(fn: Any, *args: Any, **options: Any) -> nbddp.RankError:
    with pytest.raises(nbddp.RankError) as caught:
        run(fn, *args, **options)
    return caught.value


def _chain(error: BaseException) -> list[str]:
    """What a traceback shows of it, as Python itself formats it: the exceptions' own lines."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return [line for line in lines if line and not line.startswith((" ", "Traceback"))]


# ---------------------------------------------------------------------------- log


BY_NAME = "log() takes metrics by name, log(loss=0.5) or log({'val/loss': 0.5})"


@pytest.mark.parametrize("in_a_run", [True, False])
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            "log(0.5)",
            "TypeError: log() takes metrics by name, log(loss=0.5) or log({'val/loss': 0.5}), not a bare float",
        ),
        ("log(0)", "TypeError: log() takes metrics by name, log(loss=0.5) or log({'val/loss': 0.5}), not a bare int"),
        ("log(loss='a')", "TypeError: log(loss=...) takes a number, not the text 'a'"),
        (
            "log(loss={'a': 1})",
            "TypeError: log(loss=...) takes a number, not a dict; log({...}) takes a dict of metrics",
        ),
        (
            "log(loss=torch.ones(3, 2))",
            "ValueError: log(loss=...) takes one number, not a Tensor of shape (3, 2); use its mean()",
        ),
        (
            "log(loss=np.ones(3))",
            "ValueError: log(loss=...) takes one number, not a ndarray of shape (3,); use its mean()",
        ),
        ("log(loss=[1.0])", "TypeError: log(loss=...) takes a number or a tensor with one element, not list"),
        ("log(loss=None)", "TypeError: log(loss=...) takes a number or a tensor with one element, not NoneType"),
    ],
)
def test_log_says_what_it_accepts_and_shows_no_other_exception(
    cell: Cells, call: str, expected: str, in_a_run: bool
) -> None:
    train = cell(f"import nbddp, torch, numpy as np\ndef train(): nbddp.{call}").train
    if in_a_run:
        error: BaseException = _error(train, nprocs=1).cause
    else:
        with pytest.raises((TypeError, ValueError)) as caught:
            train()
        error = caught.value
    assert _chain(error) == [expected]


def test_torchs_message_about_a_single_element_is_kept(cell: Cells) -> None:
    error = _error(cell("import nbddp, torch\ndef train(): nbddp.log(x=torch.tensor(1j))").train, nprocs=1)
    assert "complex" in str(error.cause)
    assert "takes" not in str(error.cause)


# ---------------------------------------------------------------------------- what a rank does not have


def test_input_in_a_rank_says_to_pass_the_answer_as_an_argument(cell: Cells) -> None:
    error = _error(cell("def train(): return input('how many epochs? ')").train, nprocs=1)
    assert type(error.cause) is EOFError  # a program that expects the end of its input goes on
    assert str(error.cause) == (
        "input() does not work on a rank; ask in the notebook and pass the answer with run(fn, args=...)"
    )


INLINE = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}  # as every notebook kernel has it
SHOWS = """
    def train(times=2):
        import matplotlib.pyplot as plt
        for _ in range(times):
            figure, axes = plt.subplots()
            axes.plot([1, 2])
            plt.show()
        return figure, plt.get_fignums(), plt.get_backend()
"""


def test_the_matplotlib_backend_that_the_user_chose_is_kept(cell: Cells) -> None:
    finished = run(cell(SHOWS).train, 1, env={"MPLBACKEND": "svg"}, nprocs=1)
    assert finished.value[2].lower() == "svg"


@pytest.mark.slow
def test_a_preloaded_matplotlib_backend_is_replaced() -> None:
    """The fork server imports matplotlib with the notebook's environment."""
    done = script(
        f"""
        import os
        os.environ.update({INLINE!r})
        import nbddp
        {textwrap.indent(textwrap.dedent(SHOWS), " " * 8).strip()}
        nbddp.preload("matplotlib.pyplot")
        run = nbddp.run(train, nprocs=1, device="cpu", show=False)
        print(run.value[2], list(run.figures))
        """
    )
    assert done.stdout == "module://nbddp.worker.pyplot_backend ['figure']\n", done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torch.ones(1).cuda()", "nbddp.device()"),
        ("torch.ones(1).to('cuda')", "nbddp.device()"),
        ("torch.cuda.set_device(0)", "nbddp.device()"),
        ("dist.init_process_group('nccl')", "backend='gloo'"),
        ("dist.new_group(backend='nccl')", "backend='gloo'"),
    ],
)
def test_cuda_and_nccl_in_a_cpu_run_say_what_to_write_instead(cell: Cells, line: str, expected: str) -> None:
    error = _error(cell(f"import torch, torch.distributed as dist\ndef train(): {line}").train)
    assert error.advice.startswith("This run is on the CPU")
    assert expected in error.advice
    assert str(error).endswith("\n" + error.advice)


def test_a_run_on_gpus_gets_no_advice_about_the_cpu() -> None:
    error = RuntimeError("No CUDA GPUs are available")
    assert advice(error, "cpu")
    assert advice(error, "cuda") == ""


@pytest.mark.parametrize(
    ("text", "interface", "expected"),
    [
        ("NCCL error in: ProcessGroupNCCL.cpp:77, ncclSystemError: System call failed", "ib0", "NCCL_IB_DISABLE"),
        ("Gloo connectFullMesh failed with [pair.cc:144] no error", "eth0", "GLOO_SOCKET_IFNAME"),
        ("NCCL error in: ProcessGroupNCCL.cpp:77, ncclSystemError: System call failed", "", ""),
        ("shape '[2]' is invalid for input of size 3", "eth0", ""),
    ],
)
def test_an_error_between_hosts_names_the_network_interface(text: str, interface: str, expected: str) -> None:
    worker: Any = SimpleNamespace(host="gpu2", interface=interface)
    found = advice_on_a_host(RuntimeError(text), worker)
    assert expected in found
    assert ("gpu2 uses its network interface" in found) == bool(expected)
    assert ("NCCL_DEBUG" in advice(RuntimeError(text), "cuda")) == ("NCCL" in text)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE) ran for 60010 ms", True),
        ("Process group watchdog thread terminated with exception: CUDA error: device-side assert triggered", False),
    ],
)
def test_an_abort_by_nccls_watchdog_is_a_timeout_only_if_it_says_so(reason: str, expected: bool) -> None:
    frames = "".join(f"frame #{number}: c10d::ProcessGroupNCCL::Watchdog::runLoop()\n" for number in range(30))
    output = SimpleNamespace(last_lines=lambda count: "\n".join(f"[rank0]: {reason}\n{frames}".splitlines()[-count:]))
    worker: Any = SimpleNamespace(report=None, exitcode=-signal.SIGABRT, output=output)
    assert failure.is_timeout(worker) == expected


def test_the_panel_of_a_failed_run_shows_the_advice(cell: Cells) -> None:
    with pytest.raises(nbddp.RankError) as caught:
        run(cell("import torch\ndef train(): torch.ones(1).cuda()").train)
    found = nbddp.last_run()
    assert found is not None
    assert found._viewable.status().remark == caught.value.advice


def test_an_error_about_unused_parameters_names_the_option_of_wrap(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            def forward(self, x):
                return self.used(x)
        def train(**options):
            model = nbddp.wrap(Net(), **options)
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
    """)
    error = _error(names.train)
    assert error.advice.endswith("use wrap(model, find_unused_parameters=True)")
    nbddp.run(names.train, kwargs={"find_unused_parameters": True}, nprocs=2, device="cpu", show=False)


def test_a_deleted_working_directory_is_refused_before_a_process_starts(
    cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = cell("def one(): return 1").one
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for start in (
        lambda: run(one),
        lambda: nbddp.run_script("train.py", show=False),
        lambda: nbddp.spawn(lambda rank: 1, nprocs=2),
    ):
        with pytest.raises(nbddp.LaunchError, match=r"working directory.* has been deleted.*%cd or os\.chdir"):
            start()
    if sys.platform == "linux":
        with pytest.raises(nbddp.LaunchError, match=re.escape(str(gone))):
            run(one)


# ---------------------------------------------------------------------------- how a rank left


def test_sys_exit_with_an_object_whose_str_fails_shows_no_frame_of_nbddp(cell: Cells) -> None:
    names = cell("""
        import sys
        class Bad:
            def __str__(self): raise ValueError("no text")
        def train(): sys.exit(Bad())
    """)
    with pytest.raises(nbddp.RankDied) as caught:
        run(names.train, nprocs=1)
    assert str(caught.value) == "rank 0 of 1 called sys.exit(1) (a Bad whose str() raises ValueError)"
    last = nbddp.last_run()
    assert last is not None
    assert last.logs(0) == "a Bad whose str() raises ValueError\n"


@pytest.mark.parametrize("deep", [0, 40])
def test_a_crash_shows_only_the_users_lines(cell: Cells, deep: int) -> None:
    names = cell("""
        import ctypes, nbddp
        def crash(deep):
            if deep: crash(deep - 1)
            ctypes.string_at(0)
        def train(deep):
            print("this far")
            if nbddp.rank() == 0:
                crash(deep)
            nbddp.barrier()
    """)
    with pytest.raises(nbddp.RankDied) as caught:
        run(names.train, deep)
    text = str(caught.value)
    head, *stack = text.partition("\nIts last lines")[0].splitlines()
    assert head == "rank 0 of 2 crashed in native code (SIGSEGV)"
    assert stack[0] == "It was here (most recent call last):"
    assert stack[1].endswith(", line 9, in train")
    assert stack[2] == "    crash(deep)"
    assert stack[-2].endswith("in string_at")
    assert stack[-4].endswith(", line 5, in crash")
    assert text.endswith("\nIts last lines of output:\nthis far")
    last = nbddp.last_run()
    assert last is not None
    for shown in (text, last.logs(0)):
        assert "/nbddp/" not in shown
        assert "multiprocessing" not in shown
        assert "Extension modules" not in shown
    assert "in crash" in last.logs(0)


def test_a_crash_of_a_ranks_child_is_in_the_ranks_output(cell: Cells) -> None:
    names = cell("""
        import ctypes, os
        def train():
            pid = os.fork()
            if not pid:
                ctypes.string_at(0)
            return os.WTERMSIG(os.waitpid(pid, 0)[1])
    """)
    finished = run(names.train, nprocs=1)
    assert finished.value == signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in finished.logs(0)


def test_a_killed_rank_is_not_located_by_the_crash_of_its_child(cell: Cells) -> None:
    names = cell("""
        import ctypes, os, signal
        def train():
            pid = os.fork()
            if not pid:
                ctypes.string_at(0)
            os.waitpid(pid, 0)
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    with pytest.raises(nbddp.RankDied, match="was killed by SIGKILL") as caught:
        run(names.train, nprocs=1)
    assert "It was here" not in str(caught.value)


# ---------------------------------------------------------------------------- who failed


@pytest.mark.parametrize(("ranks", "who"), [(2, "both ranks"), (3, "all 3 ranks")])
def test_an_error_of_all_ranks_says_that_all_failed(cell: Cells, ranks: int, who: str) -> None:
    names = cell("""
        import nbddp
        def train():
            nbddp.barrier()
            raise ValueError(f"bad data on rank {nbddp.rank()}")
    """)
    error = _error(names.train, nprocs=ranks)
    assert error.alike
    assert str(error) == f"{who} failed, rank {error.rank} first: ValueError: bad data on rank {error.rank}"


@pytest.mark.parametrize(
    "other",
    [Failed(0, 0.0, "call", "TypeError: 1"), Failed(0, 0.0, "unpack", "ValueError: 1"), Finished(0, 0.0), None],
)
def test_ranks_that_ended_differently_did_not_all_fail_alike(other: Any) -> None:
    one = SimpleNamespace(report=Failed(0, 0.0, "call", "ValueError: 1"))
    assert failure.all_alike([one, SimpleNamespace(report=Failed(0, 0.0, "call", "ValueError: 2"))])  # type: ignore[list-item]
    assert not failure.all_alike([one, SimpleNamespace(report=other)])  # type: ignore[list-item]


@pytest.mark.slow
def test_a_collective_that_timed_out_says_first_where_the_ranks_were(cell: Cells) -> None:
    names = cell("""
        import nbddp, time, torch, torch.distributed as dist
        def train():
            if nbddp.rank() == 0:
                dist.all_reduce(torch.ones(1))
            time.sleep(100)
    """)
    error = _error(names.train, pg_timeout=2)
    first, torchs = str(error).split("\n", 1)
    assert re.fullmatch(
        r"rank 0 of 2 timed out in a collective: rank 0 gave up in all_reduce \(train, line 5\); "
        r"rank 1 is in train, line 6",
        first,
    )
    assert torchs.startswith("RuntimeError: ")
    assert error._render_traceback_()[0] == first


# ---------------------------------------------------------------------------- whose frames


@pytest.mark.slow
def test_the_location_in_an_installed_script_is_the_scripts_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    monkeypatch.setattr(stacks, "_INSTALLED", (*stacks._INSTALLED, f"{folder}{os.sep}"))
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "train.py").write_text(
        "import torch.distributed as dist, torch, os, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "time.sleep(100)\n"
    )
    with pytest.raises(nbddp.RankError) as caught:
        nbddp.run_script(folder / "lib" / "train.py", nprocs=2, device="cpu", show=False, pg_timeout=2)
    assert "rank 0 gave up in all_reduce (train.py, line 3)" in caught.value.where
    assert "rank 1 is in train.py, line 4" in caught.value.where


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], []),
        (["/tmp/ipykernel_1/2.py", "/x/site-packages/torch/a.py"], ["", "torch"]),
        (
            ["/x/site-packages/mine/a.py", "/x/site-packages/torch/a.py", "/x/site-packages/mine/b.py"],
            ["", "torch", ""],
        ),
        (["/usr/lib/python3/dist-packages/one.py", "/x/lib/python3.11/json/decoder.py"], ["", ""]),
        (["/a.py", "/site-packages/x/site-packages/six.py"], ["", "six"]),
    ],
)
def test_frames_of_installed_files_are_named_by_their_library(files: list[str], expected: list[str]) -> None:
    assert tracebacks.library_of(files) == expected


def test_stacks_fold_library_frames_except_the_last() -> None:
    torch_ = "/x/site-packages/torch/nn/"
    frames = (
        Frame("/home/me/train.py", 3, "main"),
        Frame(torch_ + "module.py", 1, "_call_impl"),
        Frame(torch_ + "module.py", 2, "forward"),
        Frame("/home/me/net.py", 9, "forward"),
        Frame(torch_ + "module.py", 1, "_call_impl"),
        Frame(torch_ + "module.py", 2, "forward"),
        Frame(torch_ + "linear.py", 3, "linear"),
    )
    assert stacks.stack(frames).splitlines() == [
        '  File "/home/me/train.py", line 3, in main',
        "  [2 frames in torch]",
        '  File "/home/me/net.py", line 9, in forward',
        "  [2 frames in torch]",
        f'  File "{torch_}linear.py", line 3, in linear',
    ]
    assert Location(0, "called", frames).place == "forward, net.py, line 9"


FOLDED = """
    import nbddp, torch
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, i): return {}["image"]  # the culprit
    def train():
        for _ in torch.utils.data.DataLoader(Data(), 2): pass
    def forward():
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(2, 3))(torch.ones(1, 2))
    def during():
        try:
            forward()
        except RuntimeError as error:
            raise ValueError("outer") from error
"""


def test_a_cells_traceback_folds_library_frames(notebook: Notebook) -> None:
    notebook.ok(FOLDED)
    shown = notebook.cell("nbddp.run(train, nprocs=1, device='cpu', show=False)").traceback
    lines = re.sub(r"\d+", "N", shown).splitlines()
    fold = lines.index("    [N frames in torch]")
    assert "in train()" in lines[fold - 4]
    assert "in Data.__getitem__()" in lines[fold + 2]
    assert "site-packages" not in shown
    assert "# the culprit" in shown
    shown = notebook.cell("nbddp.run(during, nprocs=1, device='cpu', show=False)").traceback
    assert shown.count("frames in torch]") == 1
    assert shown.count("site-packages") == 1  # the line of torch's that raised
    assert "skipping hidden" not in shown
    assert shown.index("frames in torch]") < shown.index("direct cause") < shown.index("ValueError: outer")


@pytest.mark.parametrize("mode", ["Plain", "Verbose", "Minimal"])
def test_every_xmode_of_ipython_shows_the_error(notebook: Notebook, mode: str) -> None:
    notebook.ok(FOLDED + f"\n    %xmode {mode}")
    try:
        shown = notebook.cell("nbddp.run(during, nprocs=1, device='cpu', show=False)").traceback
        assert shown.startswith("rank 0 of 1 failed")
        assert "ValueError: outer" in shown
    finally:
        notebook.ok("%xmode Context")


# ---------------------------------------------------------------------------- bounded words


def test_a_huge_exception_is_cut_in_the_cell_and_whole_in_the_cause(notebook: Notebook) -> None:
    notebook.ok(f"import nbddp\ndef train(): raise ValueError('x' * {HUGE})")
    reply = notebook.cell("nbddp.run(train, nprocs=1, device='cpu', show=False)")
    more = f"… {HUGE + len('ValueError: ') - CAUSE_CHARS:,} more characters in run.error.cause"
    for shown in (reply.evalue, reply.traceback):
        assert len(shown) < CAUSE_CHARS + 1000
        assert shown.count("more characters") == 1
        assert shown.rstrip().endswith(more)
    assert notebook.ok("len(str(nbddp.last_run().error.cause))").shown.strip() == str(HUGE)


def test_a_huge_exception_that_does_not_pickle_keeps_its_text(cell: Cells) -> None:
    names = cell("""
        import threading
        class Holder(Exception):
            def __init__(self, text):
                super().__init__(text)
                self.lock = threading.Lock()
        def train(): raise Holder("x" * 1_000_000)
    """)
    error = _error(names.train, nprocs=1)
    assert len(str(error.cause)) == 1_000_000
    assert len(str(error)) < CAUSE_CHARS + 200


def test_the_text_of_every_nbddp_error_is_bounded() -> None:
    huge = "x" * 1_000_000
    for error in (LaunchError(huge), nbddp.PayloadError(huge), nbddp.RunTimeout(huge)):
        assert len(str(error)) < MESSAGE_CHARS + 200
        assert str(error).endswith("more characters in error.args")
        assert error.args[0] == huge
    lost = HostLost("gpu1", huge)
    assert len(str(lost)) < CAUSE_CHARS + 200
    assert lost.why == huge
    assert len(in_a_line(RankError(0, 2, ValueError(huge)))) == LINE_CHARS
    assert in_a_line(ValueError("a\nb")) == "ValueError: a"
    assert bounded("abc", 3) == "abc"
    assert bounded("abcd", 3) == "abc\n… 1 more characters"


def test_a_long_sys_exit_text_is_cut_in_the_error_and_whole_in_the_logs(cell: Cells) -> None:
    with pytest.raises(nbddp.RankDied) as caught:
        run(cell("import sys\ndef train(): sys.exit('x' * 100_000)").train, nprocs=1)
    assert len(str(caught.value)) < 1200
    assert "… 99,000 more characters in run.logs(0)" in str(caught.value)
    last = nbddp.last_run()
    assert last is not None
    assert last.logs(0) == "x" * 100_000 + "\n"


def test_the_reason_of_a_restart_is_one_bounded_line(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import nbddp
        def train():
            nbddp.log(loss=1.0)
            if not nbddp.restart_count(): raise ValueError("x" * 1_000_000)
            for _ in nbddp.progress(range(2), desc="y" * 1_000_000): nbddp.log(loss=2.0)
    """)
    finished = run(names.train, nprocs=1, max_restarts=1, name="z" * 1_000_000)
    assert len(finished.history.restarts[0].reason) == LINE_CHARS
    assert len(finished.name) == LINE_CHARS
    assert finished.history.ranks[0].bars[0].desc == "y" * 120
    status = finished._viewable.status()
    assert len(repr(finished)) < 2 * LINE_CHARS
    assert len(summary.restart_text(status)) < LINE_CHARS + 50
    assert len(finished.logs(0)) < 2 * LINE_CHARS


def test_long_texts_from_a_metrics_file_are_cut_in_the_panel() -> None:
    history = History(1)
    history.restart("x" * 1_000_000)
    history.ranks[0].add_bar(0, "y" * 1_000_000, 5, 1, 0.0)
    history._restarts = [type(r)(3, r.reason) for r in history.restarts]
    assert len(summary.marks(history)[0].text) < LINE_CHARS + 50
    assert len(summary.progress(history).step_label) < 200


# ---------------------------------------------------------------------------- what was meant


def test_a_misspelt_name_or_command_is_answered_with_a_suggestion(notebook: Notebook) -> None:
    notebook.ok("%load_ext nbddp")
    reply = notebook.cell("%%ddp -n 2 -o modle\nmodel = 1")
    assert reply.evalue == "-o modle: the cell never sets modle; did you mean model?"
    reply = notebook.cell("%%ddp -n 2 -o xyz\nmodel = 1")
    assert reply.evalue == "-o xyz: the cell never sets xyz"
    assert notebook.cell("%ddp stauts").shown.endswith("; did you mean status?\n")


@pytest.mark.slow
def test_the_error_of_a_fork_server_that_ended_quotes_its_last_lines(tmp_path: Path) -> None:
    in_the_way = tmp_path / "numpy.py"
    in_the_way.write_text("raise SystemError('in the way')")
    done = script(
        """
        import os, torch, numpy
        os.environ["PYTHONPATH"] = os.path.dirname(os.environ["IN_THE_WAY"])  # for the server
        import nbddp
        def train(): return 1
        try:
            nbddp.run(train, nprocs=2, device="cpu", show=False)
        except nbddp.LaunchError as error:
            print(error)
        os.unlink(os.environ["IN_THE_WAY"])
        print(nbddp.run(train, nprocs=2, device="cpu", show=False).values)
        """,
        IN_THE_WAY=str(in_the_way),
    )
    first, *last_lines, values = done.stdout.splitlines()
    assert first == "rank 0 could not be started: the fork server ended; its last output was:"
    assert len(last_lines) == 5
    assert last_lines[-1] == "SystemError: in the way"
    assert values == "[1, 1]"
    assert done.stderr.count(last_lines[-1]) == 2  # all of it is there; a server that dies is started a second time


@pytest.mark.slow
def test_output_of_the_fork_servers_imports_is_shown(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(
        "import sys, os; print('from Python', file=sys.stderr); os.write(2, b'from C\\n')"
    )
    done = script(
        """
        import nbddp
        from nbddp.forkserver import server as forkserver
        forkserver.preload(["chatty"])
        def train():
            import sys
            return "chatty" in sys.modules
        print(nbddp.run(train, nprocs=1, device="cpu", show=False).value)
        """,
        PYTHONPATH=str(tmp_path),
    )
    assert done.stdout == "True\n"
    assert done.stderr.splitlines() == ["from Python", "from C"]
