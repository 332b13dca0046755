"""``nbddp.spawn``: ``torch.multiprocessing.spawn`` for functions that are defined in a notebook."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from nbddp.errors import LaunchError, RankDied, RankError
from nbddp.kernel.options import complete
from nbddp.kernel.plan import checked_call, make_plan
from nbddp.kernel.run import Run, last_run
from nbddp.kernel.runner import launch
from nbddp.kernel.site import LocalSite
from nbddp.launch.devices import accelerator


class SpawnRaised(ProcessRaisedException, RankError):
    """The error of a rank that raised an exception: torch's, with torch's text, and nbddp's, which a cell shows."""

    def __init__(self, error: RankError, pid: int) -> None:
        text = "".join(traceback.format_exception(error.cause)).rstrip("\n")
        self.msg = f"\n\n-- Process {error.rank} terminated with the following error:\n{text}"
        Exception.__init__(self, self.msg)
        self.__dict__.update(error.__dict__)
        self.__cause__ = error.cause
        self._init_args = (error, pid)
        self.error_index = error.rank
        self.pid = self.error_pid = pid

    def __reduce__(self) -> Any:
        return type(self), self._init_args, {"msg": self.msg}


class SpawnExited(ProcessExitedException, RankDied):
    """The error of a rank that ended without an exception: torch's, with torch's text, and nbddp's."""

    def __init__(self, error: RankDied, pid: int) -> None:
        by_signal = error.signal_name is not None
        how = f"signal {error.signal_name}" if by_signal else f"exit code {error.exitcode}"
        self.msg = f"process {error.rank} terminated with {how}"
        Exception.__init__(self, self.msg)
        self.__dict__.update(error.__dict__)
        self._init_args = (error, pid)
        self.error_index = error.rank
        self.exit_code = error.exitcode
        self.pid = self.error_pid = pid

    def __reduce__(self) -> Any:
        return type(self), self._init_args, {"msg": self.msg}


class SpawnContext:
    """The result of ``spawn(join=False)``, like torch's ``SpawnContext``.

    Attributes:
        run: the same run as an nbddp ``Run``.
    """

    def __init__(self, run: Run[Any]) -> None:
        self.run = run

    def pids(self) -> list[int]:
        """Return the process ids, by rank."""
        while len(pids := self.run.pids) < self.run.nprocs and not self.run._supervisor.join(0.001):
            pass
        return pids

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for all processes.

        Args:
            timeout: seconds; None waits until the end.
            grace_period: accepted for compatibility; the other ranks of a failed run are ended at once.

        Returns:
            True when every process has finished successfully, False when ``timeout`` is over first.

        Raises:
            ProcessRaisedException, ProcessExitedException: the first failure, with torch's text.
        """
        if not self.run._supervisor.join(timeout):
            return False
        if self.run.error is not None:
            raise _as_torch_error(self.run.error, self.pids())
        return True


def _as_torch_error(error: BaseException, pids: Sequence[int]) -> BaseException:
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

    The run is shown like a run of :func:`nbddp.run`. No process group is made and no environment variable is set:
    the function does that, as in torch's tutorials, on any port.

    Args:
        join: False: return a context with ``join()`` and ``pids()`` at once.
        daemon: accepted for compatibility; no process outlives the notebook in any case.
        start_method: accepted for compatibility. The processes are as fresh as spawned ones, but come from nbddp's
            fork server; ``nbddp.run(start_method="spawn")`` really spawns them.

    Raises:
        ProcessRaisedException, ProcessExitedException: as torch does; they are also ``RankError``, ``RankDied``.
        LaunchError: the arguments cannot work.
    """
    if nprocs == 0:
        raise LaunchError("spawn(nprocs=0) would do nothing; torch.cuda.device_count() is 0 without a GPU")
    found = accelerator()
    device = None if found is not None and found[1] >= nprocs else "cpu"
    call = checked_call(fn, args, {}, first=(0,))
    options = complete(
        {"nprocs": nprocs, "device": device, "init": False, "wait": join, "show": None if join else False}
    )
    plan = make_plan(call.name, options, contract=False, pass_rank=True)
    if not join:
        return SpawnContext(launch(plan, LocalSite(plan), call, options))
    try:
        launch(plan, LocalSite(plan), call, options)
    except (RankError, RankDied) as error:
        run = last_run()
        assert run is not None
        raise _as_torch_error(error, run.pids) from error.__cause__
    return None
