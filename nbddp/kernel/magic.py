"""Kernel side. What ``%load_ext nbddp`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbddp.kernel import forkserver

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Warm the fork server, so that the first run starts as fast as every later one."""
    if forkserver.available():
        forkserver.warm()
