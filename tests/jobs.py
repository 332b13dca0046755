"""Ranks without a notebook, in processes of the fork server: it takes 0.1 s instead of the 3 s of a new Python."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nbddp.job import launched
from nbddp.process.server import ForkedProcess
from tests.support import free_port, script


class Job:
    """A rank that is running: of a job, or another program's."""

    def __init__(self, folder: Path, *words: object, main: Callable[[], object] = launched.main, **env: str) -> None:
        self.printed = folder / f"printed{env.get('RANK', '')}"  # the file with all that it prints
        args = str(self.printed), os.getcwd(), list(map(str, words)), main, env
        self._process = ForkedProcess(target=_main, args=args)
        self._process.start()

    def end(self) -> tuple[int, str]:
        """Wait for its end. Returns its exit code, and what it has printed."""
        self._process.join(60)
        code = self._process.exitcode
        self._process.close()
        return code, self.printed.read_text()


def launch(folder: Path, size: int, *words: object, main: Callable[[], object] = launched.main) -> None:
    """Run that many ranks, forked like nbddp's own, with the variables that torchrun sets; none fails or prints."""
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    jobs = [Job(folder, *words, main=main, RANK=str(rank), LOCAL_RANK=str(rank), **environ) for rank in range(size)]
    assert [job.end() for job in jobs] == [(0, "")] * size


def torchrun(folder: Path, size: int, *words: object) -> None:
    """Run ``torchrun`` itself."""
    for _ in range(3):
        ended = script(
            "import sys, torch.distributed.run as r\nr.main(sys.argv[1:])",
            *("--standalone", f"--nproc-per-node={size}", *map(str, words)),
            TMPDIR=str(folder),  # torchrun leaves files there
        )
        # torch's own torchrun now and then aborts when all is done and it leaves (2.13).
        if "terminate called without an active exception" not in ended.stderr:
            break
    assert ended.returncode == 0, ended.stderr


def _main(printed: str, cwd: str, words: Sequence[str], main: Callable[[], object], environ: dict[str, str]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    fd = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(fd, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
    os.environ.update(environ)
    torch.set_num_threads(1)  # torchrun sets OMP_NUM_THREADS, which counts when torch is imported
    os.chdir(cwd)
    sys.argv = ["nbddp", *words]
    main()
