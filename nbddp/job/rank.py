"""Runs one rank of a job file without a notebook: set up, unpack and call as in a run.

torchrun, srun, a Kubernetes PyTorchJob or a shell starts the process, which ends like a plain script.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import errno
import fcntl
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from nbddp import folders, payload, wire
from nbddp.atomic_file import open_own_fd
from nbddp.errors import LaunchError, NbddpError, PayloadError
from nbddp.history import metrics_file
from nbddp.job import job_file, launcher_env
from nbddp.payload import partial, unpicklable
from nbddp.tracebacks import drop_our_frames
from nbddp.worker import entry, metrics, output, process_group, setup, user_stores


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the rank and exit the process. The only broad ``except`` of the process."""
    options = _parser().parse_args(arguments)
    handler = get_error_handler()
    handler.initialize()
    code = 0
    try:
        _run(options)
    except BaseException as error:
        drop_our_frames(error)
        code = _report(error, handler.record_exception)
    _exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nbddp",
        description="Run a file of nbddp.export() as one rank: under torchrun, under srun, or as a single process.",
    )
    parser.add_argument("job", help="the file; it can run any code, so trust its writer")
    parser.add_argument(
        "--metrics",
        metavar="FILE",
        help="write the values of log() to FILE, for nbddp.History.load(FILE); an old FILE is continued",
    )
    parser.add_argument("--result", metavar="FILE", help="write what rank 0 returns, for nbddp.load_result(FILE)")
    return parser


def _run(options: argparse.Namespace) -> None:
    block, head = job_file.open_block(options.job, job_file.JOB)
    job = _make_job(head)
    metrics_fd = _open_metrics(options.metrics, job)
    if options.result and job.rank == 0:
        _check_folder(options.result)
    if job.local_world_size < job.world_size:
        user_stores.listen_on_all_interfaces()
    read = builtins.input
    notebook = setup.set_up(job, setup.Ends(metrics_fd, output=1, stacks=2, payload=block, result=-1, store=None))
    builtins.input = read
    value = _call(_unpack(job, block, notebook))  # no variable, so that the data are freed before the result is written
    metrics.flush()
    if options.result and job.rank == 0:
        _write_result(value, options.result, job.run_name)
    process_group.close_group()


# ---------------------------------------------------------------------------- setting up


def _make_job(head: job_file.Head) -> wire.Job:
    """Return the job that a notebook kernel would have sent to this rank."""
    contract = launcher_env.contract(os.environ)
    device, index = launcher_env.device(int(contract["LOCAL_RANK"]))
    environ = {**os.environ, **contract, "LOCAL_RANK": str(index)}
    if device == "cpu":
        environ.setdefault("ACCELERATE_USE_CPU", "true")  # as in a run: without this, each rank trains its own model
    if name := launcher_env.interface(contract):
        environ.setdefault("GLOO_SOCKET_IFNAME", name)
    return wire.Job(
        run_name=head.name,
        rank=int(contract["RANK"]),
        local_rank=index,
        world_size=int(contract["WORLD_SIZE"]),
        local_world_size=int(contract["LOCAL_WORLD_SIZE"]),
        device=device,
        device_index=index,
        backend=dist.Backend.default_device_backend_map.get(device, "gloo"),
        store_host=contract["MASTER_ADDR"],
        store_port=int(contract["MASTER_PORT"]),
        store_prefix="",
        pg_timeout_s=None,
        seed=None,
        deterministic=False,
        threads=torch.get_num_threads(),  # from OMP_NUM_THREADS, which torchrun sets
        environ=environ,
        process_state=None,
        sys_path=folders.first(head.folders, sys.path),
        cwd=os.getcwd(),
        temp_dir="",
        argv=[head.name],
        payload_nbytes=head.nbytes,
        pass_rank=False,
        restart_count=launcher_env.restarts(os.environ),
    )


def _open_metrics(path: str | None, job: wire.Job) -> int:
    """Open this rank's metrics file to append to it; without a path, /dev/null."""
    if path is None:
        return os.open(os.devnull, os.O_WRONLY)
    path = metrics_file.path_of(path, job.rank)
    fd = open_own_fd(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:  # locks the file while this process lives, so that a second writer gets an error
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise LaunchError(f"--metrics: another process is writing {path}; give each job another file") from None
        # Otherwise the file system has no locks.
    size = os.fstat(fd).st_size
    if size and not os.pread(fd, wire.BEGIN.size, 0)[1:].startswith(wire.BEGIN_MARK):
        raise LaunchError(f"--metrics: {path} exists and is not a file of metrics; choose another name")
    os.ftruncate(fd, size - size % wire.RECORD.size)  # drops half a record of a rank that was killed
    os.write(fd, wire.BEGIN.pack(wire.KIND_BEGIN, wire.BEGIN_MARK, job.world_size, job.rank, time.time()))
    return fd


def _check_folder(path: str) -> None:
    """Raise LaunchError at the start, not after hours of training, if the result cannot be written."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise LaunchError(f"--result: the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK):
        raise LaunchError(f"--result: the folder {folder} is not writable; choose another")


def _unpack(job: wire.Job, fd: int, notebook: Any) -> Callable[[], Any]:
    try:
        call, _ = entry.unpack(job, fd, notebook)
    except Exception as error:  # whatever a user's __setstate__ raises
        raise unpicklable.explain_unpacking(f"{job.run_name} and its data", error) from None
    return call


# ---------------------------------------------------------------------------- the result and the exit


def _call(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    return None


def _write_result(value: Any, path: str, name: str) -> None:
    lost: list[PayloadError] = []

    def fill(fd: int) -> int:
        try:
            return payload.pack(value, fd, back=True).nbytes
        except Exception as error:  # whatever a user's __reduce__ raises
            what = f"the value that {name} returned cannot be written"
            explained = unpicklable.explain({"the result": value}, error, what=what, back=True)
            if not explained.path:
                raise error if isinstance(error, OSError) else explained from None  # a full disk
        lost.append(explained)
        return payload.pack(partial.parts_of(value), fd, back=True).nbytes

    job_file.write(path, job_file.RESULT, name, fill)
    if lost:
        raise PayloadError(f"{lost[0]}. Everything else is in {path}", lost[0].path)


def _report(error: BaseException, record: Callable[[BaseException], None]) -> int:
    """Print the error with only the user's frames, and record it for torchrun. Returns the exit code."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, int) or error.code is None:
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    if isinstance(error, Exception):
        record(error)
    if isinstance(error, (NbddpError, OSError)) and error.__traceback__ is None:
        print(f"nbddp: {error}", file=sys.stderr)  # raised outside the user's function
    else:
        traceback.print_exception(error)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _exit(code: int) -> NoReturn:
    """Exit as Python does, but without freeing objects: freeing a gloo group may deadlock (see process_group)."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    output.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
