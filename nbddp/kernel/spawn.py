"""Kernel side. ``nbddp.spawn``: ``torch.multiprocessing.spawn`` for functions of a notebook."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from nbddp.errors import LaunchError, RankDied, RankError
from nbddp.kernel.devices import accelerator
from nbddp.kernel.local import Local
from nbddp.kernel.plan import make_plan
from nbddp.kernel.runner import Run, last_run, launch


class SpawnRaised(ProcessRaisedException, RankError):
    """A rank raised: both torch's exception, with its text, and nbddp's, which a cell shows as it is."""

    def __init__(self, error: RankError, pid: int) -> None:
        text = "".join(traceback.format_exception(error.cause)).rstrip("\n")
        self.msg = f"\n\n-- Process {error.rank} terminated with the following error:\n{text}"
        Exception.__init__(self, self.msg)
        self.__dict__.update(error.__dict__)
        self.__cause__ = error.cause
        self._made_of = (error, pid)
        self.error_index = error.rank
        self.pid = self.error_pid = pid

    def __reduce__(self) -> Any:
        return type(self), self._made_of, {"msg": self.msg}


class SpawnExited(ProcessExitedException, RankDied):
    """A rank ended without an exception: both torch's exception, with its text, and nbddp's."""

    def __init__(self, error: RankDied, pid: int) -> None:
        by_signal = error.signal_name is not None
        how = f"signal {error.signal_name}" if by_signal else f"exit code {error.exitcode}"
        self.msg = f"process {error.rank} terminated with {how}"
        Exception.__init__(self, self.msg)
        self.__dict__.update(error.__dict__)
        self._made_of = (error, pid)
        self.error_index = error.rank
        self.exit_code = error.exitcode
        self.pid = self.error_pid = pid

    def __reduce__(self) -> Any:
        return type(self), self._made_of, {"msg": self.msg}


class SpawnContext:
    """What ``spawn(join=False)`` returns, as torch's ``SpawnContext``.

    Attributes:
        run: the same run as an nbddp ``Run``.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def pids(self) -> list[int]:
        """The process ids, by rank."""
        while len(pids := self.run._supervisor.pids()) < self.run.nprocs and not self.run._supervisor.join(0.001):
            pass
        return pids

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for all processes.

        Args:
            timeout: seconds; None waits until the end.
            grace_period: accepted for torch's sake; the other ranks of a failed run are ended at once.

        Returns:
            True when every process has ended well, False when ``timeout`` is over first.

        Raises:
            ProcessRaisedException, ProcessExitedException: the first failure, as torch words it.
        """
        if not self.run._supervisor.join(timeout):
            return False
        if self.run.error is not None:
            raise _in_torchs_terms(self.run.error, self.pids())
        return True


def _in_torchs_terms(error: BaseException, pids: Sequence[int]) -> BaseException:
    if isinstance(error, RankError):
        return SpawnRaised(error, pids[error.rank])
    if isinstance(error, RankDied):
        return SpawnExited(error, pids[error.rank])
    return error


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """``torch.multiprocessing.spawn`` that works from a cell: calls ``fn(rank, *args)`` in ``nprocs`` processes.

    The run shows itself as one of :func:`nbddp.run` does. No process group is made and no environment
    variable set: the function does that, as in the tutorials, on whatever port it says.

    Args:
        join: False: return a context with ``join()`` and ``pids()`` at once.
        daemon: accepted for torch's sake; no process outlives the notebook in any case.
        start_method: accepted for torch's sake. The processes are as fresh as spawn's and come from
            nbddp's fork server; ``nbddp.run(start_method="spawn")`` is the real one.

    Raises:
        ProcessRaisedException, ProcessExitedException: as torch, and also ``RankError``, ``RankDied``.
        LaunchError: the arguments cannot work.
    """
    if nprocs == 0:
        raise LaunchError("spawn(nprocs=0) would do nothing; torch.cuda.device_count() is 0 without a GPU")
    found = accelerator()
    device = None if found is not None and found[1] >= nprocs else "cpu"
    plan = make_plan(fn, args, {}, nprocs=nprocs, device=device, init=False, contract=False, pass_rank=True)
    if not join:
        return SpawnContext(launch(plan, Local(plan), fn, tuple(args), {}, wait=False, show=False))
    try:
        launch(plan, Local(plan), fn, tuple(args), {}, wait=True, show=None)
    except (RankError, RankDied) as error:
        run = last_run()
        assert run is not None
        raise _in_torchs_terms(error, run._supervisor.pids()) from error.__cause__
    return None
