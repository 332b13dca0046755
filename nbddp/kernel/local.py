"""Kernel side. The ranks of one attempt on this machine: what they meet at, their jobs, their processes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence

from nbddp import copies, payload, wire
from nbddp.kernel import forkserver
from nbddp.kernel.gauges import Gauges
from nbddp.kernel.launcher import Crew
from nbddp.kernel.output import RankOutput
from nbddp.kernel.plan import Plan
from nbddp.kernel.rendezvous import HOST, Rendezvous, open_rendezvous
from nbddp.payload import Packed, Pickled

_MUCH_NBYTES = 32 << 20
_giving_back: list[threading.Thread] = []


class Local:
    """This machine; see ``crew.Site``."""

    def __init__(self, plan: Plan) -> None:
        self.gauges = Gauges(plan.device, plan.environ)
        self.layout: list[tuple[str, int]] = []
        self._plan = plan
        self._open = contextlib.ExitStack()
        self._block = -1

    def take(self, pickled: Pickled, wanted: Callable[[], bool]) -> None:
        """Into a block that the ranks map."""
        for thread in list(_giving_back):  # no more memory is in use than if everybody had waited
            thread.join()
            with contextlib.suppress(ValueError):  # another run has
                _giving_back.remove(thread)
        self._block = payload.open_block(self._plan.name)
        self._open.callback(_give_back, self._block)
        pickled.write(self._block, wanted)

    def new_crew(self, start_method: str) -> LocalCrew:
        """For one attempt."""
        return LocalCrew(self._plan, start_method, self._block)

    def may_go_on(self) -> bool:
        """It is always there."""
        return True

    def close(self) -> None:
        """Let go of the data."""
        self._open.close()
        forkserver.reap()


def _give_back(block: int) -> None:
    """Close it. The system takes 0.13 s to take 1 GiB of small pages back, which the cell need not wait for."""
    if os.fstat(block).st_size >= _MUCH_NBYTES:
        thread = threading.Thread(target=os.close, args=(block,), name="nbddp-give-back")
        with contextlib.suppress(RuntimeError):  # the system has no thread to give
            thread.start()
            return _giving_back.append(thread)
    return os.close(block)


class LocalCrew(Crew):
    """A crew, and what is there for as long as its processes are."""

    def __init__(self, plan: Plan, start_method: str, block: int) -> None:
        super().__init__(start_method, plan.keep_children)
        self._block = block
        self._plan = plan
        self._around = contextlib.ExitStack()

    def launch(self, packed: Packed, outputs: Sequence[RankOutput], restart_count: int) -> None:
        """Start all ranks.

        Args:
            restart_count: how often the run has started again before.

        Raises:
            LaunchError: no process could be started. OSError, DistError: nor what they meet at.
        """
        rendezvous = self._around.enter_context(open_rendezvous(self._plan.nprocs))
        # By spawn there may be no server, which alone could remove it after a SIGKILL of the kernel.
        by_server = self._start_method == "forkserver"
        temp_dir = self._around.enter_context(forkserver.folder_of_a_run()) if by_server else ""
        jobs = self._jobs(rendezvous, temp_dir, packed.nbytes, restart_count)
        self.start(jobs, outputs, self._block, rendezvous.file, packed.inherited)

    def __exit__(self, *exc_info: object) -> None:
        with self._around:
            super().__exit__(*exc_info)

    def _jobs(self, rendezvous: Rendezvous, temp_dir: str, nbytes: int, restart_count: int) -> list[wire.Job]:
        plan = self._plan
        return [
            wire.Job(
                run_name=plan.name,
                rank=rank,
                local_rank=rank,
                world_size=plan.nprocs,
                local_world_size=plan.nprocs,
                device=plan.device,
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
                temp_dir=temp_dir,
                argv=plan.argv,
                payload_nbytes=nbytes,
                pass_rank=plan.pass_rank,
                restart_count=restart_count,
                copy=copies.folder(),
            )
            for rank in range(plan.nprocs)
        ]
