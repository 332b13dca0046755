"""Which front end shows the running cell, as far as the kernel can know it."""

import os
import re
import sys
import threading
from typing import Any

# A Python client (nbclient, papermill) names its messages session_pid_count or session_count; pages use UUIDs.
_PYTHON_CLIENT = re.compile(r".+_\d+")
_HOSTED = ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE", "DATABRICKS_RUNTIME_VERSION")


def ipython() -> Any:
    """This process's IPython, in a notebook or a terminal; None in a script."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def shell() -> Any:
    """The notebook kernel's IPython; None in a terminal or a script."""
    current = ipython()
    return current if getattr(current, "kernel", None) is not None else None


KINDS = ("panel", "picture", "text")
VARIABLE = "NBDDP_PANEL"  # names the kind of view


def kind(show: bool | str | None = None) -> str:
    """How a run can be shown here: ``"panel"``, ``"picture"`` (HTML without scripts), or ``"text"``.

    Args:
        show: a kind; or True: something else than text, if there's a notebook.
    """
    if marimo() is None and shell() is None:
        return "text"
    if wanted := (show if isinstance(show, str) else "") or os.environ.get(VARIABLE):
        return wanted
    if marimo() is not None:
        return "panel" if marimo().app_meta().mode in ("edit", "run") else "picture"
    if is_executed():
        return "picture" if show else "text"
    return "picture" if any(map(os.environ.get, _HOSTED)) else "panel"


def marimo() -> Any:
    """marimo's module in a cell of its notebooks; None elsewhere."""
    found = sys.modules.get("marimo")
    return found if found is not None and getattr(found, "running_in_notebook", bool)() else None


def is_executed() -> bool:
    """Whether a program executes the notebook (papermill, nbconvert), so that nobody sees the cell while it runs."""
    if os.environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch":
        return True
    hosted = any(map(os.environ.get, _HOSTED)) or cell_id()
    return not hosted and bool(_PYTHON_CLIENT.fullmatch(request_id()))


def cell_number() -> int | None:
    """The execution count of the running cell; None in a terminal or a script."""
    current = shell()
    return current.execution_count if current is not None else None


def cell_id() -> str:
    """The page's id of the running cell, which stays the same when the cell is run again; "" if not known."""
    return str(_request().get("metadata", {}).get("cellId", ""))


def request_id() -> str:
    """The id of the page's request that is handled now; "" in a terminal or a script."""
    return str(_request().get("header", {}).get("msg_id", ""))


def shares_page() -> bool:
    """Whether a widget's script can reach the cell's output: JupyterLab, Notebook 7. (VS Code's ids are addresses.)"""
    return bool(cell_id()) and ":" not in cell_id()


def kernel_id() -> str:
    """The Jupyter server's id of this kernel, from its connection file; "" if not known."""
    file = str(getattr(getattr(getattr(shell(), "kernel", None), "parent", None), "connection_file", ""))
    match = re.fullmatch(r"kernel-(.+)\.json", os.path.basename(file))
    return match[1] if match else ""


def say_busy() -> None:
    """Say again that the running cell is busy.

    JupyterLab asks ipykernel 7 for a subshell when a widget opens, and takes its "idle" afterwards for the kernel's.
    """
    kernel: Any = getattr(shell(), "kernel", None)
    if hasattr(kernel, "_publish_status") and threading.current_thread() is threading.main_thread():
        kernel._publish_status("busy", "shell", parent=_request())  # private, as of ipykernel 7.4


def _request() -> dict[str, Any]:
    kernel: Any = getattr(shell(), "kernel", None)
    return kernel.get_parent() if hasattr(kernel, "get_parent") else {}
