"""Both sides. The public face of nbddp: PyTorch DistributedDataParallel from a notebook.

    run = nbddp.run(train, nprocs=4)      # train() on 4 fresh processes, one per GPU
    run.value                             # what rank 0 returned

Names load when they are first used (PEP 562): a rank imports no widget and no IPython.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("nbddp runs on Linux and macOS. On Windows, use it in WSL2 (Windows Subsystem for Linux)")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nbddp.errors import HostLost, LaunchError, NbddpError, PayloadError, RankDied, RankError, RunTimeout
    from nbddp.kernel.export import export, load_result
    from nbddp.kernel.history import History
    from nbddp.kernel.hosts import Cluster, cluster
    from nbddp.kernel.magic import load_ipython_extension
    from nbddp.kernel.preloading import preload
    from nbddp.kernel.runner import Run, last_run, run
    from nbddp.kernel.script import run_script
    from nbddp.kernel.spawn import spawn
    from nbddp.worker.collectives import barrier, gather, reduce
    from nbddp.worker.context import device, is_primary, local_rank, print, rank, restart_count, world_size
    from nbddp.worker.data import loader, wrap
    from nbddp.worker.metrics import log, progress
    from nbddp.worker.snapshot import load_snapshot, save_snapshot

_HOMES = {
    "nbddp.errors": ("HostLost", "LaunchError", "NbddpError", "PayloadError", "RankDied", "RankError", "RunTimeout"),
    "nbddp.kernel.export": ("export", "load_result"),
    "nbddp.kernel.history": ("History",),
    "nbddp.kernel.hosts": ("Cluster", "cluster"),
    "nbddp.kernel.magic": ("load_ipython_extension",),
    "nbddp.kernel.preloading": ("preload",),
    "nbddp.kernel.runner": ("Run", "last_run", "run"),
    "nbddp.kernel.script": ("run_script",),
    "nbddp.kernel.spawn": ("spawn",),
    "nbddp.worker.collectives": ("barrier", "gather", "reduce"),
    "nbddp.worker.context": (
        "device",
        "is_primary",
        "local_rank",
        "print",
        "rank",
        "restart_count",
        "world_size",
    ),
    "nbddp.worker.data": ("loader", "wrap"),
    "nbddp.worker.metrics": ("log", "progress"),
    "nbddp.worker.snapshot": ("load_snapshot", "save_snapshot"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(set(_HOME_OF) - {"load_ipython_extension"})


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'nbddp' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _warm_in_a_kernel() -> None:
    """In a notebook what a first run needs begins now (the import of torch, say); a plain script decides by itself."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if getattr(shell, "kernel", None) is None:
        return
    from nbddp import hugefiles
    from nbddp.kernel import forkserver

    hugefiles.begin()
    forkserver.warm()


_warm_in_a_kernel()
