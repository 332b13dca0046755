"""The options of a run, written once: their names, types and defaults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast

import torch

from nbddp.launch.interface import Hosts
from nbddp.text import did_you_mean

STALL_AFTER_S = 60.0
F = TypeVar("F", bound=Callable[..., Any])


class RunOptions(TypedDict, total=False):
    """The options of ``run()``, apart from the function and its arguments; see ``run``'s docstring."""

    nprocs: int | Mapping[str, int] | None
    device: str | torch.device | None
    gpus: Sequence[int] | None
    backend: str | None
    init: bool
    seed: int | None
    deterministic: bool
    env: Mapping[str, str] | None
    timeout: float | None
    pg_timeout: float | None
    max_restarts: int
    stall_after: float | None
    stop_on_nan: bool
    wait: bool
    show: bool | str | None
    name: str | None
    start_method: str | None
    hosts: Hosts
    min_hosts: int | None
    grow: bool
    keep_children: bool
    oversubscribe: bool
    to: Any
    listen: bool
    pdb: bool | None


_OPTION_NAMES = tuple(RunOptions.__annotations__)
_DEFAULTS_OTHER_THAN_NONE: RunOptions = {
    "init": True,
    "deterministic": False,
    "max_restarts": 0,
    "stall_after": STALL_AFTER_S,
    "stop_on_nan": False,
    "wait": True,
    "keep_children": False,
    "grow": False,
    "oversubscribe": False,
    "listen": True,
}


def complete(options: RunOptions) -> RunOptions:
    """Return the options, with defaults for those that are missing."""
    return cast(RunOptions, {**dict.fromkeys(_OPTION_NAMES), **_DEFAULTS_OTHER_THAN_NONE, **options})


def takes_options(function: F) -> F:
    """Decorate a function that has ``**options``: its signature lists them all, and it receives them all.

    Raises:
        TypeError: the function was called with a name that is not an option.
    """
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    defaults = cast(dict[str, Any], complete({}))
    shown = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=text)
        # As text, like all other annotations here: TypedDict turns "int" into ForwardRef("int").
        for name, text in ((name, hint.__forward_arg__) for name, hint in RunOptions.__annotations__.items())
    ]
    known = {p.name for p in own} | set(_OPTION_NAMES)

    @functools.wraps(function)
    def with_all(*args: Any, **given: Any) -> Any:
        for name in given.keys() - known:
            suggestion = did_you_mean(name, known)
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{suggestion}")
        return function(*args, **{**defaults, **given})

    with_all.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
    return cast(F, with_all)
