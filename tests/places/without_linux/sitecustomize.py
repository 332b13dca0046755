"""On ``PYTHONPATH``: takes from nbddp, in every Python process, what Linux has and macOS has not.

Libraries are imported first, since they look at the system when they are imported.
"""

import builtins
import importlib
import os
import pathlib
import sys
import sysconfig

_PASS_ON = ("pathlib", "genericpath", "posixpath", "os", "io", "sitecustomize")
_LOOK_AT_THE_SYSTEM = (
    *("asyncio", "subprocess", "psutil", "multiprocessing.forkserver", "multiprocessing.popen_spawn_posix"),
    *("torch.distributed", "torch.utils.data"),
)

if os.environ.get("NBDDP_WITHOUT_LINUX") == "1":
    for name in _LOOK_AT_THE_SYSTEM:
        importlib.import_module(name)
    sysconfig.get_config_vars()  # reads a file that is named after the system

    for name in ("memfd_create", "sched_getaffinity", "sched_setaffinity", "pidfd_open", "eventfd", "unshare"):
        if hasattr(os, name):
            delattr(os, name)

    def _caller():
        """The module that asks, behind those of the standard library that pass on a path."""
        frame = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__") in _PASS_ON:
            frame = frame.f_back
        return "" if frame is None else frame.f_globals.get("__name__", "")

    def _without_proc(function):
        def looked_at(path=".", *args, **kwargs):
            is_path = isinstance(path, (str, os.PathLike))
            if is_path and os.fspath(path).startswith("/proc/") and _caller().startswith("nbddp"):
                raise FileNotFoundError(f"there is no {path} on macOS")
            return function(path, *args, **kwargs)

        return looked_at

    builtins.open = _without_proc(builtins.open)
    pathlib.Path.open = _without_proc(pathlib.Path.open)
    for name in ("listdir", "readlink", "stat", "open", "scandir"):
        setattr(os, name, _without_proc(getattr(os, name)))
    sys.platform = "darwin"
