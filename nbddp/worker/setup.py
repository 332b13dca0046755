"""Makes a new process the rank of a run: environment, folders, ``__main__``, torch, process group."""

import atexit
import functools
import importlib
import multiprocessing
import os
import random
import signal
import sys
import time

import numpy as np
import torch
from torch._C._distributed_c10d import set_debug_level_from_env

from nbddp.helpers import context, log
from nbddp.history.records import AUTOLOG
from nbddp.loggers import autolog
from nbddp.messages import Place, Settings
from nbddp.payload import pickler
from nbddp.payload.carried import Importer
from nbddp.text import in_a_line
from nbddp.worker import mending, tracked
from nbddp.worker.group import Groups


def set_up(settings: Settings, place: Place, metrics: int) -> Groups:
    """Turn this process into the rank. Returns its groups, of which the default one is open."""
    _detach_from_fork_server()
    _set_environment(settings, place)
    groups = begin(settings, place, metrics)
    for name in settings.imports:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # of any module
            print(f"[import {name} failed on rank {place.rank}: {in_a_line(error)}]", file=sys.stderr)
    return groups


def begin(settings: Settings, place: Place, metrics: int) -> Groups:
    """Begin as this rank, in an environment that is ready. Returns its groups, of which the default one is open."""
    context.enter(settings, place)
    log.enter(metrics)
    if settings.autolog and place.rank == 0:
        autolog.listen(functools.partial(log.log, reduce=AUTOLOG), log.owners)
    _set_up_torch(settings, place)
    mending.remember()
    groups = Groups(settings, place, context.device())
    if settings.backend is not None:
        groups.open()
    groups.let_users_open_their_own()
    return groups


def _detach_from_fork_server() -> None:
    """Drop what was inherited from the fork server."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # outside the user's code
    atexit._clear()
    # The standard library's server has set its own, with which DataLoader workers would import torch. The user's code
    # may still set one, as in any new process.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.context._default_context._default_context = multiprocessing.get_context("fork")  # type: ignore[attr-defined]


def _set_environment(settings: Settings, place: Place) -> None:
    environ = dict(settings.environ)
    if settings.contract:  # torchrun's
        environ |= {
            "RANK": str(place.rank),
            "LOCAL_RANK": str(place.local_rank),
            "WORLD_SIZE": str(settings.world_size),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
            "GROUP_RANK": str(settings.group_rank),
            "GROUP_WORLD_SIZE": str(settings.nnodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(place.rank),
            "ROLE_WORLD_SIZE": str(settings.world_size),
            "TORCHELASTIC_RESTART_COUNT": str(settings.restart_count),
            "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts),
            "TORCHELASTIC_RUN_ID": f"nbddp-{os.path.basename(place.folder)}",
        }
        if settings.store is not None:
            environ |= {"MASTER_ADDR": settings.store[0], "MASTER_PORT": str(settings.store[2])}
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update((name, value) for name, value in environ.items() if os.environ.get(name) != value)
    time.tzset()
    os.chdir(settings.cwd)
    sys.argv = list(settings.argv)
    sys.path[:] = settings.sys_path
    if settings.modules:
        sys.meta_path.insert(0, Importer(settings.modules))
    importlib.invalidate_caches()  # Python looks again for folders that did not exist when the fork server looked
    multiprocessing.current_process()._config["tempdir"] = place.folder  # type: ignore[attr-defined]
    tracked.keep_list(place.folder)


def _set_up_torch(settings: Settings, place: Place) -> None:
    torch.set_num_threads(settings.threads)
    set_debug_level_from_env()  # else TORCH_DISTRIBUTED_DEBUG is read at import only
    device = context.device()
    if device.type != "cpu":
        torch.get_device_module(device.type).set_device(device.index)
    pickler.device_here = device
    if settings.seed is None:
        np.random.seed()  # a forked rank begins with the server's generators; Python reseeds its own
        torch.default_generator.seed()
    else:
        seed = settings.seed + place.rank
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
    if settings.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
