"""Kernel side. Which front end shows the cell that is running, as far as the kernel can know."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# A Python client (nbclient, papermill, a terminal console) names its messages session_pid_count
# (jupyter_client 7) or session_count; JupyterLab, VS Code and Colab name them by a UUID.
_PYTHON_CLIENT = re.compile(r".+_\d+")


def shell() -> InteractiveShell | None:
    """The notebook kernel's shell; None in a terminal or a script."""
    from IPython import get_ipython

    current = get_ipython()
    return current if getattr(current, "kernel", None) is not None else None


def has_page() -> bool:
    """Is it likely that a page with widgets shows this cell's output?"""
    if shell() is None:
        return False
    parent = _request()
    # A server extension may execute for JupyterLab, and Colab's messages come by a way of its own.
    by_page = "cellId" in parent.get("metadata", {}) or "google.colab" in sys.modules
    return by_page or not _PYTHON_CLIENT.fullmatch(str(parent.get("header", {}).get("msg_id", "")))


def finds_its_picture() -> bool:
    """Is it JupyterLab or Notebook 7, where a widget's script runs in the same page as any cell's HTML?

    VS Code names its cells by an address; Colab has a frame for each output.
    """
    cell = str(_request().get("metadata", {}).get("cellId", ""))
    return bool(cell) and ":" not in cell and "google.colab" not in sys.modules


def _request() -> dict[str, Any]:
    """The message that the kernel is executing, {} if none."""
    kernel: Any = getattr(shell(), "kernel", None)
    return kernel.get_parent() if hasattr(kernel, "get_parent") else {}


def kernel_id() -> str:
    """By which a Jupyter server knows this kernel: it names the connection file after it."""
    app = getattr(getattr(shell(), "kernel", None), "parent", None)
    connection_file = str(getattr(app, "connection_file", ""))
    match = re.fullmatch(r"kernel-(.+)\.json", os.path.basename(connection_file))
    return match[1] if match else ""
