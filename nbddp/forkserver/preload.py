"""``nbddp.preload``: modules that the fork server imports for all ranks."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

from nbddp.errors import LaunchError
from nbddp.forkserver import server as forkserver
from nbddp.latch import uninterrupted
from nbddp.text import short

_INSTALLED = {"site-packages", "dist-packages"}


def preload(*modules: str) -> None:
    """Import packages once, in this kernel's fork server, so that the ranks of later runs start with them imported.

    A rank is a new process and imports what the function needs in every run: pandas takes half a second, other packages
    take several. After ``nbddp.preload("pandas", "sklearn.linear_model")`` a new server imports them once, in the
    background. The call returns at once; a run that starts before the import is done waits for it, and so does its
    Stop. It works like ``multiprocessing.set_forkserver_preload``, but detects a module that ends the server when it is
    imported, or that starts a Python thread or initialises CUDA through torch, neither of which works after a fork. The
    run then starts again without any preloaded module, and its output gives the reason.

    Some packages import their parts only when these are first used, so that preloading the package saves no time. Name
    the modules that the function uses: for transformers' ``Trainer`` that is its ``__module__``,
    ``"transformers.trainer"``.

    The modules see the environment variables that are set now. Exit handlers that they register are not called in the
    ranks. Preloading lasts until the kernel ends, and is for ranks on this machine that come from the fork server; with
    ``start_method="spawn"`` and on other hosts ranks import for themselves.

    Args:
        modules: names of installed modules, as ``import`` takes them: ``"pandas"``, ``"torchvision.models"``,
            ``"transformers.trainer"``.

    Raises:
        LaunchError: there is no such package, or it is a file of your own, of which ranks would not see later versions,
            or no server can be started.
    """
    for name in modules:
        _check(name)
    if not forkserver.available():
        return
    try:
        uninterrupted(lambda: forkserver.preload(modules), "nbddp-preload")
    except OSError as error:
        raise LaunchError(f"the fork server could not be started: {error}") from error


def _check(name: str) -> None:
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise LaunchError(f"preload() takes names of modules, as import does, not {short(name)}")
    package = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec, created by hand
        spec = None
    if spec is None:
        raise LaunchError(f"preload(): no module {package} is installed for {sys.executable}")
    found = next(iter(spec.submodule_search_locations or ()), spec.origin if spec.has_location else None)
    if not found or _INSTALLED & set(Path(found).parts) or Path(found).is_relative_to(sysconfig.get_path("stdlib")):
        return
    raise LaunchError(
        f"preload(): {package} is not an installed package, but comes from {found}. Ranks would not see your later "
        "changes to it"
    )
