"""Starts, watches and ends the processes of one attempt at a run on this machine.

with LocalCrew(...) as crew:      # on exit, every rank and all its children have ended
    crew.start(...)
    while ...: crew.watch(seconds)
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import operator
import os
import select
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from typing import Any

from nbddp import fds, payload, wire
from nbddp.errors import LaunchError
from nbddp.forkserver import server as forkserver
from nbddp.forkserver.process import ForkedProcess, SpawnedProcess
from nbddp.launch import strays
from nbddp.launch.channel import open_channel
from nbddp.launch.dumps import is_whole
from nbddp.launch.interface import CrewBase
from nbddp.launch.output import RankOutput, open_output
from nbddp.launch.rank import LocalRank
from nbddp.worker import entry, leftovers, setup

_POLL_S = 0.002


class _Inherited:
    """A file descriptor for a process that is being started, which unpickles it as a plain int."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.methodcaller("detach"), (reduction.DupFd(self._fd),)


def _open_release(kernels_ends: contextlib.ExitStack, workers_ends: contextlib.ExitStack) -> tuple[socket.socket, int]:
    """Open the connection by which a rank that stays is released from a collective. Returns both of its ends."""
    kernels_end, workers_end = socket.socketpair()
    kernels_ends.callback(kernels_end.close)
    workers_ends.callback(workers_end.close)
    return kernels_end, workers_end.fileno()


class LocalCrew(CrewBase):
    """All ranks of one attempt, on this machine."""

    def __init__(self, start_method: str, keep_children: bool = False) -> None:
        self.workers: list[LocalRank] = []
        self._start_method = start_method
        self._keep_children = keep_children
        self._mark = self._temp_dir = ""
        self._is_light: Callable[[], bool] = lambda: False
        self._wake_r, self._wake_w = multiprocessing.Pipe(duplex=False)

    def __enter__(self) -> LocalCrew:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self.workers:
            worker.kill()  # all of them before the first wait, so that they end at the same time
        for worker in self.workers:
            worker.end()
        if self._mark and not self._keep_children:
            if any(worker.spawned or worker.orphaned for worker in self.workers):
                strays.end(self._mark)  # a fork server ends the processes that its own ranks left
            finished = all(isinstance(w.report, wire.Finished) and w.exitcode == 0 for w in self.workers)
            pids = [worker.pid for worker in self.workers]
            leftovers.remove(self._mark, self._temp_dir, pids, segments=not finished)

    def close(self) -> None:
        """Close every file descriptor. This comes after :meth:`__exit__`: the last output is read in between."""
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
        is_light: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start one process per job.

        Args:
            is_light: returns whether the call can do without the modules that a fork server imports last.

        Raises:
            LaunchError: a process could not be started.
            UnfitServer: the fork server ended while it imported preloaded modules.
        """
        self._temp_dir = jobs[0].temp_dir
        self._mark = leftovers.new_mark()
        self._is_light = is_light
        for job, output in zip(jobs, outputs):
            worker = self._start_rank(job, output, (payload_fd, store_fd), inherited)
            if not self.workers:
                leftovers.write_mark(self._mark, self._temp_dir)
            self.workers.append(worker)
            worker.send(dataclasses.replace(job, mark=self._mark))

    def replace(self, job: wire.Job, output: RankOutput, payload_fd: int, store_fd: int | None) -> None:
        """Start a rank of a session again, in place of one that has ended. Raises as :meth:`start`."""
        worker = self._start_rank(job, output, (payload_fd, store_fd), ())
        self.workers[job.local_rank].close()
        self.workers[job.local_rank] = worker
        worker.send(dataclasses.replace(job, mark=self._mark))

    def _start_rank(
        self, job: wire.Job, output: RankOutput, shared: tuple[int, int | None], inherited: Sequence[Any]
    ) -> LocalRank:
        try:
            return self._start_one(job, output, shared, inherited)
        except (OSError, EOFError) as error:
            traceback.clear_frames(error.__traceback__)  # they refer to the fork server
            if isinstance(error, forkserver.ServerDied) and error.modules:
                names = ", ".join(error.modules)
                raise forkserver.UnfitServer(f"it ended twice, while or after it imported {names}") from error
            raise LaunchError(f"rank {job.rank} could not be started: {error}") from error

    def _start_one(
        self, job: wire.Job, output: RankOutput, shared: tuple[int, int | None], inherited: Sequence[Any]
    ) -> LocalRank:
        # The worker's ends are closed here once it has them; the kernel's ends only if the start fails.
        with contextlib.ExitStack() as workers_ends, contextlib.ExitStack() as kernels_ends:

            def closed_by(stack: contextlib.ExitStack, fd: int) -> int:
                stack.callback(os.close, fd)
                return fd

            metrics_r, metrics_w = os.pipe()
            closed_by(kernels_ends, metrics_r), closed_by(workers_ends, metrics_w)
            fds.widen(metrics_w)
            os.set_blocking(metrics_r, False)
            stacks_fd = closed_by(kernels_ends, open_output())
            result_fd = closed_by(kernels_ends, payload.open_block(f"result-{job.rank}"))
            channel, workers_channel = open_channel()
            kernels_ends.callback(channel.close)
            workers_ends.callback(workers_channel.close)
            payload_fd, store_fd = shared
            release, workers_release = _open_release(kernels_ends, workers_ends) if job.stays else (None, None)
            inherited_fds = (metrics_w, output.fileno(), stacks_fd, payload_fd, result_fd, store_fd, workers_release)
            ends = setup.Ends(*(fd if fd is None else _Inherited(fd) for fd in inherited_fds))  # type: ignore[arg-type]
            process = self._start_process(job, entry.main, (workers_channel, ends, tuple(inherited)))
            kernels_ends.pop_all()  # from here on the LocalRank closes them
        fds_here = {"metrics": metrics_r, "stacks": stacks_fd, "result": result_fd}
        return LocalRank(job.rank, process, channel, output, fds_here, release)

    def _start_process(self, job: wire.Job, target: Callable[..., None], args: tuple[Any, ...]) -> Any:
        process: Any
        name = f"{job.run_name}-{job.rank}"
        if self._start_method == "forkserver":
            process = ForkedProcess(folder=job.temp_dir, is_light=self._is_light, target=target, args=args, name=name)
        else:
            process = SpawnedProcess(environ=job.environ, target=target, args=args, name=name)
        process.start()
        return process

    def watch(self, timeout_s: float) -> None:
        """Wait until something happens, at most ``timeout_s``, and handle it."""
        poll = select.poll()  # multiprocessing's wait() does the same six times as slowly
        for waitable in (self._wake_r, *(x for worker in self.workers for x in worker.waitables())):
            poll.register(waitable, select.POLLIN)
        readable = {fd for fd, _ in poll.poll(math.ceil(timeout_s * 1000))}
        while self._wake_r.fileno() in readable and self._wake_r.poll():
            self._wake_r.recv_bytes()
        for worker in self.workers:
            if readable or worker.changes_unseen:
                worker.update(readable)

    def wake(self) -> None:
        """End a :meth:`watch` under way in another thread."""
        with contextlib.suppress(OSError):
            self._wake_w.send_bytes(b"!")

    def dismiss_reported(self) -> None:
        """Let the ranks that have reported exit."""
        for worker in self.workers:
            if worker.report is not None:
                worker.dismiss()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in every rank that is in the function; kill those that have not reached it."""
        for worker in self.workers:
            if worker.report is None and worker.called:
                worker.interrupt()
            elif worker.report is None:
                worker.kill()  # it has nothing to finish, and would miss a signal before its handler is set

    def stacks(self, timeout_s: float) -> dict[int, str]:
        """Return faulthandler's dumps by rank, of the ranks that are in their function and answer in time."""
        asked = [(w, w.request_stacks()) for w in self.workers if w.alive and w.report is None and w.called]
        pending = {worker: before for worker, before in asked if before is not None}
        found: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while pending and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            found |= {worker.rank: worker.stacks_since(before) for worker, before in pending.items()}
            pending = {worker: before for worker, before in pending.items() if not is_whole(found[worker.rank])}
        return {rank: dump for rank, dump in found.items() if dump}
