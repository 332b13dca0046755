"""Starts a run's ranks on this machine: their rendezvous store, their jobs, their processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from nbddp import payload, versions, wire
from nbddp.forkserver import server as forkserver
from nbddp.kernel.plan import Plan
from nbddp.latch import StayingThread
from nbddp.launch.calls import SpareEnds, begin_call
from nbddp.launch.crew import LocalCrew
from nbddp.launch.devices import device_index
from nbddp.launch.gauges import LocalGauges
from nbddp.launch.output import RankOutput, open_output
from nbddp.launch.rendezvous import HOST, Rendezvous, open_rendezvous
from nbddp.payload import Packed, Pickled

_SLOW_TO_FREE_NBYTES = 32 << 20
_closing: list[threading.Thread] = []  # each closes a block


class LocalSite:
    """This machine; see ``launch.interface.Site``."""

    thread: StayingThread | None = None
    open_output = staticmethod(open_output)

    def __init__(self, plan: Plan) -> None:
        self.gauges = LocalGauges(plan.device, plan.environ, plan.gpus)
        self.layout: list[tuple[str, int]] = []
        self._plan = plan
        self._open = contextlib.ExitStack()
        self.block = -1

    def copy_data(self, pickled: Pickled, keep_going: Callable[[], bool]) -> None:
        """Copy the data into a block that the ranks map."""
        for thread in list(_closing):  # so that the blocks of earlier runs need no memory beside this one
            thread.join()
            with contextlib.suppress(ValueError):  # another run has removed it
                _closing.remove(thread)
        self.block = payload.open_block(self._plan.name, pickled.packed.nbytes)
        self._open.callback(_close_block, self.block)
        pickled.write(self.block, keep_going)

    def new_crew(self, start_method: str) -> NotebookCrew:
        """Return a crew for one attempt."""
        return NotebookCrew(self._plan, start_method, self.block)

    def remember_snapshots(self, saved: Mapping[str, int]) -> None:
        """Do nothing: files on this machine cannot be lost with a host."""

    def waits_for(self, *, started: bool) -> str:
        """Return what the fork server imports before the first rank; "" afterwards, as the ranks map the data."""
        if started or self._plan.start_method != "forkserver" or (importing := forkserver.importing()) is None:
            return ""
        what, since = importing
        return f"importing {what}, {time.monotonic() - since:.1f} s"

    def missing(self) -> str:
        """Return "": this machine is there."""
        return ""

    def slow_links(self) -> str:
        """Return "": nothing goes over a network."""
        return ""

    def can_restart(self) -> bool:
        """Return True: this machine cannot be lost."""
        return True

    def close(self) -> None:
        """Close the block that holds the data."""
        self._open.close()
        forkserver.reap()

    def for_call(self) -> LocalSite:
        """Return where the next call of a session finds its data."""
        return LocalSite(self._plan)

    def staying_crew(self, start_method: str, block: int) -> StayingCrew:
        """Return the crew of a session."""
        return StayingCrew(self._plan, start_method, block)


def _close_block(block: int) -> None:
    """Close the block, on a thread if that is slow: Linux takes 0.13 s to free 1 GiB of small pages."""
    if os.fstat(block).st_size >= _SLOW_TO_FREE_NBYTES:
        thread = threading.Thread(target=os.close, args=(block,), name="nbddp-give-back")
        with contextlib.suppress(RuntimeError):  # the system refuses a thread
            thread.start()
            return _closing.append(thread)
    return os.close(block)


class NotebookCrew(LocalCrew):
    """A crew with a rendezvous store and a temporary folder, which exist as long as its processes."""

    def __init__(self, plan: Plan, start_method: str, block: int) -> None:
        super().__init__(start_method, plan.keep_children)
        self._block = block
        self._plan = plan
        self._resources = contextlib.ExitStack()
        self._rendezvous: Rendezvous
        self._folder: str

    def launch(self, packed: Packed, outputs: Sequence[RankOutput], restart_count: int) -> None:
        """Start all ranks.

        Args:
            restart_count: how often the run has been restarted.

        Raises:
            LaunchError: no process could be started. OSError, DistError: the store could not be opened.
        """
        self._rendezvous = self._resources.enter_context(open_rendezvous(self._plan.nprocs))
        # Only a fork server can remove the folder after a SIGKILL of the kernel; with spawn there may be none.
        by_server = self._start_method == "forkserver"
        self._folder = self._resources.enter_context(forkserver.run_folder()) if by_server else ""
        jobs = self.jobs(packed.nbytes, restart_count)
        is_light = (lambda: False) if self._plan.stays else packed.is_light  # later calls may need anything
        self.start(jobs, outputs, self._block, self._rendezvous.file, packed.inherited, is_light)

    def __exit__(self, *exc_info: object) -> None:
        with self._resources:
            super().__exit__(*exc_info)

    def jobs(self, nbytes: int, restart_count: int = 0) -> list[wire.Job]:
        """Return the jobs of all ranks, for a payload of this size."""
        plan, rendezvous = self._plan, self._rendezvous
        return [
            wire.Job(
                run_name=plan.name,
                rank=rank,
                local_rank=rank,
                world_size=plan.nprocs,
                local_world_size=plan.nprocs,
                device=plan.device,
                device_index=device_index(rank, plan.gpus),
                backend=plan.backend,
                store_host=HOST,
                store_port=rendezvous.port,
                store_prefix=rendezvous.prefix,
                pg_timeout_s=plan.pg_timeout_s,
                seed=plan.seed,
                deterministic=plan.deterministic,
                threads=plan.threads,
                environ=plan.rank_environ(rank, rendezvous, restart_count),
                process_state=plan.process_state,
                sys_path=plan.sys_path,
                cwd=plan.cwd,
                temp_dir=self._folder,
                argv=plan.argv,
                payload_nbytes=nbytes,
                pass_rank=plan.pass_rank,
                restart_count=restart_count,
                copy=versions.package_folder(),
                stays=plan.stays,
                attended=plan.attended,
                post_mortem=plan.post_mortem,
                listen=plan.listen,
            )
            for rank in range(plan.nprocs)
        ]


class StayingCrew(NotebookCrew):
    """The ranks of a session on this machine; see ``launch.interface.StayingCrew``."""

    returns_within_s = 1.0  # a sender of gloo's may wait on although its connection is closed; see group_sockets.py

    def __init__(self, plan: Plan, start_method: str, block: int) -> None:
        super().__init__(plan, start_method, block)
        self._spare = SpareEnds()

    def launch(self, packed: Packed, outputs: Sequence[RankOutput], restart_count: int) -> None:
        """Start all ranks, with the first call."""
        super().launch(packed, outputs, restart_count)
        self._spare.fill(self._plan.nprocs)

    def begin_call(
        self,
        call: wire.NextCall,
        data: tuple[Packed, int],
        outputs: Sequence[RankOutput],
        ranks: Sequence[int],
        again: Sequence[int],
        group: int,
    ) -> None:
        """Begin a call on these ranks, and start those that have ended again. Raises LaunchError."""
        packed, block = data
        for rank in again:
            job = dataclasses.replace(self.jobs(packed.nbytes)[rank], group=group)
            self.replace(job, outputs[rank], block, self._rendezvous.file)
        for worker in self.workers:
            if worker.rank in ranks:
                begin_call(worker, call, outputs[worker.rank], block, self._spare.take())
        self._spare.fill(self._plan.nprocs)  # while the ranks are at work

    def open_output(self) -> int:
        """Open a file for the output of one rank in the next call."""
        return self._spare.take_output()

    def close(self) -> None:
        """Close every file descriptor."""
        super().close()
        self._spare.close()

    def disown(self) -> None:
        """In a process forked from the kernel: hold nothing of the ranks open."""
        super().disown()
        self._spare.disown()

    def cancel_upload(self) -> None:
        """Do nothing: the ranks map the payload."""

    def end_call(self) -> None:
        """Do nothing: what a rank has written is here at once."""
