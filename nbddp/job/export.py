"""``export`` writes a function of the notebook to a file that runs without it; ``load_result`` reads its result."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp import payload
from nbddp.errors import PayloadError
from nbddp.job import job_file
from nbddp.kernel.settings import arguments, check_call, users_folders
from nbddp.kernel.start import pack_call
from nbddp.text import in_a_line


def export(
    fn: Callable[..., Any],
    path: str | os.PathLike[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Write ``fn(*args, **kwargs)`` to a file that runs without a notebook.

    ::

        torchrun --nproc-per-node 4 -m nbddp job.nbddp [--metrics FILE] [--result FILE]
        python -m nbddp job.nbddp               # one rank

    The file holds the function, and the classes and data that it uses. Modules are imported where it runs, with the
    same versions of Python, torch, and cloudpickle. ``History.load(FILE)`` reads the metrics, ``load_result(FILE)``
    what rank 0 returned. Running the file can run any code, as unpickling can.

    Args:
        path: the file to write, whole or not at all; only its owner can read it (mode 0600).

    Raises:
        LaunchError: the function can't be called with these arguments.
        PayloadError: a variable, which the error names, can't be pickled.
        NbddpError: the file can't be written.
    """
    name = check_call(fn, args, kwargs or {}, None)
    packed = pack_call(name, fn, tuple(args), dict(kwargs or {}), failure="can't be exported", elsewhere=True)
    with packed.block as block:
        job_file.write(path, job_file.JOB, block, name=name, argv=arguments(name), folders=users_folders())


def load_result(path: str | os.PathLike[str]) -> Any:
    """Return what rank 0 returned in a job that ran with ``--result FILE``; tensors are on the CPU.

    The notebook's functions and classes are looked up by name, as they are defined now. Loading the file can run any
    code, as unpickling can: load only what you trust.

    Raises:
        OSError: as ``open``. NbddpError: it isn't a result, is damaged, or was written with other versions.
        PayloadError: it can't be unpickled here, for example because the notebook doesn't define a class.
    """
    block, _ = job_file.read(path, job_file.RESULT)
    with block:
        try:
            return payload.unpack(block).value
        except Exception as error:  # of a user's __setstate__, or a module that is missing
            raise PayloadError(f"{os.fspath(path)} can't be unpickled here: {in_a_line(error)}") from error
