"""Advice for well-known errors whose own text does not say what to do, and for runs that did what nobody wanted."""

import dis
import re
import sys
from collections.abc import Iterable, Sequence
from types import CodeType

from nbddp.errors import LaunchError
from nbddp.messages import Report

_FORKING = re.compile(r"ddp_(notebook|spawn|fork)(_\w+)?")  # strategies of Lightning
_SIDE_BY_SIDE = (
    "no collective was called, so the {} ranks shared no gradients. "
    "To train one model on all of them, wrap it: nbddp.wrap(model)"
)
_READ_WHOLE = (
    "every rank trained on a DataLoader of {} samples without a DistributedSampler. If they are the same samples, "
    "nbddp.loader(dataloader) gives each rank its share"
)
_TRAINED_A_COPY = (
    "{} trained a copy of the notebook's model: the notebook's own is unchanged. Return the model or its state_dict(), "
    "or train it in the cells of a session"
)
_FILLED = "{} on the ranks: the notebook's own is unchanged. Return it, or run the code in the cells of a session"
_WEAK = "what {} returned came back without its weak references: they refer to objects in the rank's process"
_SAVES = {"save", "save_file", "save_model", "save_pretrained", "save_snapshot", "save_checkpoint"}
_said: set[str] = set()  # remarks, each once per kernel
_LAUNCHER = "notebook_launcher"  # of accelerate
_STARTS_MORE = "every rank would start its own processes with"

_ON_THE_CPU = {
    r"not compiled with CUDA|No CUDA GPUs are available|Found no NVIDIA driver|has no attribute '_cuda_": (
        "This run is on the CPU. Write .to(nbddp.device()) instead of .cuda() or .to('cuda'): "
        "the same line then works with and without a GPU. A library that calls .cuda() itself needs a GPU"
    ),
    r"SyncBatchNorm layers only work with GPU": "This run is on the CPU: don't convert the model to SyncBatchNorm",
    r"NCCL built in|ProcessGroupNCCL is only supported with GPUs": (
        "This run is on the CPU, and NCCL needs GPUs. Use backend='gloo', or leave the backend out"
    ),
}
_ANYWHERE = {
    r"Expected to have finished reduction in the prior iteration": (
        "Some parameters didn't contribute to the loss. If that is intended, use "
        "nbddp.wrap(model, find_unused_parameters=True). If you replaced or unfroze layers after nbddp.wrap(), their "
        "gradients aren't averaged: call nbddp.wrap(model.module) again, and make a new optimizer"
    ),
    r"DDP expects same model across all ranks": (
        "The ranks built different models. If each draws hyperparameters, draw them once: x = nbddp.broadcast(x)"
    ),
    r"must call `?wandb\.init\(\)`? before": (
        "Each rank is its own process. nbddp.log() with log_to=wandb.run logs into the notebook's run. "
        "For the configuration, pass dict(wandb.config) as an argument"
    ),
    r"default_collate: batch must contain": "If a library has a DataLoader for these, nbddp.loader() takes that one",
    r"NCCL error|ncclSystemError|ncclRemoteError|ncclInternalError|ncclUnhandledCudaError": (
        "Pass env={'NCCL_DEBUG': 'INFO'} to see NCCL's reason in the ranks' output"
    ),
    r"CUDA error: (device-side assert|an illegal memory access|unspecified launch failure|misaligned address)": (
        "An earlier call may have caused it: with env={'CUDA_LAUNCH_BLOCKING': '1'}, the traceback ends at the "
        "call that did. This rank can't use its GPU anymore: in a session, run %ddp close, then %ddp open"
    ),
    r"'DistributedDataParallel' object has no attribute '(\w+)'": (
        r"Your model is the .module attribute of what nbddp.wrap() returns: write model.module.\1"
    ),
    r"(?s)key\(s\) in state_dict:.*\"module\.": (
        "DDP's names begin with 'module.'. Use model.module.state_dict() and model.module.load_state_dict(state)"
    ),
    r"received \d+ items of ancdata": (
        "Too many files are open: each tensor that a DataLoader worker sends takes one. Begin the function with "
        "torch.multiprocessing.set_sharing_strategy('file_system'), or raise the limit (ulimit -n)"
    ),
    r"EADDRINUSE|[Aa]ddress already in use": (
        "Another process listens on this port. A function for nbddp.run() needs none: don't set MASTER_PORT"
    ),
    r"mark(ed)? (a variable )?(as )?ready (only once|twice)": (
        "With checkpoint(), pass use_reentrant=False. If the graph is static, use nbddp.wrap(model, static_graph=True)"
    ),
}
_EXISTS = {"FileExistsError": "Another rank may have created it: os.makedirs(path, exist_ok=True) works on every rank"}
_UNREADABLE = r"PytorchStreamReader failed|EOFError: Ran out of input|pickle data was truncated|HeaderTooSmall"
_ON_RANK_0 = {
    _UNREADABLE: (
        "Another rank may be writing this file, too: write it only if nbddp.is_primary(), and call nbddp.barrier() on "
        "all ranks after that"
    )
}
_ON_OTHERS = {
    r"FileNotFoundError|Parent directory .* does not exist|No such file or directory": (
        "If rank 0 creates it, make this rank wait: call nbddp.barrier() on all ranks after that"
    ),
    r"cannot access local variable|referenced before assignment": (
        "If only rank 0 sets it: set it to None before, and call x = nbddp.broadcast(x) on all ranks after that"
    ),
    f"{_UNREADABLE}|EOFError|JSONDecodeError": (
        "If rank 0 is still writing this file, make this rank wait: call nbddp.barrier() on all ranks after that"
    ),
}


def advice(text: str, device: str, rank: int = 0, *, alike: bool = True) -> str:
    """Return what to do about an exception of a rank with this text, or "".

    Args:
        device: the type of the ranks' devices.
        rank: which one failed first.
        alike: all ranks failed with it.
    """
    known = {**(_ON_THE_CPU if device == "cpu" else {}), **_ANYWHERE}
    if not alike:
        known |= _EXISTS | (_ON_OTHERS if rank else _ON_RANK_0)
    found = ((re.search(pattern, text), advice) for pattern, advice in known.items())
    return next((match.expand(advice) for match, advice in found if match), "")


def refuse_launchers(name: str, codes: Iterable[CodeType], *, with_inner: bool = True) -> None:
    """Raise LaunchError for code from a notebook that starts ranks itself, in another library's way.

    Args:
        with_inner: also for functions that it defines.
    """
    codes = list(codes)
    for code in codes:  # grows
        codes += [each for each in code.co_consts if isinstance(each, CodeType) and with_inner]
        named = _LAUNCHER in code.co_names + code.co_varnames + code.co_freevars
        # An import binds the name only.
        if named and any(each.argval == _LAUNCHER and "LOAD" in each.opname for each in dis.get_instructions(code)):
            raise LaunchError(f"{_STARTS_MORE} {_LAUNCHER}() in {name}: call the function that it runs instead")
        texts = [each for each in code.co_consts if isinstance(each, str) and {"Trainer", "Fabric"} & {*code.co_names}]
        for each in filter(None, map(_FORKING.fullmatch, texts)):
            raise LaunchError(f"{_STARTS_MORE} {each[0]!r} in {name}: write {'ddp' + (each[2] or '')!r} instead")


def remark(name: str, reports: Sequence[Report], codes: Iterable[CodeType]) -> str:
    """Return what is likely wrong with a run that has finished, or "".

    Args:
        name: of its function.
        codes: of the functions that the ranks were sent.
    """
    first, ranks, found = reports[0], len(reports), list[tuple[str, object]]()
    if ranks > 1 and not any(report.met for report in reports):
        found.append((_SIDE_BY_SIDE, ranks))
    if ranks > 1 and first.read_whole and {report.read_whole for report in reports} == {first.read_whole}:
        found.append((_READ_WHOLE, first.read_whole.split()[0]))
    saves = _SAVES & {used for code in codes for used in code.co_names}
    if first.trained_copy and not saves:
        found.append((_TRAINED_A_COPY, name))
    if first.filled in vars(sys.modules["__main__"]) and not saves:  # in a session, it may be the ranks' own
        found.append((_FILLED, f"{name} filled {first.filled}"))
    if any(report.weak_references for report in reports):
        found.append((_WEAK, name))
    for text, about in found:
        if text not in _said:
            _said.add(text)
            return text.format(about)
    return ""
