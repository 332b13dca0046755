"""In the fork server: which environment variables have counted by now, and a rank asks whether its own differ there.

``PYTORCH_JIT`` is read when torch is imported, ``PYTHONHASHSEED`` when Python starts: a rank that is forked later has
what the server found, whatever its environment says. What Python code reads is seen here as it is read, so that this
holds for every version of torch and for what ``nbddp.preload`` imports; what the interpreter and libraries in C read is
listed (by intercepting ``getenv``; torch 2.13, numpy 2.4, CPython 3.11).
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
    | TQDM_.*                                        # looked for among all names
    """,
    re.VERBOSE,
)
# Set for each rank, by us or in it, or read again when it is needed.
_SET_IN_A_RANK = re.compile(
    r"""
    (LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE) | ROLE_NAME | MASTER_(ADDR|PORT) | TORCHELASTIC_.* | ACCELERATE_USE_CPU
    | (GLOO|NCCL)_SOCKET_IFNAME | CUBLAS_WORKSPACE_CONFIG | CUDA_VISIBLE_DEVICES | PYTORCH_NVML_BASED_CUDA_CHECK
    | (OMP|MKL)_NUM_THREADS | TORCH_DISTRIBUTED_DEBUG | TZ | TMPDIR | TEMP | TMP | TORCHINDUCTOR_CACHE_DIR
    | KMP_(DUPLICATE_LIB_OK|INIT_AT_FORK)            # set by importing scikit-learn; for libraries that come later
    """,
    re.VERBOSE,
)

_names: set[str] = set()
_began_with: dict[str, str] = {}


class _Watched(type(os.environ)):  # type: ignore[misc]
    """``os.environ`` that remembers who is asked for by name; a look through all of them asks for none."""

    def __getitem__(self, name: str) -> str:
        if _listed and _listed[0] == name:
            _listed.pop(0)
        else:
            _listed.clear()
            _names.add(name)
        return super().__getitem__(name)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        _listed[:] = list(super().__iter__())
        return iter(list(_listed))


_listed: list[str] = []  # the names that items(), copy() or dict() go on to ask for, in this order


def begin() -> None:
    """Remember the environment, and from here on which of it is read."""
    _began_with.update(os.environ)
    os.environ.__class__ = _Watched


def end() -> None:
    """All is imported."""
    os.environ.__class__ = _Watched.__base__


def outdated(environ: Mapping[str, str]) -> list[str]:
    """The names that have counted and whose values in this environment are others."""
    differing = {name for name, _ in environ.items() ^ _began_with.items()}
    return sorted(filter(_counts, differing))


def _counts(name: str) -> bool:
    return not _SET_IN_A_RANK.fullmatch(name) and (name in _names or _READ_IN_C.fullmatch(name) is not None)
