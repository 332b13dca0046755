"""PyTorch DistributedDataParallel from a notebook.

    run = nbddp.run(train, nprocs=4)      # train() on 4 fresh processes, one per GPU
    run.value                             # what rank 0 returned

Names are imported when they are first used (PEP 562).
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [  # without print and breakpoint: a star import must not shadow Python's
    "CellError", "History", "LaunchError", "NanLogged", "NbddpError", "NodeLost", "PayloadError", "RankDied",
    "RankError", "Run", "RunTimeout", "Session", "SessionLost", "accumulate", "all_gather", "all_reduce", "barrier",
    "broadcast", "device", "export", "gather_for_metrics", "is_primary", "join", "last_run", "load_result",
    "load_snapshot", "loader", "local_rank", "log", "main_first", "preload", "progress", "rank", "restart_count", "run",
    "run_script", "runs", "save_snapshot", "shutdown", "spawn", "world_size", "wrap",
]  # fmt: skip

if sys.platform != "linux":
    raise ImportError("nbddp runs only on Linux. On Windows, use it in WSL2 (Windows Subsystem for Linux)")

if TYPE_CHECKING:
    from nbddp.errors import (
        CellError,
        LaunchError,
        NanLogged,
        NbddpError,
        NodeLost,
        PayloadError,
        RankDied,
        RankError,
        RunTimeout,
        SessionLost,
    )
    from nbddp.helpers.collectives import all_gather, all_reduce, barrier, broadcast, main_first
    from nbddp.helpers.context import device, is_primary, local_rank, rank, restart_count, world_size
    from nbddp.helpers.context import print as print
    from nbddp.helpers.loader import gather_for_metrics, loader
    from nbddp.helpers.log import log, progress
    from nbddp.helpers.model import accumulate, join, wrap
    from nbddp.helpers.snapshot import load_snapshot, save_snapshot
    from nbddp.job.export import export, load_result
    from nbddp.kernel.run import Run, last_run, runs, shutdown
    from nbddp.kernel.script import run_script
    from nbddp.kernel.session import Session
    from nbddp.kernel.spawn import spawn
    from nbddp.kernel.start import run
    from nbddp.magic.magic import load_ipython_extension as load_ipython_extension
    from nbddp.panel.plotted import History
    from nbddp.process.server import preload
    from nbddp.worker.debugger import breakpoint as breakpoint

_HOMES = {
    "nbddp.errors": "CellError LaunchError NanLogged NbddpError NodeLost PayloadError RankDied RankError RunTimeout "
    "SessionLost",
    "nbddp.helpers.collectives": "all_gather all_reduce barrier broadcast main_first",
    "nbddp.helpers.context": "device is_primary local_rank print rank restart_count world_size",
    "nbddp.helpers.loader": "gather_for_metrics loader",
    "nbddp.helpers.log": "log progress",
    "nbddp.helpers.model": "accumulate join wrap",
    "nbddp.helpers.snapshot": "load_snapshot save_snapshot",
    "nbddp.panel.plotted": "History",
    "nbddp.job.export": "export load_result",
    "nbddp.magic.magic": "load_ipython_extension",
    "nbddp.process.server": "preload",
    "nbddp.kernel.run": "Run last_run runs shutdown",
    "nbddp.kernel.script": "run_script",
    "nbddp.kernel.session": "Session",
    "nbddp.kernel.spawn": "spawn",
    "nbddp.kernel.start": "run",
    "nbddp.worker.debugger": "breakpoint",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
_ELSEWHERE = {  # what a name is called in accelerate and torchrun, and was called here
    "cluster": "run(nnodes=)",
    "compare": "History.plot(before=)",
    "launch": "run",
    "notebook_launcher": "run",
    "reduce": "all_reduce(x, op='mean')",
    "show": "IPython's display",
}


if not TYPE_CHECKING:  # else every name would be one

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            from nbddp.errors import without_our_frames
            from nbddp.text import did_you_mean

            hint = f"; did you mean {_ELSEWHERE[name]}?" if name in _ELSEWHERE else did_you_mean(name, __all__)
            raise without_our_frames(AttributeError(f"module 'nbddp' has no attribute {name!r}{hint}"))
        found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "breakpoint", "print"])


def _ddp(line: str, cell: str | None = None) -> Any:
    """Load nbddp's magics, and run the one with this name."""
    _shell.extension_manager.load_extension("nbddp")
    return _shell.run_line_magic("ddp", line) if cell is None else _shell.run_cell_magic("ddp", line, cell)


_shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
if getattr(_shell, "kernel", None) is not None:
    from IPython.core.magic import no_var_expand as _no_var_expand

    from nbddp.process import server as _server

    _server.start_early()
    if "ddp" not in _shell.magics_manager.magics["cell"]:  # nbddp may have been reloaded
        _shell.register_magic_function(_no_var_expand(_ddp), "line_cell", "ddp")  # else it's expanded twice
