"""One long run at 100 metrics a second with the panel open in a real kernel: nothing grows but the history."""

from __future__ import annotations

import contextlib
import queue
import shutil
import subprocess
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.support import Notebook, wait_until_alone

STEPS_PER_S = 10
NAMES = 10
NPROCS = 2
POINT_BYTES = 24  # step, value, time
HELD_BYTES = POINT_BYTES * (NPROCS + 1)  # a history keeps every rank's point, and of the ranks' band step, low, high
OWN_BYTES_PER_S = 1500.0  # beside it: buffers of the panel and of malloc; 2.7 MB in half an hour
WARM_FRACTION = 0.2  # of the time, in which a kernel reaches its size

_CELL = f"""
%%ddp -n {NPROCS} --device cpu --as going
import time, nbddp
began = time.monotonic()
open({{begun!r}}, "w").close()
for step in range(int({{seconds}} * {STEPS_PER_S})):
    nbddp.log({{{{f"metric_{{{{i}}}}": float(step % 97) for i in range({NAMES})}}}}, step=step)
    if step % 50 == 0: print("step", step)
    time.sleep(max(0.0, began + (step + 1) / {STEPS_PER_S} - time.monotonic()))
"""


def main(seconds: float, every_s: float = 2.0) -> list[str]:
    """Run so long; returns what is wrong."""
    temp = tempfile.mkdtemp(prefix="nbs-", dir="/tmp")
    notebook = Notebook({"TMPDIR": temp}, stderr=subprocess.DEVNULL)
    try:
        return _watch(notebook, Path(temp, "begun"), seconds, every_s)
    finally:
        notebook.close()
        shutil.rmtree(temp, ignore_errors=True)


@dataclass
class _Seen:
    """What was measured, and when; and what came of the run."""

    times: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    messages: int = 0
    frames: int = 0
    state: str = ""
    points: int = 0

    def look(self, process: psutil.Process, began: float) -> None:
        self.sizes.append(process.memory_full_info().uss)
        self.fds.append(process.num_fds())
        self.threads.append(process.num_threads())
        self.times.append(time.monotonic() - began)  # afterwards: what was seen of the end is not taken for the middle


def _watch(notebook: Notebook, begun: Path, seconds: float, every_s: float) -> list[str]:
    notebook.ok("%load_ext nbddp\nimport nbddp\nnbddp.run(lambda: 1, nprocs=2, device='cpu', show=True).values")
    message_id = _begin(notebook, _CELL.format(seconds=seconds, begun=str(begun)).lstrip())
    process, seen, over = psutil.Process(notebook.pid), _Seen(), False
    while not over and not begun.exists():  # on a machine with other work the ranks begin later
        _, over = _next(notebook, message_id)
    began = time.monotonic() - (time.time() - begun.stat().st_mtime)
    while not over and time.monotonic() - began < seconds + 60:
        until = time.monotonic() + every_s
        while not over and time.monotonic() < until:
            kind, over = _next(notebook, message_id)
            seen.messages += bool(kind)
            seen.frames += kind == "comm_msg"
        seen.look(process, began)
    count = "sum(len(going.history[name].steps) for name in going.history.names)"
    seen.state, points = notebook.ok(f"print(going.state, {count})").shown.split()
    seen.points = int(points)
    wait_until_alone(notebook.pid)
    return _judge(seen, seconds)


def _begin(notebook: Notebook, code: str) -> str:
    """As JupyterLab does: a cell with a name has a page, and so the panel."""
    client: Any = notebook._client
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    message = client.session.msg("execute_request", content, metadata={"cellId": uuid.uuid4().hex})
    client.shell_channel.send(message)
    return str(message["header"]["msg_id"])


def _next(notebook: Notebook, message_id: str) -> tuple[str, bool]:
    """The kind of the next message of the cell, and whether it is the cell's last."""
    client: Any = notebook._client
    with contextlib.suppress(queue.Empty):
        message = client.get_iopub_msg(timeout=0.2)
        if message["parent_header"].get("msg_id") == message_id:
            kind = message["msg_type"]
            return kind, kind == "status" and message["content"]["execution_state"] == "idle"
    return "", False


def _judge(seen: _Seen, seconds: float) -> list[str]:
    times, sizes = np.array(seen.times), np.array(seen.sizes)
    # At the start a kernel reaches its size; at the end the picture is drawn.
    warm = np.flatnonzero((times > WARM_FRACTION * seconds) & (times < seconds))
    slope = float(np.polyfit(times[warm], sizes[warm], 1)[0])
    history = HELD_BYTES * seen.points / seconds
    _tell(seen, seconds)
    print(f"USS grows by {slope:,.0f} B/s; the history by {history:,.0f}: {HELD_BYTES} bytes per point, {NPROCS} ranks")
    wrong = []
    if seen.state != "finished" or seen.points != int(seconds * STEPS_PER_S) * NAMES:
        wrong.append(f"the run is {seen.state}, with {seen.points} points")
    # Of a short run the arrays' doublings weigh more than what they hold.
    # Arrays that grow leave holes behind: a fifth to a half of what they hold, by what else is allocated meanwhile.
    allowed = 1.5 * history + OWN_BYTES_PER_S * max(1.0, 600 / seconds)
    if slope > allowed:
        wrong.append(f"the kernel grows by {slope:,.0f} B/s; at most {allowed:,.0f} is the history's and the panel's")
    first, last = int(warm[0]), int(warm[-1])
    if seen.fds[last] > seen.fds[first] or seen.threads[last] > seen.threads[first]:
        wrong.append(
            f"fds {seen.fds[first]} -> {seen.fds[last]}, threads {seen.threads[first]} -> {seen.threads[last]}"
        )
    if seen.frames < seconds:
        wrong.append(f"the panel got {seen.frames} frames: was it on?")
    return wrong


def _tell(seen: _Seen, seconds: float) -> None:
    rate = seen.points / seconds
    print(f"{seconds:.0f} s, {seen.points:,} points in the history ({rate:.0f} a second), {seen.state}")
    print(f"panel: {seen.frames:,} frames, {seen.messages:,} messages ({seen.messages / seconds:.1f} a second)")
    for share in (0.0, 0.1, 0.25, 0.5, 0.75, 0.98):
        at = int(share * (len(seen.times) - 1))
        size = f"USS {seen.sizes[at] / 1e6:7.1f} MB"
        print(f"  {seen.times[at]:7.0f} s: {size}, {seen.fds[at]} fds, {seen.threads[at]} threads")
