"""The libraries whose logging is heard: one table, and how to read each method's arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from nbddp.listening.after_import import after_import
from nbddp.listening.curves import Curves, Logged


class _Method(NamedTuple):
    owner: str  # a class; "" for a function of the module
    name: str
    read: Callable[..., Logged]


def listen_to_libraries(curves: Curves) -> None:
    """Hear what these libraries log in this process, from the import of each on."""

    def patch(module: ModuleType) -> None:
        library = module.__name__.partition(".")[0].replace("torch", "tensorboard")
        try:
            for method in _METHODS[module.__name__]:
                owner = getattr(module, method.owner) if method.owner else module
                curves.listen_to(owner, method.name, library, method.read)
        except AttributeError as error:  # a version without this method
            curves.give_up(library, error)

    after_import(_METHODS, patch)


# ---------------------------------------------------------------------------- TensorBoard's writers


def _add_scalar(writer: Any, tag: str, scalar_value: Any, global_step: Any = None, *args: Any, **kwargs: Any) -> Logged:
    return Logged({tag: scalar_value}, global_step, *_folder(writer))


def _add_scalars(
    writer: Any, main_tag: str, tag_scalar_dict: Mapping[str, Any], global_step: Any = None, *args: Any, **kwargs: Any
) -> Logged:
    values = {f"{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()}
    return Logged(values, global_step, *_folder(writer))


def _folder(writer: Any) -> tuple[str, str]:
    folder = str(getattr(writer, "log_dir", None) or getattr(writer, "logdir", ""))  # torch's, tensorboardX's
    return folder, os.path.basename(folder.rstrip("/"))


_WRITER = (_Method("SummaryWriter", "add_scalar", _add_scalar), _Method("SummaryWriter", "add_scalars", _add_scalars))


# ---------------------------------------------------------------------------- W&B


def _wandb_log(run: Any, data: Mapping[str, Any], step: Any = None, *args: Any, **kwargs: Any) -> Logged:
    if step is None:
        # W&B 0.31, and 0.19 to 0.22. Run.step has become a question to W&B's own process, which may take long.
        step = getattr(run, "_local_step", getattr(run, "_step", None))
    return Logged(data, step, run.id, run.name or run.id)


# ---------------------------------------------------------------------------- MLflow


def _mlflow_metric(key: str, value: Any, step: Any = None, *args: Any, **kwargs: Any) -> Logged:
    return _mlflow_metrics({key: value}, step)


def _mlflow_metrics(metrics: Mapping[str, Any], step: Any = None, *args: Any, **kwargs: Any) -> Logged:
    """MLflow takes numbers as text, too, and its tutorial passes some."""
    return Logged({name: float(value) if isinstance(value, str) else value for name, value in metrics.items()}, step)


# ---------------------------------------------------------------------------- trainers


def _accelerator_log(
    accelerator: Any, values: Mapping[str, Any], step: Any = None, *args: Any, **kwargs: Any
) -> Logged:
    return Logged(values, step)


def _lightning_log(connector: Any, metrics: Mapping[str, Any], step: Any = None) -> Logged:
    """What ``self.log`` has collected, also without a logger; ``_LoggerConnector`` is Lightning's own, 2.4 to 2.6."""
    if step is None:
        step = metrics.get("step", connector.trainer.fit_loop.epoch_loop._batches_that_stepped)  # as Lightning does
    return Logged({name: value for name, value in metrics.items() if name != "step"}, step)


def _fabric_log(fabric: Any, metrics: Mapping[str, Any], step: Any = None) -> Logged:
    return Logged(metrics, step)


_NO_CURVES = ("_runtime", "_per_second", "total_flos")  # of transformers' Trainer: one number, about the whole run


def _trainer_log(trainer: Any, logs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Logged:
    curves = {name: value for name, value in logs.items() if not name.endswith(_NO_CURVES)}
    return Logged(curves, trainer.state.global_step, passed_on=logs)


def _fastai_batch(recorder: Any) -> Logged:
    """Without a step, since fastai begins to count again with every fit."""
    return Logged({"loss": recorder.learn.loss.detach()} if recorder.training else {})


def _fastai_epoch(recorder: Any) -> Logged:
    return Logged(dict(zip(recorder.metric_names[1:], recorder.log[1:])))


def _keras_epoch(callbacks: Any, epoch: Any, logs: Mapping[str, Any] | None = None) -> Logged:
    return Logged(logs or {}, epoch, passed_on=logs or {})


_LIGHTNING = "trainer.connectors.logger_connector.logger_connector"
_LOG_METRICS = (_Method("_LoggerConnector", "log_metrics", _lightning_log),)
_LOG_DICT = (_Method("Fabric", "log_dict", _fabric_log),)

# By module; a module that is not installed costs nothing.
_METHODS = {
    "torch.utils.tensorboard.writer": _WRITER,
    "tensorboardX.writer": _WRITER,
    "wandb.sdk.wandb_run": (_Method("Run", "log", _wandb_log),),
    "mlflow": (_Method("", "log_metric", _mlflow_metric), _Method("", "log_metrics", _mlflow_metrics)),
    "accelerate.accelerator": (_Method("Accelerator", "log", _accelerator_log),),
    f"pytorch_lightning.{_LIGHTNING}": _LOG_METRICS,
    f"lightning.pytorch.{_LIGHTNING}": _LOG_METRICS,
    "lightning_fabric.fabric": _LOG_DICT,
    "lightning.fabric.fabric": _LOG_DICT,
    "transformers.trainer": (_Method("Trainer", "log", _trainer_log),),
    "fastai.learner": (
        _Method("Recorder", "after_batch", _fastai_batch),
        _Method("Recorder", "after_epoch", _fastai_epoch),
    ),
    "keras.src.callbacks.callback_list": (_Method("CallbackList", "on_epoch_end", _keras_epoch),),
}
