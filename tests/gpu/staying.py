"""Sessions and the debugger, in a real notebook."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import nbddp
from tests.gpu import work
from tests.gpu.ranks import expected
from tests.gpu.report import Report
from tests.support import Notebook, out, wait_until

OPEN = """
%%ddp
import os
model = nbddp.wrap(torch.nn.Linear(8, 8))
optimizer = torch.optim.Adam(model.parameters())
pid = os.getpid()
def step():
    loss = model(torch.ones(4, 8, device=nbddp.device())).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
nbddp.reduce(step())
"""
STEP = "%%ddp\nnbddp.reduce(step())"
PIDS = "%%ddp\nnbddp.gather(pid)"
SAME = "%%ddp\nlen(set(nbddp.gather(sum(p.double().sum().item() for p in model.parameters()))))"
WAIT_S = 0.5
FAIL = f"""
%%ddp
import time
if rank == world_size - 1:
    time.sleep({WAIT_S})
    raise ValueError("on purpose")
x = torch.ones(1, device=nbddp.device())
dist.all_reduce(x)
x.item()
"""
STAY = """
%%ddp
import time
open("{path}" + str(rank), "w").close()
if rank == 0:
    time.sleep(100)
nbddp.barrier()
"""
STOP_HERE = """
def train():
    x = torch.full((3,), nbddp.rank() + 1.0, device=nbddp.device())
    breakpoint()
    dist.all_reduce(x)
    return x.tolist()
nbddp.run(train, {options}).value
"""
FAIL_HERE = """
def fail():
    x = torch.full((3,), nbddp.rank() + 1.0, device=nbddp.device())
    raise ValueError("on purpose")
nbddp.run(fail, {options}, pdb=True).value
"""


def sessions(report: Report) -> None:
    for ranks in (1, 2):
        name = f"{ranks} rank{'s' * (ranks > 1)}"
        with Notebook() as notebook, tempfile.TemporaryDirectory() as folder:
            notebook.ok("%load_ext nbddp\nimport nbddp, torch")
            notebook.ok(f"%ddp open {report.magic_options(ranks)}")
            _recovers(report, name, notebook, str(Path(folder) / "rank-"))
            notebook.ok("%ddp close")
    for ranks in (1, 2):
        _loses_its_device(report, f"{ranks} rank{'s' * (ranks > 1)}", ranks)


def _recovers(report: Report, name: str, notebook: Notebook, path: str) -> None:
    loss = float(out(notebook.ok(OPEN)))
    pids = out(notebook.ok(PIDS))
    began = time.monotonic()
    failed = notebook.cell(FAIL)
    seconds = time.monotonic() - began - WAIT_S
    report.value(f"{name}: from a failure to a new group", seconds * 1e3, "ms")
    report.check(f"{name}: the cell has the error", "ValueError: on purpose" in failed.traceback, failed.ename)
    loss = _goes_on(report, f"{name}, after a failure", notebook, pids, loss)
    going = notebook.begin(STAY.format(path=path))
    wait_until(lambda: Path(path + "0").exists(), what="rank 0 is in the cell")
    began = time.monotonic()
    notebook.interrupt()
    reply = notebook.end_of(going)
    report.value(f"{name}: from an interrupt to a new group", (time.monotonic() - began) * 1e3, "ms")
    report.check(f"{name}: the cell was interrupted", reply.ename == "KeyboardInterrupt", reply.ename)
    _goes_on(report, f"{name}, after an interrupt", notebook, pids, loss)


def _goes_on(report: Report, name: str, notebook: Notebook, pids: str, before: float) -> float:
    """The same processes train on, from where they were. Returns the loss."""
    reply = notebook.cell(PIDS)
    same = reply.status == "ok" and out(reply) == pids
    report.check(f"{name}: the ranks are the same", same, reply.traceback[-300:])
    loss = float(out(notebook.ok(STEP)))
    report.check(f"{name}: the model trains on", loss < before, (before, loss))
    report.check(f"{name}: all ranks have the same model", out(notebook.ok(SAME)) == "1")
    return loss


def _loses_its_device(report: Report, name: str, ranks: int) -> None:
    """After a device-side assert no call of CUDA works in that process: its rank is lost, and started again."""
    options: dict[str, Any] = eval(f"dict({report.options(ranks)})")
    with nbddp.session(**options) as session:
        try:
            session.run(work.index_out_of_range, show=False)
        except nbddp.RankError as error:
            report.check(f"{name}: the error of the index", type(error.cause).__name__, str(error).splitlines()[-1])
        try:
            found = session.run(work.collectives, show=False).values
            report.check(f"{name}: on a CPU the session goes on", not report.on_cuda)
        except nbddp.NbddpError as error:
            report.value(f"{name}: the next call", str(error))
            report.check(f"{name}: the next call names the lost rank", "rank" in str(error) and report.on_cuda, error)
            session.restart()
            found = session.run(work.collectives, show=False).values
        report.check(f"{name}: the session works again", found == [expected(ranks)] * ranks, found[:1])


def debugger(report: Report) -> None:
    with Notebook() as notebook:
        notebook.ok("%load_ext nbddp\nimport nbddp, torch\nimport torch.distributed as dist")
        notebook.ok(f"nbddp.run(lambda: 1, {report.options()}, show=False)")
        for ranks in (1, 2):
            name, options = f"{ranks} rank{'s' * (ranks > 1)}", report.options(ranks)
            talk = notebook.talk(STOP_HERE.format(options=options), ["p x.device", "p x.sum().item()", "c"])
            report.value(f"{name}: until the prompt", talk.waits[0] * 1e3, "ms")
            report.check(f"{name}: a tensor's device at the prompt", _device_text(report) in talk.shown)
            report.check(f"{name}: a tensor's value at the prompt", "3.0" in talk.shown, talk.prompts[0])
            wanted = str([sum(range(1, ranks + 1)) * 1.0] * 3)
            report.check(f"{name}: the run goes on", talk.result == wanted, talk.result)
            talk = notebook.talk(FAIL_HERE.format(options=options), ["p x.device", "q"])
            report.check(f"{name}: post mortem", _device_text(report) in talk.shown and talk.ename == "RankError")


def _device_text(report: Report) -> str:
    return "device(type='cuda', index=0)" if report.on_cuda else "device(type='cpu')"
