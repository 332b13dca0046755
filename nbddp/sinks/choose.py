"""Makes the sinks of ``run(to=...)`` from what the user passes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from nbddp.errors import LaunchError
from nbddp.sinks.files import CsvFile, JsonLines
from nbddp.sinks.interface import Sink
from nbddp.sinks.trackers import Function, Logger, MlflowRun, TensorBoard, TensorBoardFolder, WandbRun
from nbddp.text import did_you_mean, short

_KINDS = (
    "a SummaryWriter, a run of wandb.init() or mlflow.start_run(), an object with log_metrics(metrics, step), "
    "a function f(step, metrics), 'csv:PATH', 'jsonl:PATH' or 'tensorboard:FOLDER'"
)


def choose_sinks(to: Any) -> list[Sink]:
    """Return the sinks for one of these kinds or a list of them; none for None. Raises LaunchError."""
    if to is None:
        return []
    return [_choose(each) for each in (to if isinstance(to, (list, tuple)) else [to])]


def _choose(to: Any) -> Sink:
    if isinstance(to, (str, os.PathLike)):
        return _by_prefix(os.fspath(to))
    if isinstance(to, ModuleType):
        raise LaunchError(f"to={to.__name__} is a module. Pass what its init() or start_run() returns")
    package = type(to).__module__.partition(".")[0]
    if package == "wandb" and callable(getattr(to, "define_metric", None)) and hasattr(to, "id"):
        return WandbRun(to)
    if package == "mlflow" and hasattr(to, "info"):
        return MlflowRun(to)
    if callable(getattr(to, "add_scalar", None)):
        return TensorBoard(to)
    if callable(getattr(to, "log_metrics", None)):
        return Logger(to)
    if callable(to) and not isinstance(to, type):
        return Function(to)
    raise LaunchError(f"to={short(to)} cannot receive metrics. It takes {_KINDS}")


def _by_prefix(text: str) -> Sink:
    kind, colon, path = text.partition(":")
    if not colon or kind not in _PREFIXES:
        hint = did_you_mean(kind, _PREFIXES) if colon else ""
        raise LaunchError(f"to={short(text)} has no kind that nbddp knows{hint}. It takes {_KINDS}")
    if not path:
        raise LaunchError(f"to={short(text)} has no path")
    return _PREFIXES[kind](path)


def _in_folder(make: Callable[[str], Sink]) -> Callable[[str], Sink]:
    """The file's folder is made, and a file that cannot be written is refused now, not after the training."""

    def checked(path: str) -> Sink:
        folder = Path(path).absolute().parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"to={short(path)}: the folder cannot be made: {error}") from None
        if not os.access(folder, os.W_OK) or Path(path).is_dir():
            raise LaunchError(f"to={short(path)} cannot be written")
        return make(path)

    return checked


def _tensorboard(folder: str) -> Sink:
    if importlib.util.find_spec("tensorboard") is None:
        raise LaunchError("to='tensorboard:...' needs the package tensorboard: pip install tensorboard")
    if Path(folder).is_file():
        raise LaunchError(f"to='tensorboard:{folder}': that is a file, not a folder")
    return TensorBoardFolder(folder)


_PREFIXES = {"csv": _in_folder(CsvFile), "jsonl": _in_folder(JsonLines), "tensorboard": _tensorboard}
