"""Kernel side. What to do about errors whose own text does not say it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nbddp.errors import CAUSE_CHARS


@dataclass(frozen=True)
class _Known:
    """An error that users meet.

    Attributes:
        text: what its text contains.
        advice: what to do.
        on_cpu: is it to be told of runs on the CPU alone?
    """

    text: re.Pattern[str]
    advice: str
    on_cpu: bool = False


_KNOWN = (
    _Known(
        re.compile(
            r"not compiled with CUDA|No CUDA GPUs are available|Found no NVIDIA driver|has no attribute '_cuda_"
        ),
        "This run is on the CPU. Write .to(nbddp.device()) in place of .cuda() or .to('cuda'): "
        "the same line then works with and without a GPU",
        on_cpu=True,
    ),
    _Known(
        re.compile(r"NCCL built in|ProcessGroupNCCL is only supported with GPUs"),
        "This run is on the CPU, and NCCL needs GPUs. Use backend='gloo', or leave the backend out",
        on_cpu=True,
    ),
    _Known(
        re.compile(r"Expected to have finished reduction in the prior iteration"),
        "Some parameters had no part in the loss. If that is meant, say wrap(model, find_unused_parameters=True)",
    ),
)


def advice(cause: BaseException, device: str) -> str:
    """What to do about an exception of a rank; "" where that is not known.

    Args:
        device: the type of the ranks' devices.
    """
    try:
        text = str(cause)[:CAUSE_CHARS]
    except Exception:  # whatever a user's __str__ raises
        return ""
    found = (known for known in _KNOWN if known.text.search(text) and (device == "cpu" or not known.on_cpu))
    return next((known.advice for known in found), "")
