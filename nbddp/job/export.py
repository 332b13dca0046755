"""``export`` writes a function of the notebook to a file that runs without it; ``load_result`` reads its result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp import folders, payload
from nbddp.job import job_file
from nbddp.kernel.plan import checked_call
from nbddp.payload import unpicklable


def export(
    fn: Callable[..., Any],
    path: str | os.PathLike[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Write ``fn(*args, **kwargs)`` to a file that runs without a notebook.

    ::

        torchrun --nproc-per-node 4 -m nbddp job.nbddp [--metrics FILE] [--result FILE]
        srun python -m nbddp job.nbddp          # MASTER_ADDR: the first host's name
        python -m nbddp job.nbddp               # one rank

    The file holds the function and the classes and data that it uses. Modules are imported where it runs, which needs
    the same versions of Python, torch, cloudpickle and nbddp. ``History.load(FILE)`` reads the metrics,
    ``load_result(FILE)`` what rank 0 returned. Like unpickling, running the file can run any code.

    Args:
        path: the file. It is written atomically, and only its owner can read it (mode 0600).

    Raises:
        LaunchError: the function cannot be called with these arguments.
        PayloadError: a variable, which the error names, cannot be pickled. Queues, locks and tensors in shared memory
            cannot, because they need a parent process that starts the ranks.
    """
    call = checked_call(fn, args, kwargs)

    def fill(fd: int) -> int:
        try:
            return payload.pack((call.fn, call.args, call.kwargs), fd, inheriting=False).nbytes
        except Exception as error:  # whatever a user's __reduce__ raises
            named = {call.name: fn, **{f"args[{i}]": arg for i, arg in enumerate(call.args)}, **call.kwargs}
            explained = unpicklable.explain(named, error, what=f"cannot export {call.name}", inheriting=False)
            if isinstance(error, OSError) and not explained.path:
                raise  # a full disk
            raise explained from None

    job_file.write(path, job_file.JOB, call.name, fill, tuple(folders.users(sys.path)))


def load_result(path: str | os.PathLike[str]) -> Any:
    """Load what rank 0 of a job returned, which ran with ``--result PATH``; tensors are on the CPU.

    The file is unpickled, which can run any code: load only files that you trust.

    Raises:
        NbddpError: the file does not hold a result, is truncated or damaged, or was written with other versions.
        PayloadError: it cannot be unpickled here, e.g. because a module is missing.
    """
    fd, head = job_file.open_block(path, job_file.RESULT)
    try:
        return payload.unpack(fd, head.nbytes).value
    except Exception as error:  # whatever a user's __setstate__ raises
        raise unpicklable.explain_unpacking(os.fspath(path), error) from error
    finally:
        os.close(fd)
