"""``run_script``: a whole script or module on every rank, as torchrun would start it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from nbddp.errors import LaunchError
from nbddp.kernel.run import Run
from nbddp.kernel.settings import Given, Options, decide, takes_options, working_directory
from nbddp.kernel.start import launch, pack_call
from nbddp.worker import script_main

Argument = str | os.PathLike[str] | int | float


@takes_options
def run_script(
    path: str | os.PathLike[str],
    argv: Sequence[Argument] | Callable[[int], Sequence[Argument]] = (),
    *,
    module: bool = False,
    **options: Unpack[Given],
) -> Run[None]:
    """Run ``torchrun --standalone --nproc_per_node=nprocs path argv``, but from the notebook, and wait for it.

    The script is ``__main__`` on every rank, with its folder first on ``sys.path``, the notebook's working directory,
    and torchrun's environment variables. It has no process group until it calls ``init_process_group``, so
    ``backend`` and ``pg_timeout`` have no effect. Run a script that calls ``mp.spawn`` as one process: ``nprocs=1``.

    Args:
        argv: the arguments after the script's name, or a function that returns the arguments of a rank.
        module: ``path`` is the name of a module or package, as in ``python -m package.module``, not of a file.
        name: the run's name. Default: the file's name.

    The other arguments and exceptions are those of ``run()``; ``sys.exit(0)`` counts as success.

    Returns:
        The run; its ``value`` is None.

    Raises:
        LaunchError: also if there is no such file.
    """
    file = os.fspath(path) if module else os.path.expanduser(os.fspath(path))
    if os.path.isdir(file) and not module:
        raise LaunchError(f"{file} is a folder, not a script")
    if not os.path.isfile(file) and not module:
        raise LaunchError(f"{file} doesn't exist; the notebook's working directory is {working_directory()}")
    chosen = dataclasses.replace(Options(**options), init_process_group=False)
    name = str(chosen.name or (file if module else os.path.basename(file)))
    settings = dataclasses.replace(decide(name, chosen), imports=())
    words = tuple(_words(argv(rank) if callable(argv) else argv) for rank in range(settings.world_size))
    packed = pack_call(name, script_main.run_script, (file, words, module), {})
    launched = launch(settings, packed, chosen, os.path.abspath(file))
    return launched.wait() if chosen.wait else launched


def _words(argv: Any) -> tuple[str, ...]:
    if isinstance(argv, (str, bytes)) or not isinstance(argv, Sequence):
        raise LaunchError(
            f"argv must be a list of arguments, e.g. argv=['--lr', '0.1'], not {argv!r}; shlex.split() splits a string"
        )
    return tuple(os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in argv)
