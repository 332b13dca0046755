"""The table of other libraries' classes that are refused, or that pickle in a special way.

A library is never imported for this: its classes are looked up only if the module is already in ``sys.modules``.
"""

from __future__ import annotations

import functools
import pickle
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nbddp.payload import classes


@dataclass(frozen=True)
class Refusal:
    """Why a library's classes and their subclasses are refused.

    Attributes:
        module: the module that defines the classes.
        advice: the rest of an error that begins with "a Widget".
        of_one_process: whether an object works only in the process that created it, as if there were no others.
    """

    module: str
    names: tuple[str, ...]
    advice: str
    of_one_process: bool = False

    def text(self, kind: str) -> str:
        return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind} {self.advice}"


_ONE_PROCESS = "in the notebook, which knows one process; pass what was given to {}(), and call it inside the function"
_MADE = "made in the notebook knows one process; make it inside the function"
_PREPARED = f"comes from accelerator.prepare() {_ONE_PROCESS.format('prepare')}"
_SET_UP = f"comes from fabric.setup() {_ONE_PROCESS.format('setup')}"
_FABRICS = ("_FabricModule", "_FabricOptimizer", "_FabricDataLoader")
_STATES = ("PartialState", "AcceleratorState", "GradientState")
_COMPILED = "is compiled code, which does not pickle: pass the plain"
_SCRIPT_IT = "and script or trace it inside the function"

_REFUSALS = (
    Refusal("ipywidgets", ("Widget",), "lives in the notebook's front end; log() values and update it outside"),
    Refusal("IPython.core.interactiveshell", ("InteractiveShell",), "is the notebook itself; ranks have none"),
    Refusal("torch", ("Stream", "Event"), "belongs to one device of this process; make it inside the function"),
    Refusal("torch.jit", ("ScriptFunction",), f"{_COMPILED} function {_SCRIPT_IT}"),
    Refusal("torch.jit", ("ScriptModule",), f"{_COMPILED} module {_SCRIPT_IT}, or pass its state_dict()"),
    Refusal("torch.cuda", ("Stream", "Event"), "belongs to one device of this process; make it inside the function"),
    Refusal("accelerate.accelerator", ("Accelerator",), f"{_MADE}: accelerator = Accelerator()", True),
    Refusal("accelerate.state", _STATES, _MADE, True),
    Refusal("accelerate.optimizer", ("AcceleratedOptimizer",), _PREPARED, True),
    Refusal("accelerate.scheduler", ("AcceleratedScheduler",), _PREPARED, True),
    Refusal("accelerate.data_loader", ("DataLoaderShard", "DataLoaderDispatcher"), _PREPARED, True),
    Refusal("lightning_fabric.fabric", ("Fabric",), f"{_MADE}: fabric = Fabric()", True),
    Refusal("lightning_fabric.wrappers", _FABRICS, _SET_UP, True),
    Refusal("lightning.fabric.fabric", ("Fabric",), f"{_MADE}: fabric = Fabric()", True),
    Refusal("lightning.fabric.wrappers", _FABRICS, _SET_UP, True),
    Refusal("pytorch_lightning.trainer.trainer", ("Trainer",), f"{_MADE}: trainer = Trainer(...)", True),
    Refusal("lightning.pytorch.trainer.trainer", ("Trainer",), f"{_MADE}: trainer = Trainer(...)", True),
    Refusal("transformers.trainer", ("Trainer",), f"{_MADE}: trainer = Trainer(...)", True),
)


def _cached_by_type(find: Callable[[type], Any]) -> Callable[[type], Any]:
    """Call ``find`` once for each type: a class's bases do not change, and their modules are imported already."""
    found: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()

    def cached(kind: type) -> Any:
        try:
            return found[kind]
        except KeyError:
            return found.setdefault(kind, find(kind))

    return cached


def _is_one_of(kind: type, module: str, names: Sequence[str]) -> bool:
    known = vars(sys.modules[module]) if module in sys.modules else {}
    return any(name in known and issubclass(kind, known[name]) for name in names)


@_cached_by_type
def refusal_of(kind: type) -> Refusal | None:
    """The reason why objects of this class are refused; None if they are not."""
    return next((refusal for refusal in _REFUSALS if _is_one_of(kind, refusal.module, refusal.names)), None)


@_cached_by_type
def reducer_into_ranks(kind: type) -> Callable[[Any], Any] | None:
    """The function that reduces objects of this class without the state that belongs to the notebook's process."""
    return next((reduce for module, name, reduce in _WITHOUT_STATE if _is_one_of(kind, module, (name,))), None)


@_cached_by_type
def reducer(kind: type) -> Callable[[Any], Any] | None:
    """The function that reduces objects of this class, into ranks and back; None: they pickle as usual."""
    if issubclass(kind, functools.cached_property):
        return classes.reduce_cached_property
    if classes.is_parametrized(kind):
        return classes.reduce_parametrized
    # These hold the values of pandas' frames and series. Private; of pandas 2.2 to 3.1.
    if _is_one_of(kind, "pandas._libs.internals", ("Block",)):
        return _reduce_block
    if _is_one_of(kind, "pandas.core.internals.managers", ("SingleBlockManager",)):
        return lambda manager: (kind, (manager.blocks[0], manager.axes[0]))  # its own way skips the block's reducer
    return None


def _reduce_block(block: Any) -> Any:
    """Reduce a block as if no other object had its array.

    Frames that pandas keeps apart by copy-on-write may share an array. pandas does not pickle the record of that, so
    after pickle they share it unprotected. A slice of dates, categories or strings is another object over the same
    array.
    """
    function, (values, *rest) = block.__reduce__()
    values = values[:]
    if hasattr(values, "_from_backing_data"):
        values = values._from_backing_data(values._ndarray[:])
    return function, (values, *rest)


# ---------------------------------------------------------------------------- without a process's state


# distributed_state is accelerate's; transformers 4 kept the device under the longer name.
_DETECTED_ATTRIBUTES = ("distributed_state", "_setup_devices", "__cached__setup_devices", "_n_gpu")
_PREPARED_MARK = "_is_accelerate_prepared"


def _reduce_training_arguments(args: Any) -> Any:
    """Without the device, rank and world size of this process; a rank detects its own."""
    function, new, state, *rest = _with_state(args, lambda state: _without(state, *_DETECTED_ATTRIBUTES))
    return function, new, state, *(rest or (None, None)), _set_training_arguments


def _reduce_data_module(module: Any) -> Any:
    """Without the trainer that used it last, which belongs to one process; fit() sets another."""
    return _with_state(module, lambda state: {**state, "trainer": None})


def _reduce_model(module: Any) -> Any:
    """Without the mark that would make accelerate believe that the model is in DDP already."""
    if _PREPARED_MARK not in vars(module):
        return NotImplemented
    return _with_state(module, lambda state: _without(state, _PREPARED_MARK))


def _with_state(obj: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Reduce ``obj`` as it does itself, with a changed state."""
    function, args, state, *rest = obj.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    return function, args, change(state), *rest


def _without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


_WITHOUT_STATE: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("transformers.training_args", "TrainingArguments", _reduce_training_arguments),
    ("pytorch_lightning.core.datamodule", "LightningDataModule", _reduce_data_module),
    ("lightning.pytorch.core.datamodule", "LightningDataModule", _reduce_data_module),
    ("torch.nn.modules.module", "Module", _reduce_model),
)


def _set_training_arguments(args: Any, state: dict[str, Any]) -> None:
    """Called by the stream: set the state and detect the device, which may open a process group, as under torchrun."""
    vars(args).update(state)
    _ = args._setup_devices  # transformers 4 and 5
