"""Both sides. What crosses the border between kernel and workers, and nothing else.

    kernel ── Job, Leave ──────────────────────▶ worker      one duplex channel per rank
    kernel ◀── Ready, Called, Finished, ... ────── worker
    kernel ◀── metric records (RECORD) ────────── worker      one pipe per rank, never blocks the rank
    kernel ◀── bytes of stdout and stderr ─────── worker      one unlinked file per rank

Only numbers, strings and bytes travel in a message: what is large or belongs to the user travels
in a block of memory that both sides map (``payload``).
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Union

from nbddp.process_state import ProcessState


@dataclass(frozen=True)
class Job:
    """Kernel to worker: who you are and how to set yourself up. The first message on the channel."""

    run_name: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: str  # "cpu", "cuda", ...; the index is local_rank
    backend: str | None  # None: no process group of ours
    store_host: str
    store_port: int
    store_prefix: str  # "": the store is a launcher's, met by env://
    pg_timeout_s: float | None
    seed: int | None
    deterministic: bool
    threads: int
    environ: dict[str, str]
    process_state: ProcessState | None  # the notebook's; None: this process's own
    sys_path: list[str]
    cwd: str
    temp_dir: str  # for multiprocessing's sockets in this rank and its children, goes with the run; "": its own
    argv: list[str]
    payload_nbytes: int
    pass_rank: bool  # torch.multiprocessing.spawn's calling convention: fn(rank, *args)
    restart_count: int
    copy: str = ""  # of nbddp that the rank must have (copies.folder()); "": any
    mark: str = ""  # of this attempt, in the names of what its processes make; see leftovers


@dataclass(frozen=True)
class Leave:
    """Kernel to worker: every rank has reported, nothing more is expected from you."""


@dataclass(frozen=True)
class Ready:
    """Worker to kernel: device and process group are up, the user's code comes next."""

    copy: str = ""  # of nbddp that the rank has; "" from one of version 0.1


@dataclass(frozen=True)
class Called:
    """Worker to kernel: the payload is unpacked, the function begins."""


@dataclass(frozen=True)
class Finished:
    """Worker to kernel: the function returned; its value lies in the rank's result block."""

    nbytes: int
    at: float  # time.monotonic(), one clock for all processes of a machine
    met: bool | None = None  # has it taken part in a collective? None: it was in no group of several ranks
    lost: str = ""  # why the value is not whole: parts of it do not pickle
    lost_path: tuple[str, ...] = ()  # the first of them, as the user knows it


@dataclass(frozen=True)
class Failed:
    """Worker to kernel: an exception ended this rank; it lies pickled in the rank's result block."""

    nbytes: int
    at: float
    phase: str  # "setup", "unpack", "call" or "pack"; of a rank that this fork server cannot give, see worker.entry
    summary: str  # "ValueError: boom", for when the block cannot be read


@dataclass(frozen=True)
class Raised(Failed):
    """Worker to kernel: the same, from a rank that goes on to pickle the exception itself, which may take for ever.

    In its result block lies what stands for it until then: its name, text and frames.
    """


@dataclass(frozen=True)
class Exited:
    """Worker to kernel: the user's code called ``sys.exit`` with something else than success."""

    code: int
    text: str
    at: float


Message = Union[Job, Leave, Ready, Called, Finished, Failed, Raised, Exited]


def encode(message: Message) -> bytes:
    """One message as bytes for ``Connection.send_bytes``."""
    return pickle.dumps(message, protocol=5)


def decode(data: bytes) -> Message:
    """The reverse of :func:`encode`. The bytes come from an inherited, private channel of our own worker."""
    message: Message = pickle.loads(data)
    return message


# One metric value is one fixed record on the rank's metrics pipe. A write of up to PIPE_BUF bytes is
# atomic (POSIX), so records are never torn, need no lock and survive a SIGKILL of the rank.
#   kind, reduce op, name id, 1 when log() counted the step, weight, step, value, time (unix seconds)
RECORD = struct.Struct("<BBHB3xdqdd")

KIND_NAME = 0  # the id's name, 36 bytes a record in place of the numbers; see NAME_PIECE
KIND_METRIC = 1
KIND_PROGRESS = 2  # step: total (-1 unknown), value: done, weight: nesting level
KIND_SAMPLES = 3  # value: samples that this rank's loader has handed out so far

KIND_BEGIN = 4  # in a file of metrics alone: a rank begins here, in a process of its own; see BEGIN

NAME_PIECE_BYTES = 36
NAME_PIECE = struct.Struct(f"<BBH{NAME_PIECE_BYTES}s")  # kind, 1 when more pieces follow, id, utf-8 piece

BEGIN = struct.Struct("<B7sQQd8x")  # kind, BEGIN_MARK, world size, rank, time (unix seconds)
BEGIN_MARK = b"nbddp-2"  # changes with RECORD
BEGIN_MARK_OF_ANY = b"nbddp-"

REDUCE_NONE, REDUCE_MEAN, REDUCE_SUM, REDUCE_MIN, REDUCE_MAX = range(5)
REDUCE_OPS = {None: REDUCE_NONE, "mean": REDUCE_MEAN, "sum": REDUCE_SUM, "min": REDUCE_MIN, "max": REDUCE_MAX}
REDUCE_NAMES = {op: name for name, op in REDUCE_OPS.items()}


def fold(text: str) -> str:
    """The text as a terminal would leave it: of a line rewritten with carriage returns, the last state."""
    if "\r" not in text:
        return text
    return "\n".join(_folded_line(line) for line in text.split("\n"))


def _folded_line(line: str) -> str:
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def metrics_path(path: str, rank: int) -> str:
    """Where that rank of a job writes its metrics: each has a file of its own, whatever their hosts share."""
    return path if rank == 0 else f"{path}.rank{rank}"
