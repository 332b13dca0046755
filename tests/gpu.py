"""What needs a GPU: ``NBDDP_DEVICE=cuda python -m pytest tests/gpu.py -s``; four minutes.

Every test stands alone, the important ones first, so that what is cut off is missed least. Without the variable the
file is tried out on the CPU, and what only a GPU has is skipped. Figures also go to the file NBDDP_FIGURES.
"""

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ipykernel
import psutil
import pytest
import torch

from nbddp.process import gauges
from tests.support import FIRST_MOMENTS_S, Notebook, gone, is_fork_server, open_fds, out, ranks_of, wait_until

DEVICE = os.environ.get("NBDDP_DEVICE", "cpu")
ON_GPU = DEVICE == "cuda"
FIRST = "cuda:0" if ON_GPU else "cpu"
RANKS = {
    1: f"nprocs=1, device={DEVICE!r}",
    2: "gpus=[0, 0], backend='gloo'" if ON_GPU else "nprocs=2, device='cpu'",
    4: "gpus=[0, 0, 0, 0], backend='gloo'" if ON_GPU else "nprocs=4, device='cpu'",
}
MAGIC = {1: f"-n 1 --device {DEVICE}", 2: "--gpus 0,0 --backend gloo" if ON_GPU else "-n 2 --device cpu"}
MIB = 1 << 20
HELD = 2048 * MIB if ON_GPU else 64 * MIB
CLOSE = 16 * MIB
BACK_WITHIN_S = 10.0
COMPILER = shutil.which("cc") or shutil.which("gcc")

only_gpu = pytest.mark.skipif(not ON_GPU, reason="a GPU is needed")
one_or_two = pytest.mark.parametrize("ranks", [1, 2])
Figure = Callable[[str, Any], None]

WORK = """
import json, os, time
from pathlib import Path
import torch, torch.distributed as dist
import nbddp

def hold(path, nbytes, end):
    nbddp.log(held=nbytes)
    taken = torch.ones(nbytes // 4, device=nbddp.device())
    taken.sum().item()
    Path(f"{path}/{nbddp.rank()}").touch()
    if end == "raise": raise ValueError("on purpose")
    while end == "stay" and not Path(f"{path}/go").exists(): time.sleep(0.05)

def collectives():
    rank, size, device = nbddp.rank(), nbddp.world_size(), nbddp.device()
    x = torch.full((3,), rank + 1.0, device=device)
    dist.all_reduce(x)
    seen = [None] * size
    dist.all_gather_object(seen, rank)
    nbddp.barrier()
    with nbddp.main_first(): pass
    return [
        x.tolist(),
        seen,
        float(nbddp.all_reduce(float(rank), "mean")),
        float(nbddp.all_reduce(torch.ones(2, device=device, dtype=torch.bfloat16), "sum")[0]),
        [float(each.sum()) for each in nbddp.all_gather(torch.full((2,), rank + 1.0, device=device))],
        nbddp.broadcast(torch.arange(3, device=device) * (rank + 1)).tolist(),
    ]

def net(): return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

def fit(steps, dtype=None, compiled=False, snapshot="", dies_at=None):
    "Trains on batches of which each rank has its share: the weights are those of one process, up to rounding."
    torch.manual_seed(0)
    rank, size, device = nbddp.rank(), nbddp.world_size(), nbddp.device()
    model = nbddp.wrap(net())
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    done, losses = 0, []
    if snapshot and (state := nbddp.load_snapshot(snapshot)):
        for part, name in (getattr(model, "module", model), "model"), (optimizer, "optimizer"), (scaler, "scaler"):
            part.load_state_dict(state[name])
        done = state["step"]
    for step in range(done, steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(24, 16, generator=generator)
        y = (x[:, :1] * 2 - x[:, 1:2])[rank::size].to(device)
        with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = torch.nn.functional.mse_loss(run(x[rank::size].to(device)).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        nbddp.log(loss=loss, reduce="mean")
        losses.append(loss.item())
        if snapshot:
            nbddp.barrier()
            nbddp.save_snapshot(snapshot, model=model, optimizer=optimizer, scaler=scaler, step=step + 1)
            nbddp.barrier()
        if step == dies_at and nbddp.restart_count() == 0: os.kill(os.getpid(), 9)
    return losses[0], losses[-1], torch.cat([p.detach().flatten() for p in model.parameters()])

def too_much(batch):
    weights = torch.ones(4, device=nbddp.device())
    too_large = torch.ones(batch, 1 << 30, device=weights.device)
    print(too_large.sum())

def out_of_range():
    weights = torch.ones(4, device=nbddp.device())
    index = torch.tensor([0, 9], device=nbddp.device())
    return weights[index].sum().item()
"""


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Print a number, and add it to the file NBDDP_FIGURES, a line of JSON each."""

    def keep(name: str, value: Any) -> None:
        value = float(f"{value:.4g}") if isinstance(value, float) else value
        print(f"    {name}: {value}", flush=True)
        if path := os.environ.get("NBDDP_FIGURES"):
            with open(path, "a") as file:
                file.write(json.dumps([request.node.name, name, value]) + "\n")

    return keep


@pytest.fixture(scope="module", autouse=True)
def _opened_once() -> None:
    """What this process opens to look at a GPU, and keeps."""
    if ON_GPU:
        gauges._gpu_memory("0")
        torch.cuda.device_count()


@pytest.fixture
def book(notebook: Notebook) -> Notebook:
    """The shared notebook, in which CUDA isn't used, with what ranks do."""
    notebook.ok(f"%load_ext nbddp\n{WORK}")
    return notebook


def used(pids: Sequence[int] = ()) -> int:
    """Bytes of the GPU in use; on the CPU, those of the ranks."""
    if ON_GPU:
        found = gauges._gpu_memory("0")
        assert found is not None, "the driver does not answer"
        return found[0]
    found = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += psutil.Process(pid).memory_info().rss
    return found


def nvidia_smi(fields: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip().split(", ")


def values(notebook: Notebook, function: str, ranks: int, args: tuple[Any, ...] = (), **options: Any) -> list[Any]:
    """What each rank returns, as JSON."""
    more = "".join(f", {name}={value!r}" for name, value in options.items())
    return answer(notebook, f"nbddp.run({function}, {args!r}, {RANKS[ranks]}{more}, show=False).values")


def answer(notebook: Notebook, expression: str) -> Any:
    return notebook.ok(f"print(json.dumps({expression}))").json()


def works_on(notebook: Notebook, ranks: int, **options: Any) -> bool:
    numbers = [rank + 1.0 for rank in range(ranks)]
    sums, mean, ones = [sum(numbers)] * 3, (ranks - 1) / 2, float(ranks)
    expected = [sums, [*range(ranks)], mean, ones, [2 * n for n in numbers], [0, 1, 2]]
    return values(notebook, "collectives", ranks, **options) == [expected] * ranks


def test_the_machine(figure: Figure) -> None:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, ipykernel {ipykernel.__version__}"
    figure("versions", versions)
    figure("cores", os.cpu_count())
    figure("C compiler", COMPILER or "none")
    if ON_GPU:
        figure("GPU", nvidia_smi("name,driver_version,memory.total,memory.used,compute_mode"))
        figure("CUDA, NCCL", f"{torch.version.cuda}, {'.'.join(map(str, torch.cuda.nccl.version()))}")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_collectives(book: Notebook, ranks: int) -> None:
    assert works_on(book, ranks)


def test_one_rank_has_the_devices_own_backend_and_leaves_its_group_soon(book: Notebook, figure: Figure) -> None:
    book.ok("""
        def leaves():
            dist.all_reduce(torch.ones(1 << 20, device=nbddp.device()).sum())
            began = time.perf_counter()
            dist.destroy_process_group()
            return time.perf_counter() - began
        def names(): return dist.get_backend(), str(nbddp.device())
    """)
    assert values(book, "names", 1) == [["nccl" if ON_GPU else "gloo", FIRST]]
    for backend in ["nccl", "gloo"] if ON_GPU else ["gloo"]:
        seconds = [values(book, "leaves", 1, backend=backend)[0] for _ in range(3)]
        figure(f"destroy_process_group of {backend}, ms", statistics.median(seconds) * 1e3)
    if ON_GPU:
        assert works_on(book, 1, backend="cpu:gloo,cuda:nccl")


@only_gpu
def test_neither_notebook_nor_fork_server_initializes_cuda(own_notebook: Notebook, tmp_path: Path) -> None:
    book, nvml = own_notebook, gauges._nvml()
    book.ok(WORK)

    def has_context(pids: set[int]) -> None:
        (server,) = [child for child in psutil.Process(book.pid).children() if is_fork_server(child)]
        # The notebook has some of the driver's devices open, by NVML.
        assert not [path for path in open_fds(server.pid).values() if path.startswith("/dev/nvidia")]
        listed = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(0))
        assert {each.pid for each in listed} == pids

    has_context(set())
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        going = book.begin(f"nbddp.run(hold, ({str(folder)!r}, {64 * MIB}, 'stay'), {RANKS[1]}, show=False)")
        wait_until((folder / "0").exists)
        has_context({*ranks_of(book.pid)})
        (folder / "go").touch()
        book.end_of(going)
        has_context(set())
    assert out(book.ok("torch.cuda.is_initialized()")) == "False"


def test_the_notebook_may_use_the_device_before_and_after(own_notebook: Notebook) -> None:
    book, ones = own_notebook, f"torch.ones(8, 16, device={FIRST!r})"
    book.ok(f"{WORK}\nmine = net().to({FIRST!r})\nmine({ones}).sum().backward()")
    assert out(book.ok("torch.cuda.is_initialized()")) == str(ON_GPU)
    assert works_on(book, 1)
    assert works_on(book, 2)
    book.ok(f"back = nbddp.run(lambda model: model({ones}), (mine,), {RANKS[1]}).value")
    same = f"str(back.device), torch.allclose(back, mine({ones}).to(back.device), rtol=1e-4)"
    assert out(book.ok(same)) == "('cpu', True)"


@one_or_two
@pytest.mark.parametrize("end", ["return", "raise", "Stop", "a killed rank"])
def test_memory_is_back(book: Notebook, tmp_path: Path, figure: Figure, ranks: int, end: str) -> None:
    _ends(book, tmp_path, figure, ranks, end)


@one_or_two
def test_memory_of_a_killed_kernel_is_back(own_notebook: Notebook, tmp_path: Path, figure: Figure, ranks: int) -> None:
    _ends(own_notebook, tmp_path, figure, ranks, "a killed kernel")


def _ends(book: Notebook, tmp_path: Path, figure: Figure, ranks: int, end: str) -> None:
    book.ok(WORK)
    mode = end if end in ("return", "raise") else "stay"
    before = used()
    going = book.begin(f"nbddp.run(hold, ({str(tmp_path)!r}, {HELD}, {mode!r}), {RANKS[ranks]}, show=False)")
    wait_until(lambda: len(os.listdir(tmp_path)) == ranks)
    pids = ranks_of(book.pid) if mode == "stay" else []
    assert mode != "stay" or used(pids) - before > 0.9 * ranks * HELD
    time.sleep(FIRST_MOMENTS_S if end == "Stop" else 0)
    began = time.monotonic()
    if end == "Stop":
        book.interrupt()
    elif end == "a killed rank":
        os.kill(pids[-1], signal.SIGKILL)
    if end == "a killed kernel":
        book.kill()
    else:
        names = {"return": "", "raise": "RankError", "Stop": "KeyboardInterrupt", "a killed rank": "RankDied"}
        assert book.end_of(going).ename == names[end]
        figure("until the cell is over, ms", (time.monotonic() - began) * 1e3)
    wait_until(lambda: used(pids) - before < CLOSE and all(map(gone, pids)), BACK_WITHIN_S)
    figure("until the memory is back, ms", (time.monotonic() - began) * 1e3)


@only_gpu
@one_or_two
def test_status_and_panel_have_the_gpus_memory_as_nvidia_smi_has_it(
    book: Notebook, tmp_path: Path, figure: Figure, ranks: int
) -> None:
    book.ok(f"going = nbddp.run(hold, ({str(tmp_path)!r}, {HELD}, 'stay'), {RANKS[ranks]}, wait=False, show=False)")
    try:
        wait_until(lambda: len(os.listdir(tmp_path)) == ranks)
        lines = [line for line in book.ok("%ddp status").shown.splitlines() if "GPU" in line]
        smi_used, smi_total = map(int, nvidia_smi("memory.used,memory.total"))
        figure("a line of %ddp status", lines[-1].strip())
        assert len(lines) == ranks
        for line in lines:
            words = line.replace(",", "").split()
            is_used, total = int(words[-4]), int(words[-2])
            assert abs(is_used - smi_used) < 64, (is_used, smi_used)
            assert abs(total - smi_total) < 64, (total, smi_total)
        waits = "while not going.history.latest(): time.sleep(0.05)"
        (panel,) = (data["text/html"] for data in book.ok(f"{waits}\ndisplay(going)").data)
        gauges_shown = re.findall(r"([\d.]+) / (\d+) GiB", panel)
        figure("the panel's gauges, GiB", " ".join(map("/".join, gauges_shown)))
        assert len(gauges_shown) == ranks
        for shown_used, shown_total in gauges_shown:
            assert abs(float(shown_used) - smi_used / 1024) < 0.1, (shown_used, smi_used)
            assert abs(int(shown_total) - smi_total / 1024) < 1, (shown_total, smi_total)
    finally:
        (tmp_path / "go").touch()
        book.ok("going.wait()")


LACKS, BATCH = ("out of memory" if ON_GPU else "can't allocate memory"), 1 << 17
WRONG_INDEX = "device-side assert" if ON_GPU else "out of bounds"
WEIGHTS, INDEX = f"Tensor (4,) float32 {FIRST}", f"Tensor (2,) int64 {FIRST}"


@one_or_two
@pytest.mark.parametrize(
    ("call", "said", "line", "shown"),
    [
        (f"too_much, ({BATCH},)", LACKS, "too_large = torch.ones(batch, 1 << 30", [f"batch {BATCH}", WEIGHTS]),
        ("out_of_range, ()", WRONG_INDEX, "return weights[index].sum().item()", [WEIGHTS, INDEX]),
    ],
    ids=["out of memory", "a device-side assert"],
)
def test_an_error_of_the_device_names_the_line_and_its_tensors(
    book: Notebook, figure: Figure, ranks: int, call: str, said: str, line: str, shown: list[str]
) -> None:
    failed = book.cell(f"nbddp.run({call}, {RANKS[ranks]}, show=False)")
    figure("the error", f"{failed.ename}: {failed.evalue}"[-600:])
    assert failed.ename == "RankError"
    for part in (said, line, *shown):
        assert part in " ".join(failed.traceback.split())
    assert works_on(book, ranks)


@only_gpu
def test_stop_ends_a_rank_that_waits_for_a_long_kernel(book: Notebook, tmp_path: Path, figure: Figure) -> None:
    book.ok("""
        def waits(path):
            Path(path).touch()
            for _ in range(60): torch.cuda._sleep(2_000_000_000)  # a second or more, each
            torch.cuda.synchronize()
    """)
    before, path = used(), tmp_path / "there"
    going = book.begin(f"nbddp.run(waits, ({str(path)!r},), {RANKS[1]}, show=False)")
    wait_until(path.exists)
    time.sleep(0.5)
    began = time.monotonic()
    book.interrupt()
    assert book.end_of(going).ename == "KeyboardInterrupt"
    figure("until the cell is over, s", time.monotonic() - began)
    wait_until(lambda: used() - before < CLOSE, BACK_WITHIN_S)


@only_gpu
def test_a_gpu_that_is_not_there_and_nccl_on_a_shared_one_are_refused(book: Notebook) -> None:
    assert "there is no GPU 1 here, only [0]" in book.cell("nbddp.run(net, gpus=[0, 1])").evalue
    assert "NCCL needs a GPU for each rank" in book.cell("nbddp.run(net, gpus=[0, 0])").evalue
    assert "torch sees 1 cuda device here" in book.cell("nbddp.run(net, nprocs=2)").evalue
    assert out(book.ok("nbddp.run(lambda: str(nbddp.device()), show=False).value")) == "'cuda:0'"


def test_ranks_on_one_device_train_as_one_process(book: Notebook) -> None:
    for ranks in (1, 2, 4):
        book.ok(f"run{ranks} = nbddp.run(fit, (20,), {RANKS[ranks]}, show=False)")
    far = "max(float((v[2] - run1.value[2]).abs().max()) for v in r.values)"
    found = answer(book, f"[[len(r.history['loss'].steps), {far}] for r in (run1, run2, run4)]")
    assert [steps for steps, _ in found] == [20] * 3
    assert max(far for _, far in found) < 1e-4


@one_or_two
@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=only_gpu), "bfloat16"])
def test_mixed_precision(book: Notebook, ranks: int, dtype: str) -> None:
    book.ok(f"run = nbddp.run(fit, (200, torch.{dtype}), {RANKS[ranks]}, show=False)")
    same = "all(torch.equal(each[2], run.value[2]) for each in run.values)"
    first, last, is_same = answer(book, f"[run.value[0], run.value[1], {same}]")
    assert last < 0.3 * first
    assert is_same


@one_or_two
def test_a_restart_goes_on_from_the_snapshot_as_if_nothing_had_been(book: Notebook, tmp_path: Path, ranks: int) -> None:
    run = f"nbddp.run(fit, (12, torch.bfloat16, False, '{tmp_path}/{{}}', {{}}), {RANKS[ranks]}, show=False"
    book.ok(f"never = {run.format('a', None)})\nonce = {run.format('b', 6)}, max_restarts=1)")
    assert answer(book, "[once.restarts, torch.equal(never.value[2], once.value[2])]") == [1, True]


@only_gpu
@pytest.mark.skipif(not COMPILER, reason="Triton needs a C compiler")
def test_torch_compile_in_ranks(book: Notebook, figure: Figure) -> None:
    for ranks in (1, 2):
        plain, compiled = (
            f"nbddp.run(fit, ({args}), {RANKS[ranks]}, show=False)" for args in ("10,", "10, None, True")
        )
        far = f"float(({plain}.value[2] - {compiled}.value[2]).abs().max())"
        reply = book.ok(f"print(json.dumps({far}))", timeout_s=100)
        figure(f"seconds on {ranks}", reply.seconds)
        assert reply.json() < 1e-3


@only_gpu
def test_log_of_a_tensor_waits_for_nothing(book: Notebook, figure: Figure) -> None:
    book.ok("""
        def logs(calls):
            loss = torch.zeros((), device=nbddp.device())
            nbddp.log(loss=loss + 0)  # a kernel's first call waits: it's loaded then
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            torch.cuda._sleep(2_000_000_000)
            began = time.perf_counter()
            for step in range(calls): nbddp.log(loss=loss + step)
            seconds = time.perf_counter() - began
            before = torch.cuda.current_stream().query()
            torch.cuda.set_sync_debug_mode(0)
            return seconds / calls * 1e6, before
        def loops(calls, way):
            x = torch.rand(64, device=nbddp.device())
            for step in range(calls + 100):
                if step == 100:
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                loss = ((x * 1.01 + 0.1).sin() * x).sum()
                if way == "log": nbddp.log(loss=loss)
                elif way == "item": loss.item()
            torch.cuda.synchronize()
            return (time.perf_counter() - began) / calls * 1e6
    """)
    each, is_through = values(book, "logs", 1, (100,))[0]
    figure("log() while the GPU is busy, µs", each)
    assert not is_through  # the GPU was still busy: nothing has waited for it
    run = f"nbddp.run(logs, (50,), {RANKS[1]}, show=False).history['loss'].values[-3:]"
    assert json.loads(out(book.ok(f"[float(x) for x in {run}]"))) == [47.0, 48.0, 49.0]
    for way in ("nothing", "log", "item"):
        found = [values(book, "loops", 1, (3000, way))[0] for _ in range(3)]
        figure(f"a step of a loop that is bound by launches, with {way}, µs", statistics.median(found))


@one_or_two
def test_a_loader_pins_its_batches_and_its_workers_end(book: Notebook, ranks: int) -> None:
    book.ok("""
        def loads():
            data = torch.utils.data.TensorDataset(torch.arange(64.0), torch.arange(64))
            seen, pinned = 0.0, True
            for x, y in nbddp.loader(data, 8, shuffle=True, num_workers=2):
                pinned &= x.is_pinned()
                seen += x.to(nbddp.device(), non_blocking=True).sum()
            return float(nbddp.all_reduce(seen, "sum")), pinned
    """)
    assert values(book, "loads", ranks) == [[sum(range(64)), ON_GPU]] * ranks


OPENED = """
model = nbddp.wrap(torch.nn.Linear(8, 8))
optimizer = torch.optim.Adam(model.parameters())
pid = os.getpid()
def step():
    loss = model(torch.ones(4, 8, device=nbddp.device())).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss.item()
step()
"""
FAIL = """
if nbddp.rank() == nbddp.world_size() - 1:
    time.sleep(0.5)
    raise ValueError("on purpose")
dist.all_reduce(torch.ones(1, device=nbddp.device()))
torch.cuda.synchronize() if torch.cuda.is_available() else None
"""


def opened(book: Notebook, ranks: int) -> Notebook:
    """With a session."""
    for cell in ("%load_ext nbddp", f"%ddp open {MAGIC[ranks]}", WORK):
        book.ok(cell)
    return book


@one_or_two
def test_a_session_keeps_its_ranks_and_its_model(own_notebook: Notebook, figure: Figure, ranks: int) -> None:
    book = opened(own_notebook, ranks)
    losses, pids = [float(out(book.ok(OPENED)))], out(book.ok("nbddp.all_gather(pid)"))
    for name in ("a failure", "an interrupt"):
        if name == "a failure":
            began = time.monotonic() + 0.5
            assert book.cell(FAIL).ename == "ValueError"
        else:
            going = book.begin("print('here', flush=True)\nwhile True: time.sleep(0.1)")
            book.shown_so_far(going, "here")
            time.sleep(FIRST_MOMENTS_S)
            began = time.monotonic()
            book.interrupt()
            assert book.end_of(going).ename == "KeyboardInterrupt"
        figure(f"from {name} to a new group, ms", (time.monotonic() - began) * 1e3)
        assert out(book.ok("nbddp.all_gather(pid)")) == pids
        losses.append(float(out(book.ok("step()"))))
        same = "len(set(nbddp.all_gather(sum(p.double().sum().item() for p in model.parameters()))))"
        assert out(book.ok(same)) == "1"
    assert losses == sorted(losses, reverse=True)
    reduced = book.ok("dist.all_reduce(torch.ones(1, device=nbddp.device()))")
    figure("an all-reduce in a cell, ms", reduced.seconds * 1e3)
    book.ok("%ddp close")


@one_or_two
def test_a_session_whose_device_is_lost_says_so(own_notebook: Notebook, figure: Figure, ranks: int) -> None:
    book = opened(own_notebook, ranks)
    failed = book.cell("out_of_range()")
    figure("the first error", f"{failed.ename}: {failed.evalue}"[-500:])
    assert WRONG_INDEX in failed.evalue
    again = book.cell("x = torch.ones(3, device=nbddp.device()).sum().item()")
    figure("the next cell", f"{again.ename}: {again.evalue}"[-500:])
    assert again.status == ("error" if ON_GPU else "ok")
    assert ("in a session, run %ddp close, then %ddp open" in again.traceback) == ON_GPU
    book.cell("%ddp close")
    opened(book, ranks)
    assert out(book.ok("collectives()[0]")) == str([sum(range(1, ranks + 1)) * 1.0] * 3)
    book.ok("%ddp close")


@one_or_two
def test_the_debugger_shows_a_tensor_of_the_device(book: Notebook, figure: Figure, ranks: int) -> None:
    talk = book.talk(
        f"""
        def train():
            x = torch.full((3,), nbddp.rank() + 1.0, device=nbddp.device())
            breakpoint()
            dist.all_reduce(x)
            return x.tolist()
        nbddp.run(train, {RANKS[ranks]}, show=False).value
        """,
        ["p x.device", "p x.sum().item()", "c"],
    )
    assert ("device(type='cuda', index=0)" if ON_GPU else "device(type='cpu')") in talk.shown
    assert "3.0" in talk.shown
    assert talk.result == str([sum(range(1, ranks + 1)) * 1.0] * 3)


LAUNCHED = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
def work(rank=-1, address=None, world_size=-1):
    backend, device = ("nccl", "cuda") if torch.cuda.is_available() else ("gloo", "cpu")
    dist.init_process_group(backend, address, rank=rank, world_size=world_size)
    x = torch.ones(1, device=device)
    dist.all_reduce(x)
    x.item()
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1], 1), nprocs=1) if sys.argv[1:] else work()
"""
# torchrun's variables for one process, for a launcher that sets none (accelerate with one process).
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29592"}


def test_a_warm_run_beside_other_launchers(own_notebook: Notebook, tmp_path: Path, figure: Figure) -> None:
    book, path = own_notebook, tmp_path / "launched.py"
    path.write_text(LAUNCHED)
    book.ok("""
        import torch, torch.distributed as dist, nbddp
        def one():
            x = torch.ones(1, device=nbddp.device())
            dist.all_reduce(x)
            return x.item()
    """)
    run = f"nbddp.run(one, {RANKS[1]}, show=False).value"
    book.ok(run)
    figure("nbddp, warm, s", statistics.median(book.ok(run).seconds for _ in range(5)))
    assert out(book.ok("nbddp.last_run().logs()")) == "''"  # of torch, about a group that nobody destroyed
    commands = {
        "mp.spawn in a script": f"{path} tcp://127.0.0.1:29591",
        "torchrun": f"-m torch.distributed.run --nproc-per-node=1 {path}",
        "accelerate launch": "-m accelerate.commands.launch --num_processes=1 --num_machines=1 --mixed_precision=no "
        f"--dynamo_backend=no {path}",
    }
    env = {**ALONE, **os.environ, "TMPDIR": str(tmp_path)}
    for name, command in commands.items():
        began = time.monotonic()
        ended = subprocess.run([sys.executable, *command.split()], env=env, capture_output=True, text=True, timeout=60)
        figure(name + ", s", time.monotonic() - began if ended.returncode == 0 else ended.stderr[-300:])
    assert out(book.ok(run)) == "1.0"


def test_the_first_cell_of_a_new_notebook(figure: Figure) -> None:
    cell = "def first():\n    import torch\n    return torch.ones(1, device=nbddp.device()).item()\n"
    with Notebook() as book:
        reply = book.ok(f"import nbddp\n{cell}nbddp.run(first, {RANKS[1]}, show=False).value")
        figure("with all imports, s", reply.seconds)
        assert out(reply) == "1.0"


@only_gpu
def test_a_tensor_of_the_notebook_reaches_the_device(book: Notebook, figure: Figure) -> None:
    book.ok("""
        big = torch.ones(1 << 28)
        def speeds(big):
            found = []
            torch.ones(1, device="cuda")
            for each in big, big, big.clone(), torch.empty_like(big, pin_memory=True):
                began = time.perf_counter()
                there = each.to("cuda")
                torch.cuda.synchronize()
                found.append(4 * big.numel() / 1e9 / (time.perf_counter() - began))
                total = float(there[0])
                del there
            return found
    """)
    found = answer(book, f"nbddp.run(speeds, (big,), {RANKS[1]}, show=False).value")
    for name, speed in zip(["of the notebook", "again", "the rank's own", "pinned"], found):
        figure(f"1 GiB to the device, {name}, GB/s", speed)
