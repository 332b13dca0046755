"""Kernel side. ``nbddp.preload``: what ranks find imported."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

from nbddp.errors import LaunchError, short
from nbddp.kernel import forkserver
from nbddp.waiting import uninterrupted

_INSTALLED = ("site-packages", "dist-packages")


def preload(*modules: str) -> None:
    """Have this kernel's fork server import packages, so that the ranks of later runs begin with them imported.

    A rank is a new process, and imports what the function needs in every run anew: pandas takes half a second, others
    several. After ``nbddp.preload("pandas", "sklearn.linear_model")`` that is done once, in the background, by a new
    server: the call returns at once; a run that starts meanwhile waits for the import, and so does its Stop. As
    ``multiprocessing.set_forkserver_preload``, with a look at what could go wrong: a module that ends the server, or
    starts a thread of Python or initialises CUDA through torch when it is imported, which no fork survives. Then the
    run starts anew without all that was preloaded, and says so in its output.

    Some packages import their parts when these are first used, so that the package alone saves nothing. Name the
    modules of what the function uses: of transformers' ``Trainer`` that is its ``__module__``,
    ``"transformers.trainer"``.

    The modules see the environment variables that are set now, and the functions that they register for the exit are
    not called in the ranks. For ranks on this machine that come from the fork server (``start_method="spawn"`` and
    ranks on other hosts import for themselves), until the kernel ends.

    Args:
        modules: names as ``import`` takes them, of what is installed: ``"pandas"``, ``"torchvision.models"``,
            ``"transformers.trainer"``.

    Raises:
        LaunchError: there is no such package; or it is a file of yours, of which ranks would not see the next version;
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
        raise LaunchError(f"preload takes names of modules, as import does, not {short(name)}")
    package = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # it is there, without a spec: made by hand
        spec = None
    if spec is None:
        raise LaunchError(f"no module {package} is installed for {sys.executable}, to be preloaded")
    found = next(iter(spec.submodule_search_locations or ()), spec.origin if spec.has_location else None)
    if found and not _is_installed(Path(found)):
        raise LaunchError(
            f"{package} is not an installed package but comes from {found}, and is not preloaded: ranks would not see "
            "the next version of it"
        )


def _is_installed(path: Path) -> bool:
    if any(part in _INSTALLED for part in path.parts):
        return True
    return path.is_relative_to(sysconfig.get_path("stdlib"))
