"""Worker side. One worker's life: arm the switch, set up, report ready, call the function, report, leave."""

from __future__ import annotations

import atexit
import builtins
import dataclasses
import functools
import multiprocessing
import multiprocessing.context
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nbddp import copies, culprit, leftovers, payload, process_state, remains, wire
from nbddp.errors import CAUSE_CHARS, bounded
from nbddp.known import Known
from nbddp.tracebacks import drop_our_frames, make_picklable
from nbddp.worker import blas, context, counted, group, main_module, metrics, output, switch, wanted

_EXIT_CHARS = 1000  # of what sys.exit() was given


@dataclass(frozen=True)
class Ends:
    """This rank's ends of what the kernel opened for it: file descriptors."""

    metrics: int
    output: int
    stacks: int
    payload: int
    result: int
    store: int | None


def main(channel: Connection, ends: Ends, inherited: Sequence[Any]) -> None:
    """Live as one rank. The only function that the kernel side calls, and only in a new process."""
    switch.arm()
    output.redirect(ends.output)
    _forget_the_fork_server()
    job = wire.decode(channel.recv_bytes())
    assert isinstance(job, wire.Job), job
    report = _live(job, channel, ends, inherited)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the report is due; the kernel has SIGKILL for the rest
    channel.send_bytes(wire.encode(report))
    _leave(channel)


def _live(job: wire.Job, channel: Connection, ends: Ends, inherited: Sequence[Any]) -> wire.Message:
    """Set up, call, and say in one message how it ended. The one broad ``except`` of the worker side."""
    phase = "setup"
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        notebook = set_up(job, ends)
        channel.send_bytes(wire.encode(wire.Ready(copies.folder())))
        phase = "unpack"
        call, known = unpack(job, ends.payload, notebook, inherited)
        phase = "call"
        channel.send_bytes(wire.encode(wire.Called()))
        value = call()
        phase = "pack"
        return _finished(value, ends.result, known, job)
    except _BadFork as error:
        return wire.Failed(0, time.monotonic(), error.phase, error.why)
    except BaseException as error:
        at = time.monotonic()  # before anything slow: the first failure in time is the run's
        _let_nothing_else_raise()
        if isinstance(error, SystemExit) and phase == "call":
            return _exited(error, ends.result)
        failed = _failed(error, at, phase, ends.result)
        channel.send_bytes(wire.encode(wire.Raised(**vars(failed))))
        return _with_the_exception(failed, error, ends.result, known if phase in ("call", "pack") else None)


# ---------------------------------------------------------------------------- setting up


def _forget_the_fork_server() -> None:
    """Be a process of our own: nothing here is shared with the server this one was forked from."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _is_forked():
        atexit._clear()  # the server's; those of a spawned rank are its own
    _choose_start_method()
    # Processes that the user's code starts are this rank's children, and so in its session; a child
    # of the server would be out of the switch's reach (the default method from Python 3.14 on).
    server: Any = forkserver._forkserver
    if getattr(server, "_forkserver_alive_fd", None) is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


def _choose_start_method() -> None:
    """For what the user's code starts: the platform's own default, whatever started this rank; but not a fork server.

    That is Linux's from Python 3.14 on. The rank's own server would import torch before each epoch's DataLoader
    workers (10 s), and leave semaphores in /dev/shm when it is killed. What makes a fork dangerous, threads that hold
    locks, was no danger to DataLoader workers in all the years before.
    """
    multiprocessing.set_start_method(None, force=True)
    default: Any = multiprocessing.context._default_context
    if hasattr(default, "_default_context") and default._default_context._name == "forkserver":  # Python 3.10 to 3.14
        default._default_context = multiprocessing.get_context("fork")


def _is_forked() -> bool:
    return "nbddp.worker.preload" in sys.modules


def set_up(job: wire.Job, ends: Ends) -> ModuleType:
    """Become that rank. Returns its ``__main__``, which stands for the notebook's."""
    if wanted.trouble:
        raise _BadFork(UNFIT, wanted.trouble)
    if job.copy and (difference := copies.difference(job.copy, copies.folder())):
        raise RuntimeError(difference)
    _set_environ(job.environ)
    _inherit_from_the_notebook(job)
    os.chdir(job.cwd)
    if job.temp_dir:
        # DataLoader workers open a socket there per batch, and leave it when they are killed.
        multiprocessing.current_process()._config["tempdir"] = job.temp_dir  # type: ignore[attr-defined]
    if job.mark:
        leftovers.sign(job.mark, job.temp_dir)
    sys.path[:] = job.sys_path
    sys.argv = list(job.argv)
    _forget_missing_folders(job.sys_path)
    notebook = main_module.install()
    context.enter(context.Context(job.rank, job.local_rank, job.world_size, job.device, job.seed, job.restart_count))
    metrics.enter(ends.metrics)
    output.answer_stacks(ends.stacks)
    sys.breakpointhook = _no_terminal
    builtins.input = _no_input
    output.show_no_figures()
    _set_up_torch(job, ends.store)
    return notebook


def _no_terminal(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "a rank has no terminal for breakpoint(); call the function itself in the notebook (rank 0 of 1)"
    )


def _no_input(prompt: object = "", /) -> str:
    raise EOFError("a rank has no input(); ask in the notebook and pass the answer as an argument, run(fn, args=...)")


def _set_environ(environ: dict[str, str]) -> None:
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update((name, value) for name, value in environ.items() if os.environ.get(name) != value)


def _inherit_from_the_notebook(job: wire.Job) -> None:
    """Have what a plain child of it would have now. Raises _BadFork where that is too late."""
    forked = _is_forked()
    refused = process_state.become(job.process_state, forked=forked) if job.process_state is not None else []
    if forked and (outdated := refused + counted.outdated(job.environ)):
        raise _BadFork(OUTDATED, ", ".join(outdated))


def _forget_missing_folders(paths: list[str]) -> None:
    """A folder of the path that did not exist when the fork server looked may do so now.

    Changes inside a folder are seen anyway (by its time); ``importlib.invalidate_caches()`` would touch
    every finder, and so copy 400 pages of the server's memory.
    """
    for path in paths:
        if sys.path_importer_cache.get(path, path) is None:
            del sys.path_importer_cache[path]


def _set_up_torch(job: wire.Job, store_file: int | None) -> None:
    if torch.cuda._is_in_bad_fork():
        raise _BadFork(UNFIT, "")
    torch.set_num_threads(job.threads)
    blas.set_num_threads(job.threads, job.environ)
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # TORCH_DISTRIBUTED_DEBUG, else read at import
    if job.device != "cpu":
        torch.get_device_module(job.device).set_device(job.local_rank)
    if job.seed is None:
        _draw_fresh_seeds()
    else:
        seed_everything(job.seed + job.rank)
    if job.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
    group.remember_stores(job.store_host, job.store_port, store_file)
    if job.backend is not None:
        group.open_group(
            backend=job.backend,
            rank=job.rank,
            world_size=job.world_size,
            device=context.device(),
            address=(job.store_host, job.store_port),
            file=store_file,
            prefix=job.store_prefix,
            timeout_s=job.pg_timeout_s,
        )
    group.let_users_make_their_own()  # after ours, whose store it would take for a foreign one


# Instead of "setup": this server can give no rank, or has what is not the run's. The kernel side then has another way.
UNFIT, OUTDATED = "unfit", "outdated"


class _BadFork(Exception):
    """This rank cannot come from this fork server; ``phase`` is UNFIT or OUTDATED."""

    def __init__(self, phase: str, why: str) -> None:
        super().__init__(why)
        self.phase = phase
        self.why = why


def _draw_fresh_seeds() -> None:
    """New numbers on every rank of every run, as in a new interpreter; a fork begins with its server's.

    Python's own generator sees to it by itself; an accelerator's is made in the rank.
    """
    np.random.seed()
    torch.default_generator.seed()


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch (all devices) on this rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def unpack(
    job: wire.Job, fd: int, notebook: ModuleType, inherited: Sequence[Any] = ()
) -> tuple[Callable[[], Any], Known]:
    """The function with its arguments, out of the block ``fd``, and what is known with them of the notebook."""
    unpacked = payload.unpack(fd, job.payload_nbytes, inherited=inherited, device=context.device())
    known = main_module.publish(notebook, unpacked)
    group.stand_aside_too()
    os.close(fd)
    function, args, kwargs = unpacked.value
    if job.pass_rank:
        args = (job.rank, *args)
    return functools.partial(function, *args, **kwargs), known


# ---------------------------------------------------------------------------- reporting


def _let_nothing_else_raise() -> None:
    """An interrupt, or torch's handler that raises when a DataLoader worker dies, would take the error's place."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _finished(value: Any, fd: int, known: Known, job: wire.Job) -> wire.Message:
    try:
        nbytes = payload.pack(value, fd, known=known, back=True).nbytes
        return wire.Finished(nbytes, time.monotonic(), group.has_met())
    except Exception as error:  # whatever a user's __reduce__ raises
        what = f"what {job.run_name} returned on rank {job.rank} cannot come back to the notebook"
        explained = culprit.explain({"the result": value}, error, what=what, back=True)
    if not explained.path:
        raise explained
    nbytes = payload.pack(remains.parts_of(value, known), fd, known=known, back=True).nbytes
    return wire.Finished(nbytes, time.monotonic(), group.has_met(), str(explained), explained.path)


def _exited(error: SystemExit, fd: int) -> wire.Message:
    at = time.monotonic()
    if error.code is None or error.code == 0:
        return wire.Finished(payload.pack(None, fd, back=True).nbytes, at, group.has_met())
    if isinstance(error.code, int):
        return wire.Exited(error.code & 0xFF, "", at)  # as the system would tell it
    text = _text_of(error.code)
    print(text, file=sys.stderr)
    return wire.Exited(1, bounded(text, _EXIT_CHARS, f"run.logs({context.rank()})"), at)


def _text_of(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # whatever a user's __str__ raises
        return f"a {type(value).__name__} whose str() raises {type(error).__name__}"


def _failed(error: BaseException, at: float, phase: str, fd: int) -> wire.Failed:
    """With what stands for an exception that does not pickle: its name, text and frames."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    summary = bounded(text, CAUSE_CHARS)
    drop_our_frames(error)
    look_alike = type(type(error).__name__, (Exception,), {"__module__": type(error).__module__})
    stand_in = look_alike(text.partition(": ")[2] or text)
    stand_in.__traceback__ = error.__traceback__
    make_picklable(stand_in)
    return wire.Failed(payload.pack(stand_in, fd, back=True).nbytes, at, phase, summary)


def _with_the_exception(failed: wire.Failed, error: BaseException, fd: int, known: Known | None) -> wire.Failed:
    """The same with the exception itself, if it pickles."""
    make_picklable(error)
    try:
        nbytes = payload.pack(error, fd, known=known, back=True).nbytes
    except Exception:  # whatever a user's __reduce__ raises; before anything is written
        return failed
    return dataclasses.replace(failed, nbytes=nbytes)


def _leave(channel: Connection) -> None:
    """Flush, wait until every rank has reported, and end as the interpreter does: threads, then exit handlers."""
    output.flush()
    metrics.flush()
    try:
        channel.recv_bytes()  # Leave: a rank that left early would tear its peers' connections
    except (EOFError, OSError):
        return
    group.close_group()
    # First: executors end their processes there, which multiprocessing's exit handler joins. It is also what the end
    # of a process of multiprocessing's calls (Python 3.10 to 3.14), and does nothing a second time.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    output.flush()
