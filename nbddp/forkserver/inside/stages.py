"""What the server imports, in stages: at once what a first run needs, the rest when no process waits for the server.

``torch._dynamo`` takes as long as torch itself. Optimizers, DistributedDataParallel and ``torch.compile`` need it, and
ranks that are forked without it would each import it. A run that needs none of them starts without it.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nbddp.forkserver.inside import memory
from nbddp.worker import inherited

_OLD_GENERATION_THRESHOLD = 1000  # the young generation is collected as usual: otherwise the server is 7 MB larger


class Stages:
    """The imports of the server, and what is done to its memory afterwards.

    Attributes:
        over: nothing is left to be done.
    """

    def __init__(self, stderr: int | None, later: Sequence[str], report: Callable[[str], None]) -> None:
        """Prepare.

        Args:
            stderr: a file in memory that replaces stderr during imports; None: stderr is not replaced.
            later: the modules that not every run needs, each followed by those that import it.
            report: is told what is imported next.
        """
        self.over = False
        self._stderr = stderr
        self._later = collections.deque(later)
        self._report = report
        self._cleaning = _cleaning()

    def first(self, path: list[str], modules: Sequence[str], imports: Sequence[str]) -> None:
        """Import what every rank needs, and with modules of ``nbddp.preload`` everything, as they may need it.

        Args:
            path: the notebook kernel's ``sys.path``, for ``modules``.
            modules: the modules of ``nbddp.preload``.
            imports: nbddp's own modules.
        """
        # A module that calls torch.cuda.is_available() must not initialise the driver, which does not work after a
        # fork.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        self._report("torch")
        with self._importing():
            for name in imports:
                _import(name)
        memory.raise_trim_threshold()
        if modules:
            self.import_all()
            self._report(", ".join(modules))
            with self._importing():
                from nbddp.forkserver.inside import user_modules

                inherited.unfit = user_modules.import_all(path, modules)

    def import_all(self) -> None:
        """Import what is left."""
        while self._later:
            self._import_next()

    def next_step(self) -> None:
        """Do a part of what is left, which takes a moment, so that a request meanwhile waits only for that."""
        if self._later:
            self._import_next()
        elif next(self._cleaning, self) is self:
            self.over = True

    def _import_next(self) -> None:
        name = self._later.popleft()
        self._report(name)
        with self._importing():
            _import(name)

    @contextlib.contextmanager
    def _importing(self) -> Iterator[None]:
        thresholds = gc.get_threshold()
        # Collections of the old generations visit all modules each time, which takes 20 % of the time.
        gc.set_threshold(thresholds[0], _OLD_GENERATION_THRESHOLD, _OLD_GENERATION_THRESHOLD)
        inherited.begin()
        with _stderr_to(self._stderr):
            yield
        _remove_torchs_folder()
        inherited.end()
        gc.set_threshold(*thresholds)
        # Ranks share the memory of these objects as long as the collector does not write to it.
        gc.freeze()


def _import(name: str) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)


def _remove_torchs_folder() -> None:
    """Remove the folder that torch 2.8 makes when it is imported: this server is killed, and a rank makes its own."""
    instantiator: Any = sys.modules.get("torch.distributed.nn.jit.instantiator")
    if hasattr(instantiator, "_TEMP_DIR"):
        instantiator._TEMP_DIR.cleanup()


def _cleaning() -> Iterator[None]:
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    yield
    yield from memory.collapse()


@contextlib.contextmanager
def _stderr_to(fd: int | None) -> Any:
    """Redirect stderr to a file, and copy the file's content to the old stderr afterwards."""
    if fd is None:
        yield
        return
    before = os.dup(2)
    os.dup2(fd, 2)
    yield
    sys.stderr.flush()
    os.dup2(before, 2)
    os.close(before)
    with contextlib.suppress(OSError), open(fd, "r+b", buffering=0, closefd=False) as file:
        file.seek(0)
        os.write(2, file.read())
        file.truncate(0)
