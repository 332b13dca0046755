"""``spawn``: ``torch.multiprocessing.spawn`` for functions that are defined in a notebook."""

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from nbddp.errors import RankDied, RankError
from nbddp.helpers import context
from nbddp.kernel import earlier
from nbddp.kernel.run import Run
from nbddp.kernel.settings import Options, check_call, decide, device_and_count
from nbddp.kernel.start import launch, pack_call

_POLL_S = 0.01
_SLOTS = ("error_index", "error_pid", "exit_code")  # of torch's classes


def _remade(error: BaseException) -> tuple[Any, ...]:
    slots = {name: getattr(error, name) for name in _SLOTS if hasattr(error, name)}
    return Exception.__new__, (type(error), *error.args), {**vars(error), **slots}


class SpawnRaised(ProcessRaisedException, RankError):
    """A rank raised an exception. The text is torch's; a cell shows it as nbddp's."""

    __reduce__ = _remade


class SpawnExited(ProcessExitedException, RankDied):
    """A rank ended without an exception. The text is torch's."""

    __reduce__ = _remade


class SpawnContext:
    """The result of ``spawn(join=False)``, like torch's ``SpawnContext``.

    Attributes:
        run: the ``Run``.
    """

    def __init__(self, run: Run[Any]) -> None:
        self.run = run

    def pids(self) -> list[int]:
        """Return the process ids, by rank, as soon as they are known."""
        while True:
            over = self.run._done.wait(_POLL_S)
            found = [rank.pid for rank, _, _ in self.run._parts]
            if over or (found and all(found)):
                return found

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for all processes.

        Args:
            timeout: seconds; None waits until the end.
            grace_period: accepted for compatibility; when a rank fails, the others are ended at once.

        Returns:
            True when every process has finished successfully, False if ``timeout`` expires first.

        Raises:
            ProcessRaisedException, ProcessExitedException: the first failure, with torch's text.
            NbddpError: the run was stopped.
        """
        if not self.run._done.wait(timeout):
            return False
        if self.run.error is not None:
            raise _as_torchs(self.run.error, self.pids())
        _ = self.run.values  # an error, if it was stopped
        return True


def _as_torchs(error: BaseException, pids: Sequence[int]) -> BaseException:
    made: Any  # torch's classes set their attributes in __init__; the parents' __init__ methods exclude each other
    if isinstance(error, RankError):
        shown = "".join(traceback.format_exception(error.cause)).rstrip("\n")
        text = f"\n\n-- Process {error.rank} terminated with the following error:\n{shown}"
        made = SpawnRaised.__new__(SpawnRaised, text)
    elif isinstance(error, RankDied):
        how = f"signal {error.signal_name}" if error.signal_name else f"exit code {error.exitcode}"
        text = f"process {error.rank} terminated with {how}"
        made = SpawnExited.__new__(SpawnExited, text)
        made.exit_code = error.exitcode
    else:
        return error
    made.__setstate__(vars(error))
    made.msg, made.error_index, made.error_pid = text, error.rank, pids[error.rank]
    made.pid = made.error_pid  # its name in older versions of torch
    made.__cause__ = error.__cause__
    return made  # type: ignore[no-any-return]


class _RankArgument:
    """Is unpickled as the number of the rank."""

    def __reduce__(self) -> Any:
        return context.rank, ()


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """``torch.multiprocessing.spawn`` that works from a cell: calls ``fn(rank, *args)`` in ``nprocs`` processes.

    It's shown like ``run()``. No process group is created, and torchrun's environment variables aren't set: the
    function does that, as in torch's tutorials, on any port.

    Args:
        join: False: return at once, with a context that has ``join()`` and ``pids()``.
        daemon: accepted for compatibility; no process outlives the notebook in any case.
        start_method: accepted for compatibility. The processes are as fresh as spawned ones, but come from nbddp's
            fork server.

    Raises:
        ProcessRaisedException, ProcessExitedException: as in torch; they are also a ``RankError`` or ``RankDied``.
        LaunchError: the arguments are invalid.
    """
    _, count = device_and_count(Options())
    device = None if isinstance(nprocs, int) and nprocs <= count else "cpu"
    options = Options(nprocs=nprocs, device=device, init_process_group=False, wait=join)
    with_rank = functools.partial(fn, _RankArgument()) if callable(fn) else fn
    name = check_call(with_rank, args, {}, None)
    settings = decide(name, options, contract=False)
    packed = pack_call(name, with_rank, tuple(args), {})
    going = SpawnContext(launch(settings, packed, options, earlier.function(fn)))
    if not join:
        return going
    going.join()
    return None
