"""Makes a new process the rank of a job: environment, folders, ``__main__``, output, torch, process group."""

from __future__ import annotations

import builtins
import multiprocessing
import os
import random
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nbddp import process_state, versions, wire
from nbddp.worker import (
    blas,
    context,
    group_sockets,
    inherited,
    leftovers,
    main_module,
    metrics,
    output,
    process_group,
    regroup,
)

_NOT_AFTER_A_FORK = re.compile(r"initialization (error|failed)", re.IGNORECASE)  # cudaErrorInitializationError


@dataclass(frozen=True)
class Ends:
    """File descriptors: this rank's ends of what the notebook kernel opened for it."""

    metrics: int
    output: int
    stacks: int
    payload: int
    result: int
    store: int | None
    release: int | None = None  # of a rank that stays: where the order to leave a collective comes from


class UnfitServer(Exception):
    """This rank cannot be forked from this server; see ``wire.Unfit``."""

    def __init__(self, preloaded: str = "", outdated: Sequence[str] = ()) -> None:
        super().__init__(preloaded or ", ".join(outdated))
        self.preloaded = preloaded
        self.outdated = tuple(outdated)


def set_up(job: wire.Job, ends: Ends) -> ModuleType:
    """Turn this process into the job's rank. Returns its ``__main__``, which stands for the notebook's."""
    if inherited.unfit:
        raise UnfitServer(preloaded=inherited.unfit)
    if job.copy and (difference := versions.difference_of_copies(job.copy, versions.package_folder())):
        raise RuntimeError(difference)
    _set_environ(job.environ)
    # The state that a child of the notebook would inherit; for some of it a fork comes too late.
    refused = process_state.become(job.process_state, forked=inherited.forked) if job.process_state is not None else []
    if inherited.forked and (outdated := refused + inherited.outdated(job.environ)):
        raise UnfitServer(outdated=outdated)
    os.chdir(job.cwd)
    if job.temp_dir:
        # DataLoader workers open a socket there per batch, and leave it behind when they are killed.
        multiprocessing.current_process()._config["tempdir"] = job.temp_dir  # type: ignore[attr-defined]
    if job.mark:
        leftovers.sign(job.mark, job.temp_dir)
    sys.path[:] = job.sys_path
    _make_torchs_folder(job.temp_dir)
    sys.argv = list(job.argv)
    _forget_missing_folders(job.sys_path)
    notebook = main_module.install()
    context.enter(
        context.Context(
            job.rank,
            job.local_rank,
            job.world_size,
            job.device,
            job.device_index,
            job.seed,
            job.restart_count,
            {path: (host, step) for path, host, step in job.lost_snapshots},
        )
    )
    metrics.enter(ends.metrics)
    if job.listen and job.rank == 0:
        metrics.listen()
    output.dump_stacks_on_signal(ends.stacks)
    builtins.input = _refuse_input
    output.replace_inline_backend()
    _set_up_torch(job, ends.store)
    return notebook


def _make_torchs_folder(temp_dir: str) -> None:
    """Make the folder in which torch 2.8 writes the code of a ``RemoteModule``; the fork server has removed its own."""
    instantiator: Any = sys.modules.get("torch.distributed.nn.jit.instantiator")
    if temp_dir and hasattr(instantiator, "_TEMP_DIR"):
        instantiator.INSTANTIATED_TEMPLATE_DIR_PATH = tempfile.mkdtemp(dir=temp_dir)
        sys.path.append(instantiator.INSTANTIATED_TEMPLATE_DIR_PATH)


def _refuse_input(prompt: object = "", /) -> str:
    raise EOFError("input() does not work on a rank; ask in the notebook and pass the answer with run(fn, args=...)")


def _set_environ(environ: dict[str, str]) -> None:
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update((name, value) for name, value in environ.items() if os.environ.get(name) != value)


def _forget_missing_folders(paths: list[str]) -> None:
    """Make Python look again for folders of ``sys.path`` that did not exist when the fork server looked.

    Python detects changes inside a folder by its modification time; ``importlib.invalidate_caches()`` would write
    to every finder and copy 400 pages of the server's memory.
    """
    for path in paths:
        if sys.path_importer_cache.get(path, path) is None:
            del sys.path_importer_cache[path]


def _set_up_torch(job: wire.Job, store_file: int | None) -> None:
    if torch.cuda._is_in_bad_fork():
        raise UnfitServer
    torch.set_num_threads(job.threads)
    blas.set_num_threads(job.threads, job.environ)
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # else TORCH_DISTRIBUTED_DEBUG is read at import only
    if job.device != "cpu":
        _use_device(job.device, job.device_index)
    if job.seed is None:
        _draw_fresh_seeds()
    else:
        seed_everything(job.seed + job.rank)
    if job.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
    process_group.remember_stores(job, store_file)
    if job.stays:
        group_sockets.remember_new_groups()
        regroup.remember_models()
    if job.backend is not None:
        process_group.open_group_of(job, context.device(), store_file, job.group)
    process_group.wrap_init_process_group()  # after ours, whose store it would take for another


def _use_device(kind: str, index: int) -> None:
    """Make this the current device, which opens a context on it."""
    try:
        torch.get_device_module(kind).set_device(index)
    except RuntimeError as error:
        # So CUDA answers if the server has initialised the driver without torch.cuda: through torch.accelerator, say.
        if inherited.forked and _NOT_AFTER_A_FORK.search(str(error)):
            raise UnfitServer from error
        raise


def _draw_fresh_seeds() -> None:
    """Seed numpy and torch as in a new interpreter; a forked rank begins with the server's generators.

    Python reseeds its own generator after a fork; an accelerator's generator is created in the rank.
    """
    np.random.seed()
    torch.default_generator.seed()


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices) on this rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
