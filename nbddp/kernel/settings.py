"""The options of a run, checked, and what they decide: settings that every rank gets as they are."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar, cast

import torch
import torch.distributed as dist

from nbddp.errors import LaunchError, without_our_frames
from nbddp.helpers import context
from nbddp.messages import Settings
from nbddp.panel import frontend
from nbddp.panel.frontend import ipython
from nbddp.payload import carried
from nbddp.text import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])
CPU_NPROCS = 2  # ranks on a machine without GPUs, unless the user chooses another number
_CONTRACT = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
_ATTENDED_TIMEOUT_S = 3600.0  # of collectives
_MOST, _MOST_PER_CORE = 64, 16  # ranks on the CPU; the larger number counts
_WHOLE = {"nprocs": 1, "nnodes": 1, "max_restarts": 0, "seed": 0}
_ELSEWHERE = {  # what an option is called in torchrun, accelerate, Lightning, and was called here
    **dict.fromkeys(("world_size", "num_processes", "nproc_per_node", "devices"), "nprocs"),
    **dict.fromkeys(("num_machines", "num_nodes", "hosts", "min_hosts"), "nnodes"),
    "init": "init_process_group",
    "listen": "autolog",
    "to": "log_to",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``run()`` and of all that starts ranks; see ``run``'s docstring."""

    nprocs: int | None = None
    nnodes: int | None = None
    device: str | torch.device | None = None
    gpus: Sequence[int] | None = None
    backend: str | None = None
    init_process_group: bool = True
    seed: int | None = None
    deterministic: bool = False
    env: Mapping[str, str] | None = None
    timeout: float | None = None
    pg_timeout: float | None = None
    max_restarts: int = 0
    stop_on_nan: bool = False
    wait: bool = True
    show: bool | str | None = None
    name: str | None = None
    log_to: Any = None
    autolog: bool = True
    pdb: bool | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether the cell shows nothing of what the ranks print, display, or return."""
        return self.show is False or not self.wait


class Given(TypedDict, total=False):
    """The same as keyword arguments, for type checkers and editors."""

    nprocs: int | None
    nnodes: int | None
    device: str | torch.device | None
    gpus: Sequence[int] | None
    backend: str | None
    init_process_group: bool
    seed: int | None
    deterministic: bool
    env: Mapping[str, str] | None
    timeout: float | None
    pg_timeout: float | None
    max_restarts: int
    stop_on_nan: bool
    wait: bool
    show: bool | str | None
    name: str | None
    log_to: Any
    autolog: bool
    pdb: bool | None


def takes_options(function: F) -> F:
    """Decorate a function with ``**options``: its signature has all of them, and it hints at a wrong name."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = [inspect.Parameter(f.name, keyword, default=f.default, annotation=f.type) for f in fields(Options)]
    names = {parameter.name for parameter in [*own, *shown]}

    @functools.wraps(function)
    def with_options(*args: Any, **given: Any) -> Any:
        if unknown := [name for name in given if name not in names]:
            name = unknown[0]
            hint = f"; did you mean {_ELSEWHERE[name]}?" if name in _ELSEWHERE else did_you_mean(name, names)
            with contextlib.suppress(TypeError, ValueError):  # some builtins have no signature
                if args and callable(args[0]) and name in inspect.signature(args[0]).parameters:
                    hint = f'; to pass it to your function, write kwargs={{"{name}": {reprlib.repr(given[name])}}}'
            called = function.__qualname__.removesuffix(".__init__")
            raise without_our_frames(TypeError(f"{called}() got an unexpected keyword argument {name!r}{hint}"))
        return function(*args, **given)

    with_options.__signature__ = inspect.Signature([*own, *shown])  # type: ignore[attr-defined]
    return cast(F, with_options)


def decide(name: str, options: Options, *, contract: bool = True, cells: bool = False) -> Settings:
    """Check the options, and choose the values of those that are None. Raises LaunchError: says what to do instead.

    Args:
        contract: the ranks get torchrun's environment variables.
        cells: the ranks run cells, and show things as the notebook does.
    """
    if context.is_rank():
        raise LaunchError("this code is already running on a rank: call the function directly")
    _check(options, contract)
    # Somebody is there to use the debugger, while which the other ranks have to wait.
    attended = contract and options.wait and (cells or ipython() is not None)
    gpus, nnodes, threads = options.gpus, options.nnodes or 1, _threads(options.env or {})
    environ: dict[str, str] = {}
    modules: carried.Modules = {}
    if options.nnodes is None:
        device, count = device_and_count(options)
        nprocs = _nprocs(options, device, count)
        environ = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **os.environ}
        threads = _threads({**environ, **(options.env or {})}) or max(1, _cores() // nprocs)
    else:  # a node has its own environment, interface, and cores
        device, nprocs = _on_nodes(options, nnodes)
        folders = [path for path in users_folders() if not os.path.exists(os.path.join(path, "nbddp", "__init__.py"))]
        modules = carried.sources(folders)  # a node has nbddp
    if contract:
        if threads:
            environ.setdefault("OMP_NUM_THREADS", str(threads))
        if device == "cpu":
            environ.setdefault("ACCELERATE_USE_CPU", "true")  # without this, accelerate trains N separate models
    if options.deterministic:
        environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if gpus is not None:  # each GPU once: with a repeated one, CUDA sees none
        visible = [v for v in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible else str(i) for i in dict.fromkeys(gpus))
    history = getattr(ipython(), "history_manager", None)
    once = list(dict.fromkeys(gpus or range(nprocs // nnodes)))
    return Settings(
        name=name,
        world_size=nprocs,
        device=device,
        indices=tuple(once.index(gpu) for gpu in gpus or once),
        backend=_backend(options.backend, device) if options.init_process_group else None,
        pg_timeout_s=options.pg_timeout or (_ATTENDED_TIMEOUT_S if attended else None),
        seed=options.seed,
        deterministic=options.deterministic,
        threads=threads,
        environ={**environ, **(options.env or {})},
        cwd=working_directory(),
        argv=tuple(arguments(name)),
        nnodes=nnodes,
        modules=modules,
        imports=carried.for_their_effects(list(history.input_hist_parsed) if history is not None else []),
        sys_path=tuple(part for part in sys.path if isinstance(part, str)),
        shell=_shell_settings() if cells else {},
        autolog=options.autolog,
        post_mortem=bool(getattr(ipython(), "call_pdb", False) if options.pdb is None else options.pdb) and attended,
        contract=contract,
        max_restarts=options.max_restarts,
    )


def _shell_settings() -> dict[str, Any]:
    """Return how the notebook's IPython shows things."""
    if (shell := ipython()) is None:
        return {}
    shown = {name: getattr(shell, name) for name in ("colors", "ast_node_interactivity", "call_pdb")}
    return {"is_kernel": "IPKernelApp" in shell.config, **shown}


def on_ray() -> Any:
    """Import what ``nnodes=`` needs. Raises LaunchError without Ray."""
    try:
        from nbddp.ray import nodes
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise LaunchError(
            "nnodes= needs Ray, which isn't installed: run pip install ray on every machine. "
            "nbddp.export() and torchrun work on several machines without it"
        ) from None
    return nodes


def _on_nodes(options: Options, nnodes: int) -> tuple[str, int]:
    """Return the type of device, and the number of ranks, on nodes of Ray's."""
    if options.gpus is not None:
        raise LaunchError("gpus= is for this machine: with nnodes=, Ray assigns the GPUs. Leave gpus out")
    gpus, asked = on_ray().gpus_per_node(nnodes), _asked_device(options)
    device = asked.type if asked is not None else "cuda" if gpus else "cpu"
    nprocs = options.nprocs or nnodes * (CPU_NPROCS if device == "cpu" else gpus)
    if not nprocs:
        raise LaunchError(
            f"device={device!r}, but Ray doesn't have {nnodes} nodes with GPUs right now: pass nprocs= to wait for them"
        )
    if nprocs % nnodes:
        raise LaunchError(f"nprocs={nprocs} counts all ranks, so it must be divisible by nnodes={nnodes}")
    return device, nprocs


def users_folders() -> list[str]:
    """Return the folders of ``sys.path`` that are neither Python's nor of installed packages."""
    prefixes = sys.prefix, sys.base_prefix
    pythons = tuple(os.path.join(prefix, lib, "") for prefix in prefixes for lib in ("lib", "lib64"))
    return [path for path in map(os.path.abspath, sys.path) if not path.startswith(pythons) and "-packages" not in path]


def _check(options: Options, contract: bool) -> None:
    for name in ("nprocs", "nnodes", "max_restarts", "seed", "timeout", "pg_timeout"):
        value, whole = getattr(options, name), name in _WHOLE
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise LaunchError(f"{name} must be {'an integer' if whole else 'a number of seconds'}, not {value!r}")
        if value < _WHOLE.get(name, 0) or (not whole and not value > 0):
            advice = "; torch.cuda.device_count() is 0 without a GPU: leave nprocs out" if name == "nprocs" else ""
            raise LaunchError(f"{name}={value} is too small{advice}")
    if options.env is not None and not isinstance(options.env, Mapping):
        raise LaunchError(f"env must be a dict of strings, not {type(options.env).__name__}")
    for key, value in (options.env or {}).items():  # an error names no value, which may be a secret
        if not isinstance(key, str) or not isinstance(value, str):
            what, wrong = ("", key) if not isinstance(key, str) else ("the value of ", value)
            given = f"{what}{key!r} has type {type(wrong).__name__}"
            raise LaunchError(f"env must be a dict of strings, but {given}: use str(...)")
        if not key or "=" in key or "\0" in key + value:
            raise LaunchError(f"env has {key!r}: a name can't be empty or contain '=', and null bytes aren't allowed")
        if contract and key in _CONTRACT:
            raise LaunchError(f"env sets {key}, which nbddp sets to each rank's own value. Leave it out")
    for where, kind in (("show=", options.show), (f"{frontend.VARIABLE}=", os.environ.get(frontend.VARIABLE))):
        if isinstance(kind, str) and kind and kind not in frontend.KINDS:
            raise LaunchError(f"{where}{kind!r} is unknown: use one of {', '.join(frontend.KINDS)}")
    gpus = options.gpus
    if gpus is not None and not (gpus and isinstance(gpus, (list, tuple, range)) and all(type(i) is int for i in gpus)):
        raise LaunchError(f"gpus must be a list of device numbers, e.g. gpus=[0, 1], not {gpus!r}")


def device_and_count(options: Options) -> tuple[str, int]:
    """Return the type of device, and how many there are; makes no context on them."""
    gpus, asked = options.gpus, _asked_device(options)
    if asked is None:
        if count := torch.cuda.device_count():
            return "cuda", count
        found = context.current_accelerator()
        if found is not None and found.type != "mps" and (count := torch.get_device_module(found).device_count()):
            return found.type, count
        if gpus is not None:
            raise LaunchError(f"gpus={list(gpus)}, but torch sees no GPU here. Leave gpus out to run on the CPU")
        return "cpu", 0
    if asked.type == "cpu":
        if gpus is not None:
            raise LaunchError(f"gpus={list(gpus)} and device='cpu' can't be combined; leave one out")
        return "cpu", 0
    if count := torch.get_device_module(asked).device_count():
        return asked.type, count
    advice = "Use device='cpu', or leave device out"
    raise LaunchError(f"device={asked.type!r}, but torch sees no such device here. {advice}")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _nprocs(options: Options, device: str, count: int) -> int:
    nprocs, gpus = options.nprocs, options.gpus
    if gpus is not None:
        given = f"gpus={list(gpus)}"
        if missing := [i for i in gpus if not 0 <= i < count]:
            raise LaunchError(f"{given}: there is no GPU {missing[0]} here, only {list(range(count))}")
        if nprocs not in (None, len(gpus)):
            raise LaunchError(f"nprocs={nprocs}, but {given} lists {len(gpus)}, one per rank: leave nprocs out")
        if len(set(gpus)) < len(gpus) and options.backend != "gloo":
            raise LaunchError(f"{given}: NCCL needs a GPU for each rank. To share a GPU, use backend='gloo'")
        return len(gpus)
    if device == "cpu":
        most = max(_MOST, _MOST_PER_CORE * _cores())
        if nprocs is not None and nprocs > most:
            raise LaunchError(f"nprocs={nprocs} is too large: at most {most} ranks on this machine's CPU")
        return nprocs or CPU_NPROCS
    if nprocs is not None and nprocs > count:
        there = f"{count} {device} device{'s' * (count > 1)}"
        raise LaunchError(f"nprocs={nprocs}, but torch sees {there} here: use nprocs={count}, or device='cpu'")
    return nprocs or count


def _asked_device(options: Options) -> torch.device | None:
    if options.device is None:
        return None
    try:
        asked = torch.device(options.device)
    except (RuntimeError, TypeError) as error:
        raise LaunchError(f"device={options.device!r} isn't a torch device: {str(error).splitlines()[0]}") from None
    if asked.index is not None:
        raise LaunchError(f"device={str(asked)!r} names one device; use device={asked.type!r}, gpus=[{asked.index}]")
    return asked


def _backend(backend: str | None, device: str) -> str:
    if backend is None:
        return dist.Backend.default_device_backend_map.get(device, "gloo")
    if not isinstance(backend, str):
        raise LaunchError(f"backend must be a name such as 'gloo' or 'nccl', not {backend!r}")
    usable = [name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name)]
    for name in (part.rpartition(":")[2] for part in backend.lower().split(",")):
        if name not in usable:
            raise LaunchError(f"backend={backend!r} isn't available: this torch has {', '.join(usable)}")
        if name == "nccl" and device == "cpu":
            raise LaunchError("backend='nccl' works only on GPUs; on the CPU, use 'gloo'")
    return backend.lower()


def _threads(environ: Mapping[str, str]) -> int:
    """Return the intra-op threads of a rank that the user's variables name; 0 if none does."""
    values = (environ.get(name, "") for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"))
    return next((int(value) for value in values if value.isdigit() and int(value) > 0), 0)


def arguments(name: str) -> list[str]:
    """Return ``sys.argv`` for the ranks; a notebook that still has its kernel's arguments has none for them."""
    in_a_script = hasattr(sys.modules["__main__"], "__file__")
    words = sys.argv[1:]
    are_the_kernels = not in_a_script and words and words == sys.orig_argv[len(sys.orig_argv) - len(words) :]
    return [name] if are_the_kernels else sys.argv


def working_directory() -> str:
    """Return the notebook's working directory, where the ranks start. Raises LaunchError if it has been deleted."""
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    raise LaunchError("the notebook's working directory has been deleted. Use %cd to change to another one")


def check_call(fn: Any, args: Any, kwargs: Any, name: str | None) -> str:
    """Check that the function can be called like this on a rank. Returns its name. Raises LaunchError."""
    named = getattr(fn, "func", fn)  # functools.partial
    name = str(name or getattr(named, "__name__", type(named).__name__))
    if not callable(fn):
        text = f"run() takes the function itself, so leave out the (): run(train), not run(train()); got {fn!r}"
        raise LaunchError(text[:200])
    if not isinstance(args, (tuple, list)):
        given = type(args).__name__ + (". For keyword arguments, use kwargs=" if isinstance(args, Mapping) else "")
        raise LaunchError(f"args must be a tuple of {name}'s arguments, e.g. args=(x,), not {given}")
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise LaunchError(f"kwargs must be a dict of {name}'s keyword arguments")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise LaunchError(f"{name} is an async or generator function; calling it runs nothing: pass a plain function")
    with contextlib.suppress(TypeError, ValueError):  # some builtins have no signature
        signature = inspect.signature(fn)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise LaunchError(f"{name}{signature} can't be called with these arguments: {error}") from None
    return name
