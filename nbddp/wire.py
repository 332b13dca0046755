"""Defines every message between the notebook kernel and the workers.

    kernel ── Job, Leave ──────────────────────▶ worker      one duplex channel per rank
    kernel ◀── Ready, Finished, ... ────────────── worker
    kernel ── NextCall, Regroup ───────────────▶ worker      only to ranks that stay: of a session
    kernel ── Answer, Look, HoldTimeouts ──────▶ worker      the debugger
    kernel ◀── Asks, GoesOn ────────────────────── worker
    kernel ◀── records of metrics and images ──── worker      one pipe per rank, never blocks the rank
    kernel ◀── "called", then the result ────────── worker      one block per rank and call
    kernel ◀── bytes of stdout and stderr ─────── worker      one unlinked file per rank

A message holds only numbers, strings and bytes. Large data and the user's objects are passed in a block of memory that
both sides map (``payload``).
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Union

from nbddp.process_state import ProcessState


@dataclass(frozen=True)
class Job:
    """Kernel to worker: the rank's identity and its settings. The first message on the channel."""

    run_name: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: str  # "cpu", "cuda", ...
    device_index: int  # among the devices that the ranks see: local_rank, unless ranks share a device
    backend: str | None  # None: nbddp makes no process group
    store_host: str
    store_port: int
    store_prefix: str  # "": the store is a launcher's, found by env://
    pg_timeout_s: float | None
    seed: int | None
    deterministic: bool
    threads: int
    environ: dict[str, str]
    process_state: ProcessState | None  # the notebook's; None: keep the process's own
    sys_path: list[str]
    cwd: str
    temp_dir: str  # for multiprocessing's sockets in this rank and its children, removed after the run; "": default
    argv: list[str]
    payload_nbytes: int
    pass_rank: bool  # torch.multiprocessing.spawn's calling convention: fn(rank, *args)
    restart_count: int
    copy: str = ""  # the folder of the nbddp that the rank must import (versions.package_folder()); "": any
    mark: str = ""  # of this attempt, a part of the names of files that its processes make; see leftovers
    stays: bool = False  # the rank waits for more calls after its report: a session's
    group: int = 0  # of a rank that stays: the number of the process group that it joins, which failures raise
    by_value: tuple[int, ...] = ()  # of a rank that stays: the numbers of the functions and classes in the payload
    attended: bool = False  # somebody can answer the debugger
    post_mortem: bool = False  # an exception of the user's code opens the debugger
    lost_snapshots: tuple[tuple[str, str, int], ...] = ()  # path, host, last step; see context.lost_snapshots
    listen: bool = True  # log what the user's code logs with TensorBoard, W&B and others


@dataclass(frozen=True)
class Leave:
    """Kernel to worker: every rank has reported, and the worker may exit."""


@dataclass(frozen=True)
class NextCall:
    """Kernel to worker: one more call. Its metrics, output, payload and result go through ends that came before."""

    run_name: str
    payload_nbytes: int
    by_value: tuple[int, ...]
    attended: bool
    post_mortem: bool


@dataclass(frozen=True)
class Regroup:
    """Kernel to worker: leave the process group, which a failure broke, and join the next one with all ranks."""

    number: int  # of the group: 0 is the first


@dataclass(frozen=True)
class Regrouped:
    """Worker to kernel: this rank is in the new group."""

    void: tuple[str, ...]  # names in __main__ of groups and meshes that the user made, which no longer work
    models: dict[str, int]  # a number for each DDP model; it differs between ranks if the models do
    error: str = ""


@dataclass(frozen=True)
class Ready:
    """Worker to kernel: the device and the process group are ready, and the user's code comes next."""

    copy: str = ""  # the folder of the nbddp that the rank has imported; "" from version 0.1


@dataclass(frozen=True)
class Finished:
    """Worker to kernel: the function returned; its value is in the rank's result block."""

    nbytes: int  # 0: the value is None, the most frequent one
    at: float  # time.monotonic(), one clock for all processes of a machine
    met: bool | None = None  # the rank took part in a collective; None: it was in no group of several ranks
    lost: str = ""  # why the value is incomplete: parts of it do not pickle
    lost_path: tuple[str, ...] = ()  # how the user's names reach the first of these parts
    in_group: bool = True  # the rank still has a default process group
    held: tuple[tuple[str, str], ...] = ()  # of rank 0 of a session: its largest names, each with a description


@dataclass(frozen=True)
class Failed:
    """Worker to kernel: an exception ended this rank; it is pickled in the rank's result block."""

    nbytes: int
    at: float
    phase: str  # "setup", "unpack", "call" or "pack"
    summary: str  # "ValueError: boom", in case the block cannot be read
    names: tuple[tuple[str, str], ...] = ()  # on the failing line of the user's code, each with a description


@dataclass(frozen=True)
class Raised(Failed):
    """Worker to kernel: as ``Failed``, sent before the rank pickles the exception itself, which may never finish.

    Until then the result block holds a substitute with the exception's name, text and frames.
    """


@dataclass(frozen=True)
class Unfit:
    """Worker to kernel: this rank cannot be forked from its fork server, but from a new one, or it can be spawned."""

    at: float
    preloaded: str = ""  # the problem with a preloaded module; "" if the cause is another
    outdated: tuple[str, ...] = ()  # settings read at a process's start that differ between the server and the run
    nbytes: int = 0


@dataclass(frozen=True)
class Exited:
    """Worker to kernel: the user's code called ``sys.exit`` with a value that does not mean success."""

    code: int
    text: str
    at: float


@dataclass(frozen=True)
class Asks:
    """Worker to kernel: this rank has stopped in the debugger and waits for an ``Answer``.

    Attributes:
        text: what the debugger has printed since the last answer.
        prompt: "(Pdb) ", or another one of pdb's.
        file, line, function: where the rank is.
        error: the type and text of the exception that stopped the rank; "" at a breakpoint.
    """

    text: str
    prompt: str
    file: str
    line: int
    function: str
    error: str = ""


@dataclass(frozen=True)
class GoesOn:
    """Worker to kernel: this rank has left the debugger."""

    text: str  # what the debugger has printed since the last answer


@dataclass(frozen=True)
class Answer:
    """Kernel to worker: the line that was typed at the prompt, or None: nobody can answer in this call."""

    line: str | None


@dataclass(frozen=True)
class Look:
    """Kernel to worker: stop in the debugger, where you are. A signal (``debugger.SIGNAL``) tells of this message."""


@dataclass(frozen=True)
class HoldTimeouts:
    """Kernel to worker: another rank has stopped in the debugger; collectives wait for an hour. Sent as ``Look``."""


Report = Union[Finished, Failed, Unfit, Exited]  # a rank's last message
REPORTS = (Finished, Failed, Unfit, Exited)
Message = Union[
    Job,
    Leave,
    NextCall,
    Regroup,
    Regrouped,
    Ready,
    Finished,
    Failed,
    Raised,
    Unfit,
    Exited,
    Asks,
    GoesOn,
    Answer,
    Look,
    HoldTimeouts,
]


LENGTH = struct.Struct("!i")  # before each message, as multiprocessing's Connection writes it (Python 3.8 to 3.14)


def encode(message: Message) -> bytes:
    """A message as bytes for ``Connection.send_bytes``."""
    return pickle.dumps(message, protocol=5)


def decode(data: bytes) -> Message:
    """The reverse of :func:`encode`. Only for bytes from a worker's inherited, private channel: they are unpickled."""
    message: Message = pickle.loads(data)
    return message


# A metric value is one record of fixed size on the rank's metrics pipe. A write of up to PIPE_BUF bytes is
# atomic (POSIX), so records are never torn, need no lock and survive a SIGKILL of the rank.
#   kind, reduce op, name id, 1 when log() counted the step, weight, step, value, time (unix seconds)
RECORD = struct.Struct("<BBHB3xdqdd")

KIND_NAME = 0  # 36 bytes of the id's name in place of the numbers; see NAME_PIECE
KIND_METRIC = 1
KIND_PROGRESS = 2  # step: total (-1 unknown), value: done, weight: nesting level
KIND_SAMPLES = 3  # value: samples that this rank's loader has yielded so far

KIND_SAVED = 5  # save_snapshot has written the file of this name; step: the last step (-1 none). Only in a pipe

KIND_SHOWN = 6  # a piece of what show() sends: whether more pieces follow, and SHOWN_PIECE_BYTES. Only in a pipe
SHOWN_PIECE_BYTES = 38

KIND_BEGIN = 4  # only in a metrics file: the records of a rank's new process begin here; see BEGIN

NAME_PIECE_BYTES = 36
NAME_PIECE = struct.Struct(f"<BBH{NAME_PIECE_BYTES}s")  # kind, 1 when more pieces follow, id, utf-8 piece

BEGIN = struct.Struct("<B7sQQd8x")  # kind, BEGIN_MARK, world size, rank, time (unix seconds)
BEGIN_MARK = b"nbddp-2"  # changes with RECORD
BEGIN_MARK_OF_ANY = b"nbddp-"

REDUCE_NONE, REDUCE_MEAN, REDUCE_SUM, REDUCE_MIN, REDUCE_MAX = range(5)
REDUCE_OPS = {None: REDUCE_NONE, "mean": REDUCE_MEAN, "sum": REDUCE_SUM, "min": REDUCE_MIN, "max": REDUCE_MAX}
REDUCE_NAMES = {op: name for name, op in REDUCE_OPS.items()}
