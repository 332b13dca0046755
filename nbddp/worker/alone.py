"""Worker side. One rank's life without a kernel: a job file is set up, unpacked and called as in a run.

Who starts it is torchrun, srun, a Kubernetes PyTorchJob, or nobody; it ends as a script of theirs would.
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

from nbddp import culprit, folders, jobfile, payload, remains, wire
from nbddp.errors import LaunchError, NbddpError, PayloadError
from nbddp.tracebacks import drop_our_frames
from nbddp.wholefile import open_own_fd
from nbddp.worker import entry, group, loopback, metrics, output, place


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Be that rank, and leave the process. The one broad ``except`` of its life."""
    options = _parser().parse_args(arguments)
    handler = get_error_handler()
    handler.initialize()
    code = 0
    try:
        _live(options)
    except BaseException as error:
        drop_our_frames(error)
        code = _tell(error, handler.record_exception)
    _leave(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nbddp",
        description="Run what nbddp.export() has written to a file, as one rank: by torchrun, srun or alone.",
    )
    parser.add_argument("job", help="the file; running it is running its writer's code")
    parser.add_argument(
        "--metrics",
        metavar="FILE",
        help="keep what log() is given, for nbddp.History.load(FILE); goes on in an old one",
    )
    parser.add_argument("--result", metavar="FILE", help="keep what rank 0 returns, for nbddp.load_result(FILE)")
    return parser


def _live(options: argparse.Namespace) -> None:
    block, head = jobfile.open_block(options.job, jobfile.JOB)
    job = _job(head)
    sink = _open_metrics(options.metrics, job)
    if options.result and job.rank == 0:
        _check_folder(options.result)
    if job.local_world_size < job.world_size:
        loopback.let_other_hosts_in()
    read = builtins.input
    notebook = entry.set_up(job, entry.Ends(sink, output=1, stacks=2, payload=block, result=-1, store=None))
    sys.breakpointhook, builtins.input = sys.__breakpointhook__, read
    value = _called(_unpack(job, block, notebook))
    metrics.flush()
    if options.result and job.rank == 0:
        _keep(value, options.result, job.run_name)
    group.close_group()


# ---------------------------------------------------------------------------- setting up


def _job(head: jobfile.Head) -> wire.Job:
    """What a kernel would have told this rank."""
    contract = place.contract(os.environ)
    device, index = place.device(int(contract["LOCAL_RANK"]))
    environ = {**os.environ, **contract, "LOCAL_RANK": str(index)}
    if device == "cpu":
        environ.setdefault("ACCELERATE_USE_CPU", "true")  # as in a run: else it trains models that never meet
    if name := place.interface(contract):
        environ.setdefault("GLOO_SOCKET_IFNAME", name)
    return wire.Job(
        run_name=head.name,
        rank=int(contract["RANK"]),
        local_rank=index,
        world_size=int(contract["WORLD_SIZE"]),
        local_world_size=int(contract["LOCAL_WORLD_SIZE"]),
        device=device,
        backend=dist.Backend.default_device_backend_map.get(device, "gloo"),
        store_host=contract["MASTER_ADDR"],
        store_port=int(contract["MASTER_PORT"]),
        store_prefix="",
        pg_timeout_s=None,
        seed=None,
        deterministic=False,
        threads=torch.get_num_threads(),  # by OMP_NUM_THREADS, which torchrun sets
        environ=environ,
        process_state=None,
        sys_path=folders.first(head.folders, sys.path),
        cwd=os.getcwd(),
        temp_dir="",
        argv=[head.name],
        payload_nbytes=head.nbytes,
        pass_rank=False,
        restart_count=place.restarts(os.environ),
    )


def _open_metrics(path: str | None, job: wire.Job) -> int:
    """This rank's file, at its end, begun or gone on with; a device that keeps nothing without a path."""
    if path is None:
        return os.open(os.devnull, os.O_WRONLY)
    path = wire.metrics_path(path, job.rank)
    fd = open_own_fd(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    _lock(fd, path)
    size = os.fstat(fd).st_size
    if size and not os.pread(fd, wire.BEGIN.size, 0)[1:].startswith(wire.BEGIN_MARK):
        raise LaunchError(f"--metrics: {path} is there and is something else; choose another name")
    os.ftruncate(fd, size - size % wire.RECORD.size)  # of a rank that was killed while it wrote
    os.write(fd, wire.BEGIN.pack(wire.KIND_BEGIN, wire.BEGIN_MARK, job.world_size, job.rank, time.time()))
    return fd


def _lock(fd: int, path: str) -> None:
    """For as long as this process lives: of two that write there at once, the second one is told."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise LaunchError(f"--metrics: another process is writing {path}; each job has its own") from None
        # A file system without locks: nobody can tell.


def _check_folder(path: str) -> None:
    """Now, and not after hours of training."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise LaunchError(f"--result: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise LaunchError(f"--result: nothing can be written to the folder {folder}; choose another")


def _unpack(job: wire.Job, fd: int, notebook: Any) -> Callable[[], Any]:
    try:
        call, _ = entry.unpack(job, fd, notebook)
    except Exception as error:  # whatever a user's __setstate__ raises
        raise culprit.explain_unpacking(f"{job.run_name} and its data", error) from None
    return call


# ---------------------------------------------------------------------------- calling, and leaving


def _called(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except SystemExit as left:
        if left.code not in (None, 0):
            raise
    return None


def _keep(value: Any, path: str, name: str) -> None:
    lost: list[PayloadError] = []

    def fill(fd: int) -> int:
        try:
            return payload.pack(value, fd, back=True).nbytes
        except Exception as error:  # whatever a user's __reduce__ raises
            what = f"what {name} returned cannot be kept"
            explained = culprit.explain({"the result": value}, error, what=what, back=True)
            if not explained.path:
                raise error if isinstance(error, OSError) else explained from None  # a full disk
        lost.append(explained)
        return payload.pack(remains.parts_of(value), fd, back=True).nbytes

    jobfile.write(path, jobfile.RESULT, name, fill)
    if lost:
        raise PayloadError(f"{lost[0]}. All else is in {path}", lost[0].path)


def _tell(error: BaseException, record: Callable[[BaseException], None]) -> int:
    """Say it as Python does, with the user's frames alone, to torchrun too. Returns the exit code."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, int) or error.code is None:
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    if isinstance(error, Exception):
        record(error)
    if isinstance(error, (NbddpError, OSError)) and error.__traceback__ is None:
        print(f"nbddp: {error}", file=sys.stderr)  # not of the function
    else:
        traceback.print_exception(error)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _leave(code: int) -> NoReturn:
    """End as an interpreter does, but for the last step: a gloo group that is freed may wait for ever (see group)."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    output.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
