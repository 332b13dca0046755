"""Advice for well-known errors whose own text does not say what to do."""

from __future__ import annotations

import re

_ON_THE_CPU = {
    r"not compiled with CUDA|No CUDA GPUs are available|Found no NVIDIA driver|has no attribute '_cuda_": (
        "This run is on the CPU. Write .to(nbddp.device()) instead of .cuda() or .to('cuda'): "
        "the same line then works with and without a GPU"
    ),
    r"NCCL built in|ProcessGroupNCCL is only supported with GPUs": (
        "This run is on the CPU, and NCCL needs GPUs. Use backend='gloo', or leave the backend out"
    ),
}
_ANYWHERE = {
    r"Expected to have finished reduction in the prior iteration": (
        "Some parameters didn't contribute to the loss. If that is intended, use "
        "nbddp.wrap(model, find_unused_parameters=True)"
    ),
    r"NCCL error|ncclSystemError|ncclRemoteError|ncclInternalError|ncclUnhandledCudaError": (
        "Pass env={'NCCL_DEBUG': 'INFO'} to see NCCL's reason in the ranks' output"
    ),
    r"CUDA error: (device-side assert|an illegal memory access|unspecified launch failure|misaligned address)": (
        "An earlier call may have caused it: with env={'CUDA_LAUNCH_BLOCKING': '1'}, the traceback ends at the right "
        "one. This rank can't use its GPU anymore: in a session, run %ddp close, then %ddp open"
    ),
}


def advice(text: str, device: str) -> str:
    """Return what to do about an exception of a rank with this text, or "".

    Args:
        device: the type of the ranks' devices.
    """
    known = {**(_ON_THE_CPU if device == "cpu" else {}), **_ANYWHERE}
    return next((advice for pattern, advice in known.items() if re.search(pattern, text)), "")
