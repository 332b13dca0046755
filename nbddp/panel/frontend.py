"""Detects which front end shows the running cell, as far as the notebook kernel can know it."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# A Python client (nbclient, papermill, a terminal console) names its messages session_pid_count
# (jupyter_client 7) or session_count; JupyterLab, VS Code and Colab use UUIDs.
_PYTHON_CLIENT = re.compile(r".+_\d+")


def shell() -> InteractiveShell | None:
    """The notebook kernel's shell; None in a terminal or a script."""
    from IPython import get_ipython

    current = get_ipython()
    return current if getattr(current, "kernel", None) is not None else None


def cell_number() -> int | None:
    """The execution count of the running cell; None in a terminal or a script."""
    current = shell()
    return current.execution_count if current is not None else None


def has_page() -> bool:
    """Whether a page with widgets probably shows this cell's output."""
    if shell() is None:
        return False
    parent = _request()
    # In JupyterLab a server extension may execute the cell, and Colab does not send messages as Jupyter does.
    by_page = "cellId" in parent.get("metadata", {}) or "google.colab" in sys.modules
    return by_page or not _PYTHON_CLIENT.fullmatch(str(parent.get("header", {}).get("msg_id", "")))


def is_jupyter() -> bool:
    """Whether the front end is JupyterLab or Notebook 7, where a widget's script can reach the HTML of a cell's output.

    In Colab, each output is a frame of its own. VS Code is recognized by the addresses that it uses as cell ids.
    """
    cell = str(_request().get("metadata", {}).get("cellId", ""))
    return bool(cell) and ":" not in cell and "google.colab" not in sys.modules


def _request() -> dict[str, Any]:
    """The message that the kernel is executing; {} if there is none."""
    kernel: Any = getattr(shell(), "kernel", None)
    return kernel.get_parent() if hasattr(kernel, "get_parent") else {}


def kernel_id() -> str:
    """The Jupyter server's id of this kernel, from the name of the connection file; "" if not known."""
    app = getattr(getattr(shell(), "kernel", None), "parent", None)
    connection_file = str(getattr(app, "connection_file", ""))
    match = re.fullmatch(r"kernel-(.+)\.json", os.path.basename(connection_file))
    return match[1] if match else ""
