"""Objects of other libraries that know one process: refused, or sent without what they know of it."""

import pickle
import sys
import weakref
from typing import Any

import torch.distributed as dist

_MADE = "made in the notebook is tied to its process; create it inside the function"
_ONE_PROCESS = (
    "in the notebook and is tied to its process; send what you passed to {0}(), and call {0}() inside the function"
)
_PREPARED = f"comes from accelerator.prepare() {_ONE_PROCESS.format('prepare')}"
_SET_UP = f"comes from fabric.setup() {_ONE_PROCESS.format('setup')}"
_IN_A_MODULE = "exists only in this process; define it in a module, and import it from there inside the function"
_WRAPPERS = "lightning_fabric.wrappers lightning.fabric.wrappers"
_DEVICES = "distributed_state _setup_devices __cached__setup_devices _n_gpu"
_TRAINERS = "pytorch_lightning.trainer.trainer lightning.pytorch.trainer.trainer transformers.trainer"
_COMPILED = "is compiled code, which can't be pickled: pass the plain"
_SHARED = "is shared only with processes that multiprocessing starts; return each rank's count, and add them up"
_INHERITED = "works only in processes that multiprocessing starts; return values, and wait with nbddp.barrier()"
_OPEN = "is open in this process; send the file's path, and open it inside the function"
_SHARD = (
    "has only this rank's share: on all ranks, call get_model_state_dict() or get_optimizer_state_dict() of "
    "torch.distributed.checkpoint.state_dict with StateDictOptions(full_state_dict=True), and use what that returns"
)
_IN_MEMORY = (
    "has its trials in the notebook's memory: call trial.suggest_...() in the notebook and send the values, or give "
    "the study storage='sqlite:///study.db'"
)
_WRITER = "writes in this process; pass it to nbddp.run(log_to=...), or create it inside the function"
_REFUSED = (  # modules, classes, why: the rest of a sentence that begins with "a Widget"
    ("IPython.core.interactiveshell", "InteractiveShell", "is the notebook itself; leave it out"),
    ("ipywidgets", "Widget", "lives in the notebook's front end; log() values and update it in the notebook"),
    ("torch", "Stream Event", "belongs to one device of this process; create it inside the function"),
    ("torch._library.custom_ops", "CustomOpDef", _IN_A_MODULE),
    ("torch.jit", "ScriptFunction", f"{_COMPILED} function and script or trace it inside the function"),
    ("torch.jit", "ScriptModule", f"{_COMPILED} module and script or trace it inside the function"),
    ("multiprocessing.sharedctypes", "SynchronizedBase", _SHARED),
    ("multiprocessing.synchronize multiprocessing.queues", "SemLock Condition Event Queue SimpleQueue", _INHERITED),
    ("mmap", "mmap", "is a mapping of this process; send the file's path, and map it inside the function"),
    ("optuna.storages", "InMemoryStorage", _IN_MEMORY),
    ("lmdb", "Environment Transaction", f"{_OPEN}: lmdb.open(path, readonly=True, lock=False)"),
    ("safetensors", "safe_open", f"{_OPEN}: safe_open(path, 'pt'), or send load_file(path)"),
    ("h5py", "HLObject", f"{_OPEN}: h5py.File(path)"),
    ("sqlite3", "Connection Cursor", f"{_OPEN}: sqlite3.connect(path)"),
    ("duckdb", "DuckDBPyConnection DuckDBPyRelation", f"{_OPEN}: duckdb.connect(path)"),
    ("torch.utils.tensorboard.writer tensorboardX.writer", "SummaryWriter", _WRITER),
    ("rich.console", "Console", f"{_MADE}: console = Console()"),
    ("rich.progress", "Progress", f"{_MADE}, or use nbddp.progress()"),
    ("accelerate.accelerator", "Accelerator", f"{_MADE}: accelerator = Accelerator()"),
    ("accelerate.state", "PartialState AcceleratorState GradientState", _MADE),
    ("accelerate.optimizer accelerate.scheduler", "AcceleratedOptimizer AcceleratedScheduler", _PREPARED),
    ("accelerate.data_loader", "DataLoaderShard DataLoaderDispatcher", _PREPARED),
    ("lightning_fabric.fabric lightning.fabric.fabric", "Fabric", f"{_MADE}: fabric = Fabric()"),
    (_WRAPPERS, "_FabricModule _FabricOptimizer _FabricDataLoader", _SET_UP),
    (_TRAINERS, "Trainer", f"{_MADE}: trainer = Trainer(...)"),
)
_REFUSED_BACK = (
    ("torch.distributed.tensor", "DTensor", _SHARD),
    ("torch.distributed.fsdp", "FSDPModule FullyShardedDataParallel", _SHARD),
)
# What these remember of the notebook's process: its devices, its trainer, that they are prepared.
_FORGETTING = (
    ("transformers.training_args", "TrainingArguments", _DEVICES),
    ("pytorch_lightning.core.datamodule lightning.pytorch.core.datamodule", "LightningDataModule", "trainer"),
    ("torch.nn", "Module", "_is_accelerate_prepared"),
)


def reduced(obj: Any, *, back: bool) -> Any:
    """Return what an object of a library is reduced to, or NotImplemented. Raises TypeError if it's refused."""
    kind, known = type(obj), _known[back]
    if kind not in known:
        known[kind] = _first(kind, _REFUSED_BACK if back else _REFUSED), _first(kind, _FORGETTING).split()
    why, names = known[kind]
    if why and not (back and dist.is_initialized() and dist.get_world_size() == 1):  # a share that is the whole
        raise TypeError(f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__} {why}")
    if back or not names or not vars(obj).keys() & names:
        return NotImplemented
    function, args, state, *rest = obj.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    state = {name: value for name, value in state.items() if name not in names} | dict.fromkeys({"trainer"} & {*names})
    if "_setup_devices" in names:  # a rank detects its own device, as under torchrun
        return function, args, state, *(rest or (None, None)), _set_and_detect
    return function, args, state, *rest


_Known = weakref.WeakKeyDictionary[type, tuple[str, list[str]]]
_known = _Known(), _Known()  # of what is sent to a rank, and back


def _first(kind: type, table: tuple[tuple[str, str, str], ...]) -> str:
    """Return the entry of this class, or one of its bases, else "". A library that isn't imported has no instances.

    A subclass of what is open may know how to open it again.
    """
    for modules, names, entry in table:
        imported = [sys.modules.get(module) for module in modules.split()]  # None also where somebody forbids it
        known = [getattr(module, name, None) for module in imported for name in names.split()]
        bases = [each for each in known if isinstance(each, type) and issubclass(kind, each)]
        own = [name for each in kind.__mro__[: kind.__mro__.index(bases[0])] for name in vars(each)] if bases else []
        if bases and not (entry.startswith(_OPEN) and {"__reduce__", "__reduce_ex__", "__getstate__"} & {*own}):
            return entry
    return ""


def _set_and_detect(args: Any, state: dict[str, Any]) -> None:
    vars(args).update(state)
    _ = args._setup_devices
