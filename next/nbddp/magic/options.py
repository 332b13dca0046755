"""The options of ``%%ddp`` and ``%ddp open``: those of ``run``, as on a command line."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Callable
from typing import Any, NoReturn

from IPython.core.error import UsageError

from nbddp.kernel.settings import Options

_SHORT = {"nprocs": ("-n",), "gpus": ("-g",)}
_NOT_HERE = {"env", "init_process_group", "wait", "log_to", "autolog", "show"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def parse(magic: str, line: str, *more: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """Return the options of a line; those of ``run`` that were given are in ``options``. Raises UsageError.

    Args:
        magic: its name.
        more: options of this magic only, as for ``add_argument``; spellings are separated by spaces.
    """
    parser = _Parser(magic, add_help=False, argument_default=argparse.SUPPRESS)
    for name, how in more:
        parser.add_argument(*name.split(), **how)
    for field in dataclasses.fields(Options):
        if field.name in _NOT_HERE:
            continue
        parse_it = next((parse for kind, parse in _TYPES.items() if kind in str(field.type)), str)
        how = {"action": "store_true"} if parse_it is bool else {"type": parse_it}
        parser.add_argument(*_SHORT.get(field.name, ()), f"--{field.name.replace('_', '-')}", dest=field.name, **how)
    given = parser.parse_args(shlex.split(line))
    names = {field.name for field in dataclasses.fields(Options)}
    given.options = {name: value for name, value in vars(given).items() if name in names}
    return given


def numbers(text: str) -> list[int]:
    """Parse ``0,2``."""
    return [int(each) for each in text.split(",")]


def processes(text: str) -> int | None:
    """Parse torchrun's number of processes; ``gpu`` and ``auto`` are one per GPU, as without a number."""
    return None if text in ("gpu", "auto") else int(text)


# By what an option's type has in it.
_TYPES: dict[str, Callable[[str], Any]] = {"Sequence": numbers, "bool": bool, "int": int, "float": float}
