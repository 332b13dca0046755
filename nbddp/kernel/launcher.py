"""Kernel side. The processes of one attempt at a run: start, watch, end. Knows no widget and no metric's meaning.

with Crew(...) as crew:      # leaving it: every rank and all its children are gone, every fd is closed
    crew.start(...)
    while ...: crew.watch(seconds)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import operator
import os
import time
import traceback
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import wait
from typing import Any

from nbddp import frames, payload, wire
from nbddp.errors import LaunchError
from nbddp.kernel import forked, forkserver, spawned, stacks
from nbddp.kernel.crew import Ranks
from nbddp.kernel.failure import BadFork
from nbddp.kernel.local_worker import Worker
from nbddp.kernel.output import RankOutput, open_output
from nbddp.worker import entry

_NAP_S = 0.002


class _Inherited:
    """An fd that a process gets when it is started; there it is a plain int."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.methodcaller("detach"), (reduction.DupFd(self._fd),)


class Crew(Ranks):
    """All ranks of one attempt, on this machine."""

    def __init__(self, start_method: str) -> None:
        self.workers: list[Worker] = []
        self._start_method = start_method
        self._wake_r, self._wake_w = multiprocessing.Pipe(duplex=False)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self.workers:
            worker.kill()  # all before the first wait: they die side by side
        for worker in self.workers:
            worker.end()

    def close(self) -> None:
        """Give up every fd. Separate from the end of the processes, so that what they left can be read between."""
        for worker in self.workers:
            worker.close()
        self._wake_r.close()
        self._wake_w.close()

    def disown(self) -> None:
        """In a process forked from the kernel: hold nothing of the ranks open, so that they see the kernel end."""
        for worker in self.workers:
            worker.disown()

    def start(
        self,
        jobs: Sequence[wire.Job],
        outputs: Sequence[RankOutput],
        payload_fd: int,
        store_fd: int | None,
        inherited: Sequence[Any],
    ) -> None:
        """Start one process per job.

        Raises:
            LaunchError: no process could be started. BadFork: for what was preloaded.
        """
        for job, output in zip(jobs, outputs):
            try:
                worker = self._start_one(job, output, (payload_fd, store_fd), inherited)
            except (OSError, EOFError) as error:
                traceback.clear_frames(error.__traceback__)  # the server is in them, and would be there as long
                if isinstance(error, forkserver.ServerDied) and error.wanted:
                    names = ", ".join(error.wanted)
                    raise BadFork(f"it ended twice, while or after it imported {names}") from error
                raise LaunchError(f"rank {job.rank} could not be started: {error}") from error
            self.workers.append(worker)
            worker.send(job)

    def _start_one(
        self, job: wire.Job, output: RankOutput, shared: tuple[int, int | None], inherited: Sequence[Any]
    ) -> Worker:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:

            def keep(fd: int, stack: contextlib.ExitStack) -> int:
                stack.callback(os.close, fd)
                return fd

            metrics_r, metrics_w = os.pipe()
            keep(metrics_r, ours), keep(metrics_w, theirs)
            frames.widen(metrics_w)
            os.set_blocking(metrics_r, False)
            stacks_fd = keep(open_output(), ours)
            result_fd = keep(payload.open_block(f"result-{job.rank}"), ours)
            channel, far_channel = multiprocessing.Pipe()
            ours.callback(channel.close)
            theirs.callback(far_channel.close)
            payload_fd, store_fd = shared
            fds = (metrics_w, output.fileno(), stacks_fd, payload_fd, result_fd, store_fd)
            ends = entry.Ends(*(fd if fd is None else _Inherited(fd) for fd in fds))  # type: ignore[arg-type]
            target_args = (far_channel, ends, tuple(inherited))
            name = f"{job.run_name}-{job.rank}"
            process = self._new_process(job.environ, target=entry.main, args=target_args, name=name)
            ours.pop_all()  # from here on the worker's
        own = {"metrics": metrics_r, "stacks": stacks_fd, "result": result_fd}
        return Worker(job.rank, process, channel, output, own)

    def _new_process(self, environ: dict[str, str], **what: Any) -> Any:
        process: Any
        if self._start_method == "forkserver":
            process = forked.WorkerProcess(**what)
        else:
            process = spawned.SpawnedProcess(environ=environ, **what)
        process.start()
        return process

    def watch(self, timeout_s: float) -> None:
        """Wait for news, at most so long, and take it in."""
        waitables = [self._wake_r, *(x for worker in self.workers for x in worker.waitables())]
        wait(waitables, timeout_s)
        while self._wake_r.poll():
            self._wake_r.recv_bytes()
        for worker in self.workers:
            worker.hear()

    def wake(self) -> None:
        """End a :meth:`watch` under way in another thread."""
        with contextlib.suppress(OSError):
            self._wake_w.send_bytes(b"!")

    def dismiss_reported(self) -> None:
        """Let the ranks leave that have reported."""
        for worker in self.workers:
            if worker.report is not None:
                worker.dismiss()

    def interrupt(self) -> None:
        """KeyboardInterrupt in every rank that is in the function; one still on its way there is killed."""
        for worker in self.workers:
            if worker.report is None and worker.called:
                worker.interrupt()
            elif worker.report is None:
                worker.kill()  # it has nothing to finish, and would miss a signal that comes too early

    def stacks(self, timeout_s: float) -> dict[int, str]:
        """faulthandler's dumps of the ranks that are in their function and answer in time; asked all at once."""
        asked = {w: w.ask_for_stacks() for w in self.workers if w.called and w.alive and w.report is None}
        dumps: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while asked and time.monotonic() < deadline:
            time.sleep(_NAP_S)
            dumps |= {worker.rank: worker.stacks_since(before) for worker, before in asked.items()}
            asked = {worker: before for worker, before in asked.items() if not stacks.is_whole(dumps[worker.rank])}
        return {rank: dump for rank, dump in dumps.items() if dump}
