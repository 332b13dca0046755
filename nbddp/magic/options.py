"""The options of ``%%ddp`` and ``%ddp``: those of ``run``, as on a command line."""

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from IPython.core.error import UsageError

from nbddp.kernel.settings import Options

_SHORT = {"nprocs": ("-n",), "gpus": ("-g",)}
_NOT_HERE = {"env", "init_process_group", "wait", "log_to", "autolog", "show"}
_NAMES = {field.name for field in dataclasses.fields(Options)}


class Parser(argparse.ArgumentParser):
    """Parses a magic's words: options of ``run``, and some of its own.

    Args:
        magic: its name.
        more: its own, as for ``add_argument``; spellings are separated by spaces.
    """

    def __init__(self, magic: str, *more: tuple[str, dict[str, Any]]) -> None:
        super().__init__(magic, add_help=False, argument_default=argparse.SUPPRESS)
        for name, how in more:
            self.add_argument(*name.split(), **how)
        for field in dataclasses.fields(Options):
            if field.name not in _NOT_HERE:
                parse_it = next((parse for kind, parse in _TYPES.items() if kind in str(field.type)), str)
                several = "extend" if parse_it is numbers else "store"  # -g 0 -g 1
                how = {"action": "store_true"} if parse_it is bool else {"action": several, "type": parse_it}
                names = *_SHORT.get(field.name, ()), f"--{field.name.replace('_', '-')}"
                self.add_argument(*names, dest=field.name, **how)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return what was given; the options of ``run`` in ``options``. Raises UsageError."""
        given = self.parse_args(words)
        given.options = {name: value for name, value in vars(given).items() if name in _NAMES}
        return given

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def split(line: str) -> list[str]:
    """Return a line's words, as a shell does. Raises UsageError."""
    try:
        return shlex.split(line)
    except ValueError as error:  # a quotation that doesn't end
        raise UsageError(f"{line!r} can't be parsed: {error}") from None


def text(options: dict[str, Any]) -> str:
    """Return options as on a line."""
    words = []
    for name, value in options.items():
        shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [shlex.quote(shown)])]
    return " ".join(words)


def numbers(text: str) -> list[int]:
    """Parse ``0,2``."""
    return [int(each) for each in text.split(",")]


def names(text: str) -> list[str]:
    """Parse ``model,loss``."""
    if wrong := [each for each in text.split(",") if not each.isidentifier()]:
        why = f"{wrong[0]!r} isn't a valid name" if wrong[0] else "a name is missing: write -o a,b, without spaces"
        raise argparse.ArgumentTypeError(why)
    return text.split(",")


def processes(text: str) -> int | None:
    """Parse torchrun's number of processes; ``gpu`` and ``auto`` are one per GPU, as without a number."""
    return None if text in ("gpu", "auto") else int(text)


# By what an option's type has in it.
_TYPES: dict[str, Callable[[str], Any]] = {"Sequence": numbers, "bool": bool, "int": int, "float": float}
