"""One rank's life: arm the dead man's switch, set up, report ready, call the function, report, leave."""

from __future__ import annotations

import atexit
import builtins
import dataclasses
import functools
import itertools
import multiprocessing
import multiprocessing.context
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter  # private; torch 2.6 to 2.15

from nbddp import payload, process_state, versions, wire
from nbddp.errors import CAUSE_CHARS
from nbddp.payload import partial, unpicklable
from nbddp.payload.known import Known
from nbddp.text import bounded
from nbddp.tracebacks import drop_our_frames, make_picklable
from nbddp.worker import (
    blas,
    breakpoints,
    context,
    dead_man_switch,
    debugger,
    failing_line,
    group_sockets,
    inherited,
    leftovers,
    main_module,
    metrics,
    namespace,
    output,
    process_group,
    regroup,
    staying,
)

_EXIT_CHARS = 1000  # longest text of sys.exit() that is reported
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


def main(channel: Connection, ends: Ends, handed: Sequence[Any]) -> None:
    """Run one rank. The only function that the notebook's side calls, and only in a new process."""
    dead_man_switch.arm()
    output.redirect(ends.output)
    _detach_from_fork_server()
    job = wire.decode(channel.recv_bytes())
    assert isinstance(job, wire.Job), job
    report = _live(job, channel, ends, handed)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # must not interrupt the report; the notebook kernel can use SIGKILL
    channel.send_bytes(wire.encode(report))
    if ends.release is not None:
        staying.obey(ends.release)
        staying.serve(channel, job, functools.partial(_next_call, channel, ends))
        _end()
    else:
        _leave(channel)


def _next_call(channel: Connection, ends: Ends, job: wire.Job, fds: Sequence[int]) -> wire.Message:
    """Take one more call on a rank that stays."""
    metrics_fd, output_fd, payload_fd, result_fd = fds
    metrics.begin_again(metrics_fd)
    output.continue_in(output_fd)
    ends = dataclasses.replace(ends, payload=payload_fd, result=result_fd)
    try:
        report = _live(job, channel, ends, (), main_module.of_the_notebook)
        staying.refuse_interrupts()
    except KeyboardInterrupt as error:  # before the report of another exception
        report = _failed(error, time.monotonic(), "call", result_fd)
    if not isinstance(report, wire.Finished):
        _restore_modes()
    output.flush()
    metrics.flush()  # all of this call is in its own pipe
    os.close(result_fd)
    return report


def _restore_modes() -> None:
    """Reset what an interrupt in the middle of a ``with torch.no_grad()`` or ``autocast`` leaves behind."""
    torch.set_grad_enabled(True)
    torch.clear_autocast_cache()
    for device in {"cpu", context.device().type}:
        torch.set_autocast_enabled(device, False)


def _live(
    job: wire.Job,
    channel: Connection,
    ends: Ends,
    handed: Sequence[Any],
    ready: Callable[[], ModuleType] | None = None,
) -> wire.Message:
    """Set up, call the function, and return one message with the result. The worker's only broad ``except``.

    Args:
        ready: returns the ``__main__`` of a rank that is already set up.
    """
    phase = "setup"
    sigchld = signal.getsignal(signal.SIGCHLD)  # torch's, once a DataLoader has had workers
    try:
        if ready is not None:
            staying.allow_interrupts()
            notebook = ready()
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            notebook = set_up(job, ends)
            debugger.enter(channel)
            channel.send_bytes(wire.encode(wire.Ready(versions.package_folder())))
        phase = "unpack"
        call, known = unpack(job, ends.payload, notebook, handed)
        phase = "call"
        debugger.begin_call(job)
        payload.note_call(ends.result)
        value = debugger.call(call)
        debugger.end_call()
        phase = "pack"
        return _finished(value, ends.result, known, job)
    except _UnfitServer as error:
        return wire.Unfit(time.monotonic(), error.preloaded, error.outdated)
    except BaseException as error:
        at = time.monotonic()  # before anything slow: the run reports its earliest failure
        debugger.end_call()
        if phase == "call":
            debugger.post_mortem(error)
        # An interrupt, or torch's handler that raises when a DataLoader worker dies, must not replace the error.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if isinstance(error, SystemExit) and phase == "call":
            return _exited(error, ends.result)
        failed = _failed(error, at, phase, ends.result)
        channel.send_bytes(wire.encode(wire.Raised(**vars(failed))))
        _end_loaders_of(error)
        return _with_the_exception(failed, error, ends.result, known if phase in ("call", "pack") else None)
    finally:
        if ready is not None:
            signal.signal(signal.SIGCHLD, sigchld)


# ---------------------------------------------------------------------------- setting up


def _detach_from_fork_server() -> None:
    """Drop the state that was inherited from the fork server, including its start method.

    The user's processes get the platform's default start method, but on Linux fork, which was the default there before
    Python 3.14. A rank's own fork server would import torch before each epoch's DataLoader workers (10 s), and leave
    semaphores in /dev/shm when it is killed. Forking with threads that hold locks is dangerous, but has not been a
    problem for DataLoader workers.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if inherited.forked:
        atexit._clear()  # the server's handlers; a spawned rank has only its own
    multiprocessing.set_start_method(None, force=True)
    default: Any = multiprocessing.context._default_context
    if sys.platform == "linux":
        # Private; Python 3.10 to 3.14. It must not be read: 3.14.10 would make a temporary file to find the default.
        default._default_context = multiprocessing.get_context("fork")


def set_up(job: wire.Job, ends: Ends) -> ModuleType:
    """Turn this process into the job's rank. Returns its ``__main__``, which stands for the notebook's."""
    if inherited.unfit:
        raise _UnfitServer(preloaded=inherited.unfit)
    if job.copy and (difference := versions.difference_of_copies(job.copy, versions.package_folder())):
        raise RuntimeError(difference)
    _set_environ(job.environ)
    # The state that a child of the notebook would inherit; for some of it a fork comes too late.
    refused = process_state.become(job.process_state, forked=inherited.forked) if job.process_state is not None else []
    if inherited.forked and (outdated := refused + inherited.outdated(job.environ)):
        raise _UnfitServer(outdated=outdated)
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
        raise _UnfitServer
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
            raise _UnfitServer from error
        raise


class _UnfitServer(Exception):
    """This rank cannot be forked from this server; see ``wire.Unfit``."""

    def __init__(self, preloaded: str = "", outdated: Sequence[str] = ()) -> None:
        super().__init__(preloaded or ", ".join(outdated))
        self.preloaded = preloaded
        self.outdated = tuple(outdated)


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


def unpack(job: wire.Job, fd: int, notebook: ModuleType, handed: Sequence[Any] = ()) -> tuple[Callable[[], Any], Known]:
    """Unpack the function with its arguments from the block ``fd``, and the objects known from the notebook."""
    imported = len(sys.modules)
    unpacked = payload.unpack(fd, job.payload_nbytes, inherited=handed, device=context.device())
    known = main_module.publish(notebook, unpacked, job.by_value if job.stays else None)
    process_group.adopt_group()
    os.close(fd)
    function, args, kwargs = unpacked.value
    modules = _newest_modules(len(sys.modules) - imported) if job.attended else []
    code = [*unpacked.by_value, *modules]
    debugger.expect_stops(job.attended and (job.post_mortem or breakpoints.are_in(args, code)))
    if job.pass_rank:
        args = (job.rank, *args)
    return functools.partial(function, *args, **kwargs), known


def _newest_modules(count: int) -> list[ModuleType]:
    """Return the modules imported last. To touch all of them would copy thousands of pages of the fork server's."""
    return [sys.modules[name] for name in itertools.islice(reversed(sys.modules), max(0, count))]


# ---------------------------------------------------------------------------- reporting


def _finished(value: Any, fd: int, known: Known, job: wire.Job) -> wire.Message:
    try:
        nbytes = 0 if value is None else payload.pack(value, fd, known=known, back=True).nbytes
        held = namespace.held() if job.stays and context.is_primary() else ()
        in_group = dist.is_initialized()
        return wire.Finished(nbytes, time.monotonic(), process_group.has_met(), in_group=in_group, held=held)
    except Exception as error:  # whatever a user's __reduce__ raises
        what = f"the value that {job.run_name} returned on rank {job.rank} cannot be sent to the notebook"
        explained = unpicklable.explain({"the result": value}, error, what=what, back=True)
    if not explained.path:
        raise explained
    nbytes = payload.pack(partial.parts_of(value, known), fd, known=known, back=True).nbytes
    return wire.Finished(nbytes, time.monotonic(), process_group.has_met(), str(explained), explained.path)


def _exited(error: SystemExit, fd: int) -> wire.Message:
    at = time.monotonic()
    if error.code is None or error.code == 0:
        return wire.Finished(0, at, process_group.has_met())
    if isinstance(error.code, int):
        return wire.Exited(error.code & 0xFF, "", at)  # as in a process's exit status
    text = _text_of(error.code)
    print(text, file=sys.stderr)
    return wire.Exited(1, bounded(text, _EXIT_CHARS, f"run.logs({context.rank()})"), at)


def _text_of(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # whatever a user's __str__ raises
        return f"a {type(value).__name__} whose str() raises {type(error).__name__}"


@functools.cache  # a class that was pickled once is never freed
def _look_alike(name: str, module: str) -> type[Exception]:
    return type(name, (Exception,), {"__module__": module})


def _failed(error: BaseException, at: float, phase: str, fd: int) -> wire.Failed:
    """The report, with a stand-in that pickles: an exception of the same name, text and frames."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    summary = bounded(text, CAUSE_CHARS)
    drop_our_frames(error)
    stand_in = _look_alike(type(error).__name__, type(error).__module__)(text.partition(": ")[2] or text)
    stand_in.__traceback__ = error.__traceback__
    make_picklable(stand_in)
    names = failing_line.names(error) if phase == "call" else ()
    return wire.Failed(payload.pack(stand_in, fd, back=True).nbytes, at, phase, summary, names)


def _end_loaders_of(error: BaseException) -> None:
    """End the DataLoader workers of loops that the error has left.

    When the error is freed, torch asks them to end. An interrupt can lose that request, and torch then waits 5 s.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in list(frame.f_locals.values()):
            if isinstance(value, _MultiProcessingDataLoaderIter) and not value._persistent_workers:
                for worker in getattr(value, "_workers", ()):
                    worker.terminate()


def _with_the_exception(failed: wire.Failed, error: BaseException, fd: int, known: Known | None) -> wire.Failed:
    """The same report with the exception itself, if it pickles."""
    make_picklable(error)
    try:
        nbytes = payload.pack(error, fd, known=known, back=True).nbytes
    except Exception:  # whatever a user's __reduce__ raises; before anything is written
        return failed
    return dataclasses.replace(failed, nbytes=nbytes)


def _leave(channel: Connection) -> None:
    """Flush, wait until every rank has reported, and end."""
    output.flush()
    metrics.flush()
    try:
        while not isinstance(debugger.receive(channel), wire.Leave):
            pass  # for the debugger, and too late
    except (EOFError, OSError):
        return
    _end()


def _end() -> None:
    """End as Python does: first threads, then exit handlers."""
    process_group.close_group()
    # Before the exit handlers, because executors end their processes here and multiprocessing's handler joins those.
    # multiprocessing calls it again when this process ends (Python 3.10 to 3.14), which does nothing.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    output.flush()
