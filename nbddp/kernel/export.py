"""Kernel side. A function of the notebook as a file that runs without it, and what such a job gives back."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp import culprit, folders, jobfile, payload
from nbddp.kernel.plan import check_call


def export(
    fn: Callable[..., Any],
    path: str | os.PathLike[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Write ``fn(*args, **kwargs)`` to a file, to run without a notebook.

    ::

        torchrun --nproc-per-node 4 -m nbddp job.nbddp [--metrics FILE] [--result FILE]
        srun python -m nbddp job.nbddp          # MASTER_ADDR: the first host's name
        python -m nbddp job.nbddp               # one rank

    The function, the classes and the data that it uses are in the file; modules are imported where it runs,
    which has the same versions of Python, torch, cloudpickle and nbddp. ``History.load(FILE)`` reads the metrics,
    ``load_result(FILE)`` what rank 0 returned. Running the file, like unpickling, is running its writer's code.

    Args:
        path: the file; whole or not there, and its owner's alone (0600).

    Raises:
        LaunchError: the function cannot be called with these arguments.
        PayloadError: something does not travel; names the variable. Queues, locks and tensors in shared memory
            do not: nobody starts the ranks who could hand them over.
    """
    kwargs = dict(kwargs or {}) if isinstance(kwargs, Mapping) or not kwargs else kwargs
    name = check_call(fn, args, kwargs, None)

    def fill(fd: int) -> int:
        try:
            return payload.pack((fn, tuple(args), kwargs), fd, inheriting=False).nbytes
        except Exception as error:  # whatever a user's __reduce__ raises
            named = {name: fn, **{f"args[{i}]": arg for i, arg in enumerate(args)}, **kwargs}
            explained = culprit.explain(named, error, what=f"cannot export {name}", inheriting=False)
            if isinstance(error, OSError) and not explained.path:
                raise  # a full disk
            raise explained from None

    jobfile.write(path, jobfile.JOB, name, fill, tuple(folders.users(sys.path)))


def load_result(path: str | os.PathLike[str]) -> Any:
    """What rank 0 of a job returned that ran with ``--result PATH``; tensors are on the CPU.

    It is unpickled, which runs whatever code the file's writer put there: load only what you trust.

    Raises:
        NbddpError: the file is none of those, is cut off or damaged, or was written with other versions.
        PayloadError: it cannot be unpacked here: a module that it needs is missing, say.
    """
    fd, head = jobfile.open_block(path, jobfile.RESULT)
    try:
        return payload.unpack(fd, head.nbytes).value
    except Exception as error:  # whatever a user's __setstate__ raises
        raise culprit.explain_unpacking(os.fspath(path), error) from error
    finally:
        os.close(fd)
