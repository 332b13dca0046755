"""The public face of nbddp: PyTorch DistributedDataParallel from a notebook.

    run = nbddp.run(train, nprocs=4)      # train() on 4 fresh processes, one per GPU
    run.value                             # what rank 0 returned

Names are imported when they are first used (PEP 562), so that a rank imports neither widgets nor IPython.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbddp import doors
from nbddp.versions import __version__

if sys.platform == "win32":
    raise ImportError("nbddp runs on Linux and macOS. On Windows, use it in WSL2 (Windows Subsystem for Linux)")

if TYPE_CHECKING:
    from nbddp.errors import HostLost as HostLost
    from nbddp.errors import LaunchError as LaunchError
    from nbddp.errors import NanLogged as NanLogged
    from nbddp.errors import NbddpError as NbddpError
    from nbddp.errors import PayloadError as PayloadError
    from nbddp.errors import RankDied as RankDied
    from nbddp.errors import RankError as RankError
    from nbddp.errors import RunTimeout as RunTimeout
    from nbddp.forkserver.preload import preload as preload
    from nbddp.history.history import History as History
    from nbddp.hosts.cluster import Cluster as Cluster
    from nbddp.hosts.cluster import cluster as cluster
    from nbddp.job.export import export as export
    from nbddp.job.export import load_result as load_result
    from nbddp.kernel.run import Run as Run
    from nbddp.kernel.run import last_run as last_run
    from nbddp.kernel.run import runs as runs
    from nbddp.kernel.run import shutdown as shutdown
    from nbddp.kernel.runner import run as run
    from nbddp.kernel.script import run_script as run_script
    from nbddp.kernel.spawn import spawn as spawn
    from nbddp.magic.magic import load_ipython_extension as load_ipython_extension
    from nbddp.panel.compare import compare as compare
    from nbddp.sessions.opening import session as session
    from nbddp.sessions.session import Session as Session
    from nbddp.worker.collectives import all_gather as all_gather
    from nbddp.worker.collectives import all_reduce as all_reduce
    from nbddp.worker.collectives import barrier as barrier
    from nbddp.worker.collectives import broadcast as broadcast
    from nbddp.worker.collectives import gather as gather
    from nbddp.worker.collectives import main_first as main_first
    from nbddp.worker.collectives import reduce as reduce
    from nbddp.worker.context import device as device
    from nbddp.worker.context import is_primary as is_primary
    from nbddp.worker.context import local_rank as local_rank
    from nbddp.worker.context import print as print
    from nbddp.worker.context import rank as rank
    from nbddp.worker.context import restart_count as restart_count
    from nbddp.worker.context import world_size as world_size
    from nbddp.worker.data import loader as loader
    from nbddp.worker.debugger import breakpoint as breakpoint
    from nbddp.worker.metrics import log as log
    from nbddp.worker.metrics import progress as progress
    from nbddp.worker.model import accumulate as accumulate
    from nbddp.worker.model import join as join
    from nbddp.worker.model import wrap as wrap
    from nbddp.worker.show import show as show
    from nbddp.worker.snapshot import load_snapshot as load_snapshot
    from nbddp.worker.snapshot import save_snapshot as save_snapshot

_HOMES = {
    "nbddp.errors": (
        "HostLost",
        "LaunchError",
        "NanLogged",
        "NbddpError",
        "PayloadError",
        "RankDied",
        "RankError",
        "RunTimeout",
    ),
    "nbddp.job.export": ("export", "load_result"),
    "nbddp.history.history": ("History",),
    "nbddp.hosts.cluster": ("Cluster", "cluster"),
    "nbddp.magic.magic": ("load_ipython_extension",),
    "nbddp.forkserver.preload": ("preload",),
    "nbddp.kernel.run": ("Run", "last_run", "runs", "shutdown"),
    "nbddp.kernel.runner": ("run",),
    "nbddp.kernel.script": ("run_script",),
    "nbddp.kernel.spawn": ("spawn",),
    "nbddp.sessions.opening": ("session",),
    "nbddp.sessions.session": ("Session",),
    "nbddp.worker.collectives": (
        "all_gather",
        "all_reduce",
        "barrier",
        "broadcast",
        "gather",
        "main_first",
        "reduce",
    ),
    "nbddp.panel.compare": ("compare",),
    "nbddp.worker.context": (
        "device",
        "is_primary",
        "local_rank",
        "print",
        "rank",
        "restart_count",
        "world_size",
    ),
    "nbddp.worker.data": ("loader",),
    "nbddp.worker.debugger": ("breakpoint",),
    "nbddp.worker.metrics": ("log", "progress"),
    "nbddp.worker.model": ("accumulate", "join", "wrap"),
    "nbddp.worker.show": ("show",),
    "nbddp.worker.snapshot": ("load_snapshot", "save_snapshot"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(set(_HOME_OF) - {"load_ipython_extension"})


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'nbddp' has no attribute {name!r}")
    value = getattr(_import(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def _import(name: str) -> Any:
    """Import the module without the collections of what it creates, which take a sixth of the time of torch's import.

    Nothing of the collector's settings has changed afterwards.
    """
    if name in sys.modules or not gc.isenabled():
        return importlib.import_module(name)
    thresholds = gc.get_threshold()
    gc.set_threshold(thresholds[0], *(1000 if threshold else 0 for threshold in thresholds[1:]))
    try:
        return importlib.import_module(name)
    finally:
        gc.set_threshold(*thresholds)
        if not gc.get_freeze_count():
            gc.freeze()  # and all objects are in the oldest generation, as after a collection
            gc.unfreeze()


def _later(home: str, name: str) -> Callable[..., Any]:
    return lambda *args: getattr(importlib.import_module(home), name)(*args)


doors.open_remote = _later("nbddp.hosts.site", "open_remote")
doors.close_sessions = lambda: _close_sessions()
doors.picture_of = _later("nbddp.panel.picture", "plotted")


def _close_sessions() -> None:
    sessions = sys.modules.get("nbddp.sessions.session")  # without it there is none
    if sessions is not None:
        sessions.close_all()


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _warm_in_a_kernel() -> None:
    """In a notebook, start now what the first run needs (importing torch, for example); not in a plain script."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if getattr(shell, "kernel", None) is None:
        return
    from nbddp.forkserver import server as forkserver

    forkserver.warm()


_warm_in_a_kernel()
