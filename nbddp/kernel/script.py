"""Kernel side. ``nbddp.run_script``: a whole script on every rank, as torchrun would start it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nbddp.errors import LaunchError
from nbddp.kernel.hosts import Hosts
from nbddp.kernel.plan import STALL_AFTER_S, working_directory
from nbddp.kernel.runner import Run, launch, planned
from nbddp.worker import script

Argument = str | os.PathLike[str] | int | float


def run_script(
    path: str | os.PathLike[str],
    argv: Sequence[Argument] | Callable[[int], Sequence[Argument]] = (),
    *,
    nprocs: int | Mapping[str, int] | None = None,
    device: str | torch.device | None = None,
    gpus: Sequence[int] | None = None,
    backend: str | None = None,
    init: bool = True,
    seed: int | None = None,
    deterministic: bool = False,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    pg_timeout: float | None = None,
    max_restarts: int = 0,
    stall_after: float | None = STALL_AFTER_S,
    wait: bool = True,
    show: bool | None = None,
    name: str | None = None,
    start_method: str | None = None,
    hosts: Hosts = None,
    min_hosts: int | None = None,
    keep_children: bool = False,
    oversubscribe: bool = False,
) -> Run:
    """``torchrun --standalone --nproc_per_node=nprocs path argv``, without leaving the notebook.

    The script is ``__main__`` on every rank, with its folder on ``sys.path``, the notebook's working
    directory, and torchrun's environment variables. A process group is ready; a script that makes its
    own gets that. A script that itself calls ``mp.spawn`` is one process: ``nprocs=1``.

    Args:
        argv: the arguments after the script's name, or a function from the rank to them.
        init: False: no process group, as under torchrun; the script makes its own.
        name: default: the file's name.
        hosts: each has the script, and what it imports, under the same path.

    The other arguments, and what is raised, are those of :func:`nbddp.run`; ``sys.exit(0)`` is success.

    Returns:
        The run; its ``value`` is None.

    Raises:
        LaunchError: also when there is no such file.
    """
    file = _existing(path)
    plan, site = planned(
        script.run_script,
        (None,),
        {},
        nprocs=nprocs,
        device=device,
        gpus=gpus,
        backend=backend,
        init=init,
        seed=seed,
        deterministic=deterministic,
        env=env,
        timeout=timeout,
        pg_timeout=pg_timeout,
        max_restarts=max_restarts,
        stall_after=stall_after,
        name=name or os.path.basename(file),
        start_method=start_method,
        hosts=hosts,
        min_hosts=min_hosts,
        keep_children=keep_children,
        oversubscribe=oversubscribe,
    )
    by_rank = tuple(_words(argv(rank) if callable(argv) else argv) for rank in range(plan.nprocs))
    return launch(plan, site, script.run_script, (script.Script(file, by_rank),), {}, wait=wait, show=show)


def _existing(path: str | os.PathLike[str]) -> str:
    file = os.path.expanduser(os.fspath(path))
    here = working_directory()
    if os.path.isfile(file):
        return file
    what = "is a folder, not a script" if os.path.isdir(file) else f"is not there; the notebook runs in {here}"
    raise LaunchError(f"{file} {what}")


def _words(argv: Any) -> tuple[str, ...]:
    if isinstance(argv, (str, bytes)) or not isinstance(argv, Sequence):
        raise LaunchError(f"argv is a list of words, e.g. argv=['--lr', '0.1'], not {argv!r}; shlex.split() makes one")
    return tuple(os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in argv)
