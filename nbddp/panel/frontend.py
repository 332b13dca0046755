"""Detects which front end shows the running cell, as far as the notebook kernel can know it."""

from __future__ import annotations

import os
import re
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# A Python client (nbclient, papermill, a terminal console) names its messages session_pid_count
# (jupyter_client 7) or session_count; JupyterLab, VS Code and Colab use UUIDs.
_PYTHON_CLIENT = re.compile(r".+_\d+")

# What these services set in the kernel's environment.
_KAGGLE = "KAGGLE_KERNEL_RUN_TYPE"  # "Interactive" or "Batch"
_PLACES = {_KAGGLE: "kaggle", "COLAB_RELEASE_TAG": "colab", "DATABRICKS_RUNTIME_VERSION": "databricks"}


def shell() -> InteractiveShell | None:
    """The notebook kernel's shell; None in a terminal or a script."""
    ipython: Any = sys.modules.get("IPython")  # imported in every kernel; in a script this takes 0.25 s
    current = ipython.get_ipython() if hasattr(ipython, "get_ipython") else None
    return current if getattr(current, "kernel", None) is not None else None


def cell_number() -> int | None:
    """The execution count of the running cell; None in a terminal or a script."""
    current = shell()
    return current.execution_count if current is not None else None


def cell_id() -> str:
    """The front end's id of the running cell, which stays the same when the cell is run again; "" if not known."""
    return str(_request().get("metadata", {}).get("cellId", ""))


def is_marimo() -> bool:
    """Whether a cell of a marimo notebook is running."""
    marimo = sys.modules.get("marimo")  # imported in every process of its notebooks
    return bool(marimo is not None and hasattr(marimo, "running_in_notebook") and marimo.running_in_notebook())


def show_in_marimo(html: str) -> None:
    """Replace the output of the running cell of a marimo notebook."""
    marimo: Any = sys.modules["marimo"]
    marimo.output.replace(marimo.Html(html))


def marimo_shows_widgets() -> bool:
    """Whether a page of marimo shows this cell's output now: not in an export, nor in a version without widgets."""
    marimo: Any = sys.modules["marimo"]
    mode = marimo.app_meta().mode if hasattr(marimo, "app_meta") else None  # marimo 0.9
    return mode in ("edit", "run") and hasattr(getattr(marimo, "ui", None), "anywidget")


def show_widget_in_marimo(widget: Any) -> None:
    """Replace the output of the running cell of a marimo notebook by a widget."""
    marimo: Any = sys.modules["marimo"]
    marimo.output.replace(marimo.ui.anywidget(widget))


def place() -> str:
    """The hosted service that this kernel belongs to, if its pages are known to show HTML but hardly any widgets."""
    if "google.colab" in sys.modules:
        return "colab"
    return next((name for variable, name in _PLACES.items() if os.environ.get(variable)), "")


def is_executed() -> bool:
    """Whether the notebook is executed by a program (papermill, nbconvert), so that nobody sees the cell while it runs.

    In JupyterLab a server extension may execute the cell, and Colab does not send messages as Jupyter does.
    """
    if os.environ.get(_KAGGLE) == "Batch":  # "Save & Run All"
        return True
    parent = _request()
    if "cellId" in parent.get("metadata", {}) or place():
        return False
    return bool(_PYTHON_CLIENT.fullmatch(str(parent.get("header", {}).get("msg_id", ""))))


def has_stdin() -> bool:
    """Whether somebody can answer an ``input()`` of this thread."""
    if threading.current_thread() is not threading.main_thread():
        return False
    kernel: Any = getattr(shell(), "kernel", None)
    if kernel is None:
        return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
    return bool(getattr(kernel, "_allow_stdin", False))  # as the front end said with the running cell


def call_pdb() -> bool:
    """Whether the user has said ``%pdb on``."""
    return bool(getattr(shell(), "call_pdb", False))


def skip_debugger_of_this_cell() -> None:
    """With ``%pdb on``, keep IPython from opening its own debugger for the error that this cell is about to raise."""
    current: Any = shell()
    if current is None or not current.call_pdb:
        return

    def restore(*_: object) -> None:
        current.events.unregister("post_run_cell", restore)
        current.call_pdb = True

    current.call_pdb = False
    current.events.register("post_run_cell", restore)


def is_jupyter() -> bool:
    """Whether the front end is JupyterLab or Notebook 7, where a widget's script can reach the HTML of a cell's output.

    In Colab, each output is a frame of its own. VS Code is recognized by the addresses that it uses as cell ids.
    """
    cell = cell_id()
    return bool(cell) and ":" not in cell and "google.colab" not in sys.modules


def say_busy() -> None:
    """Report that the kernel is busy with the running cell, to a page that has been told otherwise.

    A message that a subshell has handled ends with "idle", and JupyterLab 4.6 takes that for the whole kernel's.
    """
    kernel: Any = getattr(shell(), "kernel", None)
    # ipykernel 7 is the first with subshells; _publish_status is private, as of 7.4.
    if not getattr(kernel, "_supports_kernel_subshells", False) or not hasattr(kernel, "_publish_status"):
        return
    if threading.current_thread() is threading.main_thread() and (request := _request()):
        kernel._publish_status("busy", "shell", parent=request)


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
