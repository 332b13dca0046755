"""Finds environment variables that a fork server has read and a rank can no longer change.

``PYTORCH_JIT`` is read when torch is imported, ``PYTHONHASHSEED`` when Python starts: a rank that is forked later has
the server's values, whatever its environment says. Reads from Python code are recorded as they happen, which works
for every version of torch and for the modules of ``nbddp.preload``. Variables that the interpreter and C libraries
read are listed here (found by intercepting ``getenv``; torch 2.13, numpy 2.4, CPython 3.11).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

_READ_IN_C = re.compile(
    r"""
    PYTHON(?!PATH$|STARTUP$|BREAKPOINT$|INSPECT$|UNBUFFERED$|IOENCODING$|FAULTHANDLER$).*  # the same in all ranks
    | LC_ALL | LANG                                  # not LC_CTYPE: Python itself sets it at its start (PEP 538)
    | (LD|DYLD|MALLOC)_.* | GLIBC_TUNABLES | OPENSSL_CONF
    | (OMP|GOMP|KMP|MKL|OPENBLAS|GOTO|BLIS|VECLIB|ACC)_.* | (ONEDNN|DNNL|MKLDNN)_.* | ATEN_CPU_CAPABILITY
    | NPY_.* | NUMPY_.*
    | TORCH_(CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES|CUSTOM_TERMINATE|ALLOW_TF32_CUBLAS_OVERRIDE) | PYTORCH_API_USAGE_STDERR
    | TORCH_(BLAS|LINALG|ROCM_FA)_PREFER_.* | PYTORCH_(CUDA_|HIP_)?ALLOC_CONF
    | TQDM_.*                                        # found by iterating over all names
    """,
    re.VERBOSE,
)
# Set for each rank, by nbddp or in the rank, or read again when needed.
_SET_IN_A_RANK = re.compile(
    r"""
    (LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE) | ROLE_NAME | MASTER_(ADDR|PORT) | TORCHELASTIC_.* | ACCELERATE_USE_CPU
    | (GLOO|NCCL)_SOCKET_IFNAME | CUBLAS_WORKSPACE_CONFIG | CUDA_VISIBLE_DEVICES | PYTORCH_NVML_BASED_CUDA_CHECK
    | (OMP|MKL)_NUM_THREADS | TORCH_DISTRIBUTED_DEBUG | TZ | TMPDIR | TEMP | TMP | TORCHINDUCTOR_CACHE_DIR
    | KMP_(DUPLICATE_LIB_OK|INIT_AT_FORK)            # set when scikit-learn is imported, for libraries loaded later
    """,
    re.VERBOSE,
)

forked = False  # does this process come from a fork server?
unfit = ""  # why no rank can be forked with a module of ``nbddp.preload``

_read: set[str] = set()
_began_with: dict[str, str] = {}


class _RecordingEnviron(type(os.environ)):  # type: ignore[misc]
    """An ``os.environ`` that records which names are read; iterating over all of them does not count."""

    def __getitem__(self, name: str) -> str:
        if _iterated and _iterated[0] == name:
            _iterated.pop(0)
        else:
            _iterated.clear()
            _read.add(name)
        return super().__getitem__(name)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        _iterated[:] = list(super().__iter__())
        return iter(list(_iterated))


_iterated: list[str] = []  # the names that items(), copy() or dict() will read next, in this order


def begin() -> None:
    """Remember the environment of the first call, and record from now on which variables are read."""
    if not _began_with:
        _began_with.update(os.environ)
    os.environ.__class__ = _RecordingEnviron


def end() -> None:
    """Stop recording."""
    os.environ.__class__ = _RecordingEnviron.__base__


def outdated(environ: Mapping[str, str]) -> list[str]:
    """The variables that the server has read and that have other values in ``environ``."""
    differing = {name for name, _ in environ.items() ^ _began_with.items()}
    read = (name for name in differing if name in _read or _READ_IN_C.fullmatch(name))
    return sorted(name for name in read if not _SET_IN_A_RANK.fullmatch(name))
