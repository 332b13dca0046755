"""A kernel that serves many cases: it runs what it is told on its main thread and checks itself afterwards.

Commands come as lines of JSON on one socket; on a second one a thread answers while a run is under way,
as a notebook's control channel does. What this process writes to stdout and stderr is for nobody: it is a fault.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import linecache
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch

import nbddp
from nbddp.forkserver import server as forkserver
from nbddp.kernel import run as runs
from nbddp.kernel import state
from tests.faults import programs
from tests.faults.pace import Patience
from tests.support import Surroundings, fresh_main, wait_until

SETTLE_S = 3.0
_TRACED = (os.sep + "nbddp" + os.sep, "threading.py", "contextlib.py", "tempfile.py")


class _Interrupts:
    """SIGINT is KeyboardInterrupt while a cell runs and nothing between cells, as in ipykernel."""

    def __init__(self) -> None:
        self.in_cell = False
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, *_: object) -> None:
        if self.in_cell:
            raise KeyboardInterrupt

    def cell(self, work: Callable[[], Any]) -> BaseException | None:
        """Do that as a cell; what it raised."""
        error: BaseException | None = None
        try:
            self.in_cell = True
            work()
            self.in_cell = False
        except BaseException as raised:
            error = raised
        while self.in_cell:
            try:
                self.in_cell = False
            except KeyboardInterrupt as raised:
                error = raised
        return error


class _InterruptAtLine:
    """A SIGINT before the n-th line, or return, that the package runs on the main thread."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""
        self.at = 0.0
        self._lines: dict[int, int] = {}  # of each frame, by its id

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line if any(part in frame.f_code.co_filename for part in _TRACED) else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event in ("line", "return") and self.left > 0 and not self._leaves_with(frame):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}, {event}"
                self.at = time.monotonic()
                signal.raise_signal(signal.SIGINT)
        return self._line

    def _leaves_with(self, frame: FrameType) -> bool:
        """Is it the step back to a ``with`` that leaves it? Tracing can interrupt there, a signal never does."""
        before = self._lines.get(id(frame), 0)
        self._lines[id(frame)] = frame.f_lineno
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        return line.startswith(("with ", "async with ")) and before > frame.f_lineno

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        sys.settrace(self if self.left else None)
        try:
            yield
        finally:
            sys.settrace(None)


class Driver:
    def __init__(self, commands: socket.socket, control: socket.socket, folder: Path) -> None:
        self._commands, self._control, self._folder = commands, control, folder
        self._interrupts = _Interrupts()
        self._runs: list[nbddp.Run | None] = []
        self._big = torch.ones(programs.BIG)
        self._before: Surroundings | None = None

    def serve(self) -> None:
        with fresh_main() as cells:
            self._names = cells(programs.CELL)
            threading.Thread(target=self._answer, daemon=True).start()
            for _ in range(3):  # what a process opens once and keeps
                assert self._next() == ""
            # Torch's threads, the big block's way there and back.
            self._execute({"runs": [{"program": "payload", "nprocs": 2, "token": 1, "seconds": 0}]})
            self._execute({"runs": [{"program": "result", "nprocs": 2, "token": 1, "seconds": 0}]})
            self._next()
            gc.collect()
            gc.freeze()  # later collections look at what the cases left alone
            wait_until(lambda: forkserver.importing() is None)  # torch makes a folder
            self._before = Surroundings()
            self._say({"ready": True})
            for line in self._commands.makefile("r"):
                command = json.loads(line)
                self._say(getattr(self, "_do_" + command.pop("do"))(**command))

    def _say(self, reply: dict[str, Any]) -> None:
        self._commands.sendall(json.dumps(reply).encode() + b"\n")

    # ------------------------------------------------------------------ a case

    def _do_case(self, case: dict[str, Any]) -> dict[str, Any]:
        return self._execute(case, lambda: self._say({"began": time.monotonic()}))

    def _execute(self, case: dict[str, Any], tell: Callable[[], None] = lambda: None) -> dict[str, Any]:
        state.STOP_GRACE_S = case.get("grace_s", 5.0)
        self._runs = [None] * len(case["runs"])
        outcomes: list[dict[str, Any]] = [{} for _ in case["runs"]]
        at_line = _InterruptAtLine(case.get("at_line", 0))

        def work() -> None:
            tell()  # from here on this is a cell: an interrupt counts
            with at_line.armed():
                self._run_all(case["runs"], outcomes)

        error = self._interrupts.cell(work)
        ended = time.monotonic()
        for outcome in outcomes:
            if not outcome.get("ended"):  # the cell left before it came to this one
                outcome |= {"ended": ended, **_told(error)}
        for run in [*self._runs, *runs.going()]:
            if run is not None and run.state in ("starting", "running"):
                run.stop(0.2)
        last = nbddp.last_run()
        if len(outcomes) == 1 and last is not None and str(case["runs"][0]["token"]) in last.name:
            self._runs = [last]
        for run, outcome in zip(self._runs, outcomes):
            outcome["state"] = run.state if run is not None else "never started"
        self._runs = []
        del error
        return {"outcomes": outcomes, "where": at_line.where, "at": at_line.at}

    def _run_all(self, runs: list[dict[str, Any]], outcomes: list[dict[str, Any]]) -> None:
        if len(runs) == 1:
            self._one(runs[0], outcomes[0])
            return
        for i, run in enumerate(runs):
            self._runs[i] = self._start(run, wait=False)
        for i, run in enumerate(runs):
            started = self._runs[i]
            assert started is not None
            self._finish(run, outcomes[i], started.wait)

    def _one(self, run: dict[str, Any], outcome: dict[str, Any]) -> None:
        def work() -> nbddp.Run | None:
            return self._start(run, wait=True)

        self._finish(run, outcome, work)

    def _finish(self, run: dict[str, Any], outcome: dict[str, Any], work: Callable[[], nbddp.Run | None]) -> None:
        try:
            finished = work()
            ended = time.monotonic()
            if finished is not None and finished.state == "stopped":
                outcome |= {"ended": ended, "error": "stopped"}
                return
            ok = finished is None or programs.good(
                run["program"], run["nprocs"], run["token"], run["seconds"], finished.values
            )
            outcome |= {"ended": ended, "good": ok, "restarts": _restarts(finished)}
            if not ok and finished is not None:
                outcome["text"] = f"wrong values: {str(finished.values)[:300]}"
        except Exception as error:
            outcome |= {"ended": time.monotonic(), **_told(error)}

    def _start(self, run: dict[str, Any], wait: bool) -> nbddp.Run | None:
        names, program = self._names, run["program"]
        args: list[Any] = [run["token"], run["seconds"]]
        if program == "payload":
            args.append(self._big)
        if program in ("restarts", "snapshots"):
            args.append(str(self._folder / "snapshots" / f"{run['token']}.pt"))
        if program == "hog":
            args += [run["how"], run["limit"]]
        if program == "spawned":
            names.spawned.__name__ = f"spawned-{run['token']}"
            with contextlib.redirect_stdout(io.StringIO()):  # it has no show=False
                return nbddp.spawn(names.spawned, tuple(args), nprocs=run["nprocs"])  # type: ignore[return-value]
        return nbddp.run(
            getattr(names, program),
            args,
            nprocs=run["nprocs"],
            device="cpu",
            show=False,
            wait=wait,
            max_restarts=2 if program == "restarts" else 0,
            name=f"{program}-{run['token']}",
        )

    # ------------------------------------------------------------------ afterwards

    def _do_after(self) -> dict[str, Any]:
        """Does the next run work, and is this process as it was?"""
        began = time.monotonic()
        next_run = self._next()
        seconds = time.monotonic() - began
        changed = self._changes()
        return {"next_run": next_run, "next_seconds": seconds, "changed": changed, "going": len(runs.going())}

    def _next(self) -> str:
        try:
            values = nbddp.run(self._names.nothing, (42,), nprocs=2, device="cpu", show=False).values
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return "" if values == [42, 42] else f"values {values}"

    def _changes(self) -> dict[str, str]:
        assert self._before is not None
        patience = Patience(SETTLE_S)
        while (changed := self._before.changed()) and not patience.is_over():
            gc.collect()  # an exception's frames may hold what it was about
            time.sleep(0.02)
        return changed

    def _do_measure(self) -> dict[str, Any]:
        me = psutil.Process()
        info = me.memory_full_info()
        return {"rss": info.rss, "uss": info.uss, "fds": me.num_fds(), "threads": me.num_threads()}

    # ------------------------------------------------------------------ while a run is under way

    def _answer(self) -> None:
        for line in self._control.makefile("r"):
            request = json.loads(line)
            try:
                reply = getattr(self, "_ask_" + request.pop("ask"))(**request)
            except Exception as error:
                reply = {"failed": f"{type(error).__name__}: {error}"}
            self._control.sendall(json.dumps(reply).encode() + b"\n")
        os._exit(1)  # whoever drives this process is gone, whatever hangs here

    def _going(self, index: int) -> nbddp.Run | None:
        if index < len(self._runs) and self._runs[index] is not None:
            return self._runs[index]
        going = runs.going() if len(self._runs) == 1 else []
        return going[-1] if going else None

    def _ask_pids(self, index: int) -> dict[str, Any]:
        run = self._going(index)
        if run is None:
            return {"pids": [], "states": [], "state": "none"}
        return {
            "pids": list(run.pids),
            "states": list(run._state.rank_states()),
            "state": run.state,
        }

    def _ask_stop(self, index: int, grace_s: float) -> dict[str, Any]:
        run = self._going(index)
        if run is not None:
            run.stop(grace_s)
        return {"stopped": run is not None}

    def _ask_panel_stop(self, index: int) -> dict[str, Any]:
        """What the panel's message handler does."""
        run = self._going(index)
        if run is not None:
            run._viewable.stop()
        return {"stopped": run is not None}


def _told(error: BaseException | None) -> dict[str, Any]:
    if error is None:
        return {"error": "nothing", "text": "the cell ended without a word on this run"}
    error.__traceback__ = None
    return {
        "error": type(error).__name__,
        "is": [cls.__name__ for cls in type(error).__mro__],
        "text": str(error)[:1500],
        "rank": getattr(error, "rank", None),
        "signal": getattr(error, "signal_name", None),
        "cause": type(error.__cause__).__name__ if error.__cause__ is not None else None,
        "cause_text": str(error.__cause__)[:500],
        "raised_during": str(getattr(error.__cause__, "__context__", None))[:500],
    }


def _restarts(run: nbddp.Run | None) -> int:
    return "restarted" in run.logs(0) and run.logs(0).count("[restarted ") if run is not None else 0


def main() -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    commands, control = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
    Driver(commands, control, Path(sys.argv[3])).serve()


if __name__ == "__main__":
    main()
