"""``nbddp.run_script``: runs a whole script on every rank, as torchrun would start it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nbddp.errors import LaunchError
from nbddp.kernel.options import RunOptions, takes_options
from nbddp.kernel.plan import Call, working_directory
from nbddp.kernel.run import Run
from nbddp.kernel.runner import launch, plan_run
from nbddp.worker import script

if TYPE_CHECKING:
    from typing_extensions import Unpack

Argument = str | os.PathLike[str] | int | float


@takes_options
def run_script(
    path: str | os.PathLike[str],
    argv: Sequence[Argument] | Callable[[int], Sequence[Argument]] = (),
    **options: Unpack[RunOptions],
) -> Run[None]:
    """``torchrun --standalone --nproc_per_node=nprocs path argv``, without leaving the notebook.

    The script is ``__main__`` on every rank, with its folder on ``sys.path``, the notebook's working
    directory, and torchrun's environment variables. A process group is ready; a script that calls
    ``init_process_group`` gets its own. Run a script that calls ``mp.spawn`` as one process: ``nprocs=1``.

    Args:
        argv: the arguments after the script's name, or a function that returns the arguments of a rank.
        init: False: no process group, as under torchrun; the script makes its own.
        name: the run's name. Default: the file's name.
        hosts: every host must have the script, and its imports, under the same path.

    The other arguments and exceptions are those of :func:`nbddp.run`; ``sys.exit(0)`` is a success.

    Returns:
        The run; its ``value`` is None.

    Raises:
        LaunchError: also if the file does not exist.
    """
    file, cwd = os.path.expanduser(os.fspath(path)), working_directory()
    if os.path.isdir(file):
        raise LaunchError(f"{file} is a folder, not a script")
    if not os.path.isfile(file):
        raise LaunchError(f"{file} is not there; the notebook runs in {cwd}")
    plan, site = plan_run(options["name"] or os.path.basename(file), options)
    by_rank = tuple(_checked_argv(argv(rank) if callable(argv) else argv) for rank in range(plan.nprocs))
    call = Call(plan.name, script.run_script, (script.Script(file, by_rank),), {})
    return launch(plan, site, call, options)


def _checked_argv(argv: Any) -> tuple[str, ...]:
    if isinstance(argv, (str, bytes)) or not isinstance(argv, Sequence):
        raise LaunchError(f"argv is a list of words, e.g. argv=['--lr', '0.1'], not {argv!r}; use shlex.split()")
    return tuple(os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in argv)
