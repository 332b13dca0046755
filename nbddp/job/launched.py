"""Runs one rank of a job, in a process that torchrun or a shell has started, and that ends as a script does."""

import argparse
import os
import signal
import sys
import traceback
import types
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from nbddp.errors import LaunchError, NbddpError, PayloadError
from nbddp.helpers import log
from nbddp.history import records
from nbddp.job import job_file
from nbddp.kernel.settings import Options, device_and_count
from nbddp.messages import Place, Settings
from nbddp.payload import pack
from nbddp.text import in_a_line
from nbddp.tracebacks import drop_our_frames
from nbddp.worker import main_module, redirect, reports, setup


def main() -> NoReturn:
    """Run the rank, and end the process. Its one broad ``except``."""
    handler = get_error_handler()
    handler.initialize()
    code: Any = 0
    try:
        _run(_options())
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        drop_our_frames(error)
        handler.record_exception(error)  # for torchrun
        if isinstance(error, (NbddpError, OSError)) and error.__traceback__ is None:
            code = f"nbddp: {error}"
        else:
            traceback.print_exception(error)
            code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _exit(code)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m nbddp", description="Run a job, under torchrun or as a single process.")
    parser.add_argument("job", help="a file from nbddp.export(); it can run any code, so run only what you trust")
    parser.add_argument("--metrics", metavar="FILE", help="write what log() logs, for nbddp.History.load(FILE)")
    parser.add_argument("--result", metavar="FILE", help="write what rank 0 returns, for nbddp.load_result(FILE)")
    return parser.parse_args()


def _run(options: argparse.Namespace) -> None:
    block, job = job_file.read(options.job, job_file.JOB)
    settings, place = _settings(job["name"])
    if options.result and not os.path.isdir(folder := os.path.dirname(os.path.abspath(options.result))):
        raise LaunchError(f"--result: the folder {folder} doesn't exist; create it first")
    metrics = records.open_file(options.metrics, place.rank, settings.world_size)
    sys.argv = job["argv"]
    sys.path[:] = [*job["folders"], *(path for path in sys.path if path not in job["folders"])]
    main_module.install(types.ModuleType("__main__"))
    groups = setup.begin(settings, place, metrics)
    try:
        function, args, kwargs = main_module.unpack(block, 0)
    except Exception as error:  # whatever a user's __setstate__ raises
        raise PayloadError(f"{settings.name} and its data can't be unpickled here: {in_a_line(error)}") from None
    value = None
    try:
        value = function(*args, **kwargs)
    except SystemExit as error:
        if error.code:
            raise
    finally:
        log.flush()
    if options.result and place.rank == 0:
        _write_result(value, options.result, settings.name)
    groups.close()


def _settings(name: str) -> tuple[Settings, Place]:
    """Read this rank's place from torchrun's variables; without a launcher, it's the only one. Raises LaunchError."""
    environ = os.environ
    if not {"RANK", "WORLD_SIZE"} & environ.keys():
        if int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            raise LaunchError(
                "each srun task would train on its own: use srun torchrun ... -m nbddp, one task per node"
            )
        environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    device, count = device_and_count(Options())
    needed = ["RANK", "WORLD_SIZE", *(["LOCAL_RANK"] if count > 1 and environ.get("WORLD_SIZE") != "1" else [])]
    if missing := [name for name in needed if name not in environ]:
        raise LaunchError(f"the launcher didn't set {' and '.join(missing)}: use torchrun")
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    local_rank, local_size = (int(environ.setdefault(f"LOCAL_{n}", v)) for n, v in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if device == "cpu":
        environ.setdefault("ACCELERATE_USE_CPU", "true")  # without this, accelerate trains N separate models
    settings = Settings(
        name,
        world_size,
        device,
        indices=tuple(range(local_size)) if count != 1 else (0,) * local_size,
        backend=dist.Backend.default_device_backend_map.get(device, "gloo"),
        threads=torch.get_num_threads(),
        restart_count=int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
    )
    return settings, Place(rank, local_rank, local_size, folder="")


def _write_result(value: Any, path: str, name: str) -> None:
    """Write what pickles. Raises PayloadError if that isn't all of it."""
    main: Any = vars(sys.modules["__main__"])
    sent = [each for each in main_module.received.values() if each is not None]
    main_module.received = {each.__qualname__: each for each in sent if main.get(each.__qualname__) is each}
    report = reports.finished(value, f"what {name} returned can't be written")
    with report.block or pack(None).block as written:
        job_file.write(path, job_file.RESULT, written)
    if report.lost:
        raise PayloadError(f"{report.lost}. Everything else is in {path}", report.path)


def _exit(code: Any) -> NoReturn:
    """Exit as Python does, but without freeing objects: to free a gloo group may hang."""
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    redirect.finish()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)
