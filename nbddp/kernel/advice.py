"""Advice for well-known errors whose own text does not say what to do."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass

from nbddp.errors import CAUSE_CHARS
from nbddp.launch.interface import Rank


@dataclass(frozen=True)
class _KnownError:
    """An error that users meet.

    Attributes:
        pattern: matches the error's text.
        advice: what to do.
        cpu_only: the advice applies only to runs on the CPU.
    """

    pattern: re.Pattern[str]
    advice: str
    cpu_only: bool = False


_KNOWN_ERRORS = (
    _KnownError(
        re.compile(
            r"not compiled with CUDA|No CUDA GPUs are available|Found no NVIDIA driver|has no attribute '_cuda_"
        ),
        "This run is on the CPU. Write .to(nbddp.device()) in place of .cuda() or .to('cuda'): "
        "the same line then works with and without a GPU",
        cpu_only=True,
    ),
    _KnownError(
        re.compile(r"NCCL built in|ProcessGroupNCCL is only supported with GPUs"),
        "This run is on the CPU, and NCCL needs GPUs. Use backend='gloo', or leave the backend out",
        cpu_only=True,
    ),
    _KnownError(
        re.compile(r"Expected to have finished reduction in the prior iteration"),
        "Some parameters did not contribute to the loss. If that is intended, use "
        "wrap(model, find_unused_parameters=True)",
    ),
    _KnownError(
        re.compile(r"NCCL error|ncclSystemError|ncclRemoteError|ncclInternalError|ncclUnhandledCudaError"),
        "With env={'NCCL_DEBUG': 'INFO'} NCCL writes its reason into the output of the ranks",
    ),
)
_NO_CONNECTION = re.compile(
    r"NCCL error|ncclSystemError|ncclRemoteError|connectFullMesh|Connection refused|timed out connecting|"
    r"Network is unreachable|No route to host|no interface|unable to resolve host",
    re.IGNORECASE,
)


def advice(cause: BaseException, device: str) -> str:
    """Return what to do about an exception of a rank, or "".

    Args:
        device: the type of the ranks' devices.
    """
    try:
        text = str(cause)[:CAUSE_CHARS]
    except Exception:  # whatever a user's __str__ raises
        return ""
    found = (known for known in _KNOWN_ERRORS if known.pattern.search(text) and (device == "cpu" or not known.cpu_only))
    return next((known.advice for known in found), "")


def advice_on_a_host(cause: BaseException, worker: Rank) -> str:
    """Return what is missing on the rank's host, or how it is connected; "" if not known, or on this machine alone."""
    if worker.host is None:
        return ""
    if isinstance(cause, RuntimeError):
        return _on_interfaces(str(cause)[:CAUSE_CHARS], worker)
    if isinstance(cause, FileNotFoundError):
        return f"On {worker.host} relative paths begin at {worker.cwd}, and files are not sent along"
    if isinstance(cause, ModuleNotFoundError) and cause.name and (here := _origin(cause.name)):
        return f"Here it is {here}, and {worker.host}'s {worker.python} has none: install it there"
    return ""


def _on_interfaces(text: str, worker: Rank) -> str:
    if not worker.interface or not _NO_CONNECTION.search(text):
        return ""
    hint = (
        f"{worker.host} uses its network interface {worker.interface}. For another one: "
        "env={'GLOO_SOCKET_IFNAME': 'eth1', 'NCCL_SOCKET_IFNAME': 'eth1'}"
    )
    if "nccl" not in text.lower():
        return hint
    return f"{hint}. Without InfiniBand: env={{'NCCL_IB_DISABLE': '1'}}; EFA needs the plugin aws-ofi-nccl"


def _origin(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return ""
    return (spec.origin or "") if spec is not None else ""
