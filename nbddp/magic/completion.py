"""Completes lines of ``%ddp`` and ``%%ddp`` when Tab is pressed."""

from __future__ import annotations

import argparse
import glob
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

# Only the magics import this module, so IPython is installed.
from IPython.core import completer  # noqa: TID253

from nbddp.kernel import run as runs
from nbddp.launch.devices import accelerator
from nbddp.magic.options import COMMANDS, DEFAULTS_PARSER, OPEN_PARSER, SCRIPT_PARSER

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_NAME = re.compile(r"[^\W\d][\w.]*$")

_VALUES: dict[str, Callable[[], list[str]]] = {
    "--device": lambda: ["cpu", *([found[0]] if (found := accelerator()) else [])],
    "--backend": lambda: ["gloo", "nccl"],
    "logs": lambda: [str(rank) for rank in range(newest.nprocs)] if (newest := runs.last_run()) else [],
}


def register(shell: InteractiveShell, cell_parser: argparse.ArgumentParser, names: Callable[[str], list[str]]) -> None:
    """Complete such lines in this notebook, and in the cells of a session the ranks' names.

    Args:
        cell_parser: the options of ``%%ddp``.
        names: returns the names on the ranks that begin like its argument, ``mod`` or ``model.we``.
    """

    def fitting(text: str) -> list[str]:
        return _fitting(text, cell_parser)

    if hasattr(completer, "context_matcher"):
        _add_matcher(shell, fitting, names)
    else:  # IPython 7 (Colab, Kaggle), whose hooks cannot keep Jedi's completions away
        set_hook: Any = shell.set_hook
        for command in ("%ddp", "%%ddp"):
            set_hook("complete_command", lambda _shell, event: fitting(event.text_until_cursor), str_key=command)


def _add_matcher(
    shell: InteractiveShell, fitting: Callable[[str], list[str]], names: Callable[[str], list[str]]
) -> None:
    """On lines of magics, only these completions are shown, if there are any; in cells beside the notebook's."""

    def match(context: completer.CompletionContext) -> Any:
        found = fitting(context.text_until_cursor)
        text = _NAME.search(context.text_until_cursor)
        in_cell = not found and context.full_text.lstrip().startswith("%%ddp") and context.cursor_line > 0
        ours = found or (names(text.group()) if in_cell and text else [])
        completions = [completer.SimpleCompletion(each) for each in ours]
        return {"completions": completions, "suppress": bool(found), "ordered": True}

    matchers: list[Any] = shell.Completer.custom_matchers
    matchers[:] = [each for each in matchers if getattr(each, "matcher_identifier", "") != "nbddp"]
    matchers.append(completer.context_matcher(identifier="nbddp", priority=200)(match))


def _fitting(text: str, cell_parser: argparse.ArgumentParser) -> list[str]:
    """Return what may follow this text of a line instead of its last word."""
    command, space, rest = text.lstrip().partition(" ")
    if not space or command not in ("%ddp", "%%ddp"):
        return []
    words = rest.split()
    word = words.pop() if words and not rest[-1:].isspace() else ""
    before = words[-1] if words else ""
    found: list[str] = []
    if before in _VALUES:
        found = _VALUES[before]()
    elif word.startswith("-"):
        found = _options_of(cell_parser if command == "%%ddp" else _parser_of(words))
    elif command == "%ddp" and words[:1] == ["run"]:
        folders = [path + "/" for path in glob.glob(word + "*") if os.path.isdir(path)]
        found = sorted(glob.glob(word + "*.py") + folders)
    elif command == "%ddp" and not words:
        found = list(COMMANDS)
    return [each for each in found if each.startswith(word)]


def _parser_of(words: list[str]) -> argparse.ArgumentParser:
    return {"run": SCRIPT_PARSER, "open": OPEN_PARSER}.get("".join(words[:1]), DEFAULTS_PARSER)


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    extra = ["--reset"] if parser is DEFAULTS_PARSER else []
    return [option for action in parser._actions for option in action.option_strings] + extra
