"""Records the curves of code that logs elsewhere: what rank 0 logs with TensorBoard, W&B, a trainer, ...

A library's method is heard when it's called. What a trainer passes on to TensorBoard or W&B isn't heard again: the
caller's module tells.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import MetaPathFinder
from typing import Any

import numpy as np
import torch

from nbddp.text import in_a_line

_Read = Callable[..., tuple[Mapping[str, Any], Any, str]]  # what a method logs: metrics, step, place
_TRAINERS = {"accelerate", "fastai", "keras", "lightning", "lightning_fabric", "pytorch_lightning", "transformers"}


def listen(log: Callable[..., None], owners: Callable[[], dict[str, tuple[str, str]]]) -> None:
    """Log what the user's code logs with these libraries from now on.

    Args:
        log: takes metrics by name, and ``step``; None: it counts.
        owners: returns, by name, who logs it in this run: a library, and its folder or run.
    """
    listener = _Listener(log, owners)
    for name in _METHODS.keys() & sys.modules.keys():
        listener.hear(sys.modules[name])
    sys.meta_path.insert(0, listener)


class _Listener(MetaPathFinder):
    """Finds no module itself. It adds to the import of those in question that their methods are heard."""

    def __init__(self, log: Callable[..., None], owners: Callable[[], dict[str, tuple[str, str]]]) -> None:
        self._log, self._owners = log, owners
        self._given_up: set[str] = set()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in _METHODS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec: Any = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:  # else it's just a folder
            execute = spec.loader.exec_module

            def execute_and_hear(module: Any) -> None:
                execute(module)
                self.hear(module)

            spec.loader.exec_module = execute_and_hear
        return spec

    def hear(self, module: Any) -> None:
        """Log what the methods of this module log."""
        package = module.__name__.partition(".")[0]
        library = "tensorboard" if package == "torch" else package
        for place, method, read in _METHODS[module.__name__]:
            try:
                owner = getattr(module, place) if place else module
                setattr(owner, method, self._heard(getattr(owner, method), library, read))
            except AttributeError as error:
                self._give_up(library, error)

    def _heard(self, original: Callable[..., Any], library: str, read: _Read) -> Callable[..., Any]:
        @functools.wraps(original)
        def heard(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            if library not in self._given_up and (library in _TRAINERS or caller not in _TRAINERS):
                try:
                    self._take(library, *read(*args, **kwargs))
                except Exception as error:  # another version of the library: the training goes on
                    self._give_up(library, error)
            return original(*args, **kwargs)

        return heard

    def _take(self, library: str, metrics: Mapping[str, Any], step: Any, place: str) -> None:
        named = ((self._name(name, library, place), value) for name, value in _numbers(metrics))
        if mine := {name: value for name, value in named if name}:
            self._log(mine, step=None if step is None else int(step))

    def _name(self, name: str, library: str, place: str) -> str:
        """Return the metric's name in the run; "" if it's another library's.

        If another writer of this library has the name, the folder's is put in front: as much of it as is needed.
        """
        owners, folders = self._owners(), [part for part in place.split("/") if part]
        for count in range(len(folders) + 1):
            longer = "/".join([*folders[len(folders) - count :], name])
            owner = owners.setdefault(longer, (library, place))
            if owner == (library, place):
                return longer
            if owner[0] != library:
                break
        return ""

    def _give_up(self, library: str, error: Exception) -> None:
        if library not in self._given_up:
            self._given_up.add(library)
            print(f"nbddp: not recording what {library} logs ({in_a_line(error)})", file=sys.stderr)


def _numbers(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")  # as W&B names them
        elif isinstance(value, torch.Tensor):
            if value.numel() == 1 and not value.is_complex():
                yield f"{prefix}{name}", value
        elif isinstance(value, (int, float, np.generic, np.ndarray)):
            array = np.asarray(value)
            if array.size == 1 and array.dtype.kind in "biuf":
                yield f"{prefix}{name}", array.item()


# ---------------------------------------------------------------------------- the libraries


def _scalar(writer: Any, tag: str, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any) -> Any:
    return {tag: scalar_value}, global_step, _folder(writer)


def _scalars(writer: Any, main_tag: str, tag_scalar_dict: Any, global_step: Any = None, *_: Any, **__: Any) -> Any:
    values = {f"{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()}
    return values, global_step, _folder(writer) + "/"  # another place: TensorBoard keeps them in folders of their own


def _folder(writer: Any) -> str:
    return str(os.path.abspath(getattr(writer, "log_dir", None) or writer.logdir))  # torch's, tensorboardX's


def _wandb(run: Any, data: Mapping[str, Any], step: Any = None, *_: Any, **__: Any) -> Any:
    name = f"{run.id}/{run.name or run.id}"  # a run that came from another process begins with that
    newest = run._local_step if hasattr(run, "_local_step") else run._step  # W&B 0.31; 0.19 to 0.22
    is_dropped = not isinstance(data, Mapping) or (step is not None and step < newest)
    return {} if is_dropped else data, newest if step is None else step, name


def _mlflow(metrics: Mapping[str, Any], step: Any = None, *_: Any, **__: Any) -> Any:
    return {name: float(value) for name, value in metrics.items()}, step, ""  # it takes text, too


def _mlflow_one(key: str, value: Any, step: Any = None, *_: Any, **__: Any) -> Any:
    return _mlflow({key: value}, step)


def _lightning(connector: Any, metrics: Mapping[str, Any], step: Any = None) -> Any:
    step = metrics.get("step", connector.trainer.fit_loop.epoch_loop._batches_that_stepped) if step is None else step
    return {name: value for name, value in metrics.items() if name != "step"}, step, ""


def _transformers(trainer: Any, logs: Mapping[str, Any], *_: Any, **__: Any) -> Any:
    once = ("_runtime", "_per_second", "_preparation_time", "total_flos")  # one number about the whole run
    return {name: value for name, value in logs.items() if not name.endswith(once)}, trainer.state.global_step, ""


def _fastai_batch(recorder: Any) -> Any:
    return {"loss": recorder.learn.loss} if recorder.training else {}, None, ""  # each fit begins to count again


def _fastai_epoch(recorder: Any) -> Any:
    return dict(zip(recorder.metric_names[1:], recorder.log[1:])), None, ""


_CONNECTOR = "trainer.connectors.logger_connector.logger_connector"
_WRITER = [("SummaryWriter", "add_scalar", _scalar), ("SummaryWriter", "add_scalars", _scalars)]
_LIGHTNING = [("_LoggerConnector", "log_metrics", _lightning)]  # private; of Lightning 2.4 to 2.6
_FABRIC = [("Fabric", "log_dict", lambda _, metrics, step=None: (metrics, step, ""))]
_METHODS: dict[str, list[tuple[str, str, _Read]]] = {
    "torch.utils.tensorboard.writer": _WRITER,
    "tensorboardX.writer": _WRITER,
    "wandb.sdk.wandb_run": [("Run", "log", _wandb)],
    "mlflow": [("", "log_metric", _mlflow_one), ("", "log_metrics", _mlflow)],
    "accelerate.accelerator": [("Accelerator", "log", lambda _, values, step=None, *__, **___: (values, step, ""))],
    f"pytorch_lightning.{_CONNECTOR}": _LIGHTNING,
    f"lightning.pytorch.{_CONNECTOR}": _LIGHTNING,
    "lightning_fabric.fabric": _FABRIC,
    "lightning.fabric.fabric": _FABRIC,
    "transformers.trainer": [("Trainer", "log", _transformers)],
    "keras.src.callbacks.callback_list": [
        ("CallbackList", "on_epoch_end", lambda _, epoch, logs=None: (logs or {}, epoch, ""))
    ],
    "fastai.learner": [("Recorder", "after_batch", _fastai_batch), ("Recorder", "after_epoch", _fastai_epoch)],
}
