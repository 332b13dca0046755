"""Worker side. ``log`` and ``progress``: numbers to the notebook that never wait, for it or for the GPU.

A value is one 40-byte record in a pipe (``wire.RECORD``), written without blocking: it survives a
SIGKILL of this rank and needs no collective. What does not leave at once (calls within 2 ms share a
write; the pipe is full because the notebook is busy) waits in a deque that a helper thread empties.
A tensor on an accelerator is copied asynchronously into pinned memory and read when its event is done;
what is logged after it waits for it, since the notebook counts values in the order in which they come.
"""

from __future__ import annotations

import collections
import errno
import itertools
import math
import operator
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple, TypeVar, Union

from nbddp import wire
from nbddp.errors import short

T = TypeVar("T")

_BATCH_S = 0.002  # records younger than this may wait for the next call, to share its write
_POLL_S = 0.1  # how often the thread looks at device copies and a full pipe; each look takes the GIL from the training
_PROGRESS_EVERY_S = 0.1
_DESC_CHARS = 120  # of what an item of a loop is; it is sent with every report of a new name, and shown in a line
_MOST_AT_ONCE = 256  # calls of log() whose records are joined
_MAX_WRITE = select.PIPE_BUF // wire.RECORD.size * wire.RECORD.size
_MOST_NAMES = 1 << 16  # that a record's id can tell apart
_FIRST_STEP, _LAST_STEP = -(2**63), 2**63 - 1  # that a record can hold
_ONE = 1
_MOST_WEIGHT = 2**53  # of integers that are the same as a float

_Number = Union[float, "tuple[Any, Any]"]  # a tuple: an event, and the pinned memory that holds the number after it
_Logged = tuple[dict[str, _Number], Union[int, None], int, float, float]  # metrics, step, op, weight, time


class _Waiting(NamedTuple):
    """One call of ``log()`` with numbers that are still on a device, or behind one that has such numbers."""

    numbers: list[tuple[tuple[int, int, bool, float, int], _Number]]  # each with its record's first fields
    at: float

    def is_here(self) -> bool:
        return all(isinstance(number, float) or number[0].query() for _, number in self.numbers)

    def wait(self) -> None:
        for _, number in self.numbers:
            if not isinstance(number, float):
                number[0].synchronize()

    def records(self) -> bytes:
        return b"".join(
            _PACK(_METRIC, *fields, number if isinstance(number, float) else number[1].item(), self.at)
            for fields, number in self.numbers
        )


class MetricsPipe:
    """This rank's end of its metrics pipe.

    Any thread may log: all it does is append to a deque, which is atomic. One thread at a time counts the steps of
    what is there, in that order, and moves it into the pipe: the one that logs, or the helper, which starts with the
    first record that waits.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._ids: dict[str, int] = {}
        self._next_id = itertools.count()
        self._logged: collections.deque[_Logged | bytes] = collections.deque()  # bytes: whole records
        self._moved_at = 0.0
        self._helper: threading.Thread | None = None
        self._lock = threading.RLock()  # of all below
        self._moves = False  # this thread, and a signal handler logs something
        self._steps: dict[str, int] = {}
        self._step = 0
        self._resumed_after: int | None = None  # a step of the process that wrote the snapshot
        self._on_device: collections.deque[_Waiting] = collections.deque()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._batch, self._written = b"", 0  # so many bytes of it are in the pipe

    def log(self, metrics: dict[str, Any], step: int | None, op: int, weight: float) -> None:
        """
        Args:
            metrics: is kept, and changed.
        """
        ids = self._ids
        for name, value in metrics.items():  # all of them before anything else: what is refused leaves no trace
            if type(value) is not float:
                metrics[name] = self._number(name, value)
            if name not in ids:
                self._define(name)
        now = _time()
        self._logged.append((metrics, step, op, weight, now))
        if now - self._moved_at > _BATCH_S:
            self._move(now)
        elif self._helper is None:
            self._help()

    def record(self, kind: int, name: str, step: int, value: float, weight: float = 0.0) -> None:
        """One record of another kind, sent at once."""
        now = _time()
        if name not in self._ids:
            self._define(name)
        self._logged.append(_PACK(kind, 0, self._ids[name], False, weight, step, value, now))
        self._move(now)

    def last_step(self) -> int | None:
        """The step logged last, by this process or by the one whose snapshot it resumed; None before the first."""
        with self._lock:
            self._count_steps()
            return self._step if self._steps else self._resumed_after

    def last_steps(self) -> dict[str, int]:
        """Of each metric, the step at which it was logged last."""
        with self._lock:
            self._count_steps()
            return dict(self._steps)

    def resume_after(self, step: int, steps: Mapping[str, int] | None = None) -> None:
        """Count on from this step, unless there are later ones already.

        Args:
            steps: ``last_steps`` at that time; without them, every metric counts as logged at this step.
        """
        with self._lock:
            last = self.last_step()
            if last is None or step > last:
                self._step = step
                self._steps = dict(steps or {})
                self._resumed_after = None if steps else step

    def flush(self) -> None:
        """Return when everything logged so far is in the pipe; waits for copies from the device."""
        self._move(_time())
        while self._waits():
            if self._on_device:
                self._on_device[0].wait()
            select.select([], [self._fd], [])
            self._move(_time())

    def _number(self, name: str, value: Any) -> _Number:
        """The value as a float, or on its way from a device."""
        on_cpu = getattr(value, "is_cpu", None)  # None: no tensor
        if on_cpu is False and value.numel() == 1:
            return _fetch(value.detach())
        try:
            if on_cpu is not None:
                return float(value.item())
            if isinstance(value, (str, bytes)):  # float() would take "3"
                raise TypeError
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise _refusal(name, value) or error from None

    def _define(self, name: str) -> None:
        ident = next(self._next_id)
        if ident >= _MOST_NAMES:
            raise ValueError("more than 65,536 metric names; is a name made from a step or a sample?")
        text = name.encode("utf-8", "replace")
        size = wire.NAME_PIECE_BYTES
        pieces = [text[i : i + size] for i in range(0, len(text), size)] or [b""]
        more = [1] * (len(pieces) - 1) + [0]
        self._logged.append(
            b"".join(wire.NAME_PIECE.pack(wire.KIND_NAME, m, ident, piece) for m, piece in zip(more, pieces))
        )
        self._ids.setdefault(name, ident)  # of two threads at once, the first one's counts

    # ------------------------------------------------------------------ on one thread at a time

    def _move(self, now: float) -> None:
        """Move what was logged into the pipe, as far as it goes."""
        self._moved_at = now
        if self._lock.acquire(blocking=False):  # else another thread is at it
            try:
                self._count_steps()
                self._write_unsent()
            finally:
                self._lock.release()
        if self._helper is None and self._waits():
            self._help()

    def _count_steps(self) -> None:
        if self._moves:
            return
        self._moves = True
        try:
            while self._logged:
                self._unsent.append(self._records(self._logged.popleft()))
            while self._on_device and self._on_device[0].is_here():
                self._unsent.append(self._on_device.popleft().records())
        finally:
            self._moves = False

    def _records(self, logged: _Logged | bytes) -> bytes:
        """Empty where a number is still on a device, or behind one that is."""
        if isinstance(logged, bytes):
            return logged
        metrics, step, op, weight, at = logged
        ids, steps, counted = self._ids, self._steps, step is None
        if step is None:
            step, resumed_after = self._step, self._resumed_after
            for name in metrics:
                if steps.get(name, resumed_after) == step:  # a metric comes a second time: a new step begins
                    step += step != _LAST_STEP
                    break
        self._step = step
        records = b""
        for name, value in metrics.items():
            steps[name] = step
            if type(value) is float:
                records += _PACK(_METRIC, op, ids[name], counted, weight, step, value, at)
        if not self._on_device and len(records) == len(metrics) * _SIZE:
            return records
        fields = [(op, ids[name], counted, weight, step) for name in metrics]
        self._on_device.append(_Waiting(list(zip(fields, metrics.values())), at))
        return b""

    def _write_unsent(self) -> None:
        """A record is written once and whole."""
        try:
            while self._next_batch():
                self._put(self._batch[self._written : self._written + _MAX_WRITE])
                self._written += _MAX_WRITE
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the notebook reads no more
            self._unsent.clear()
            self._batch = b""

    def _next_batch(self) -> bytes:
        """What is being written, or some more of what waits; empty when nothing does."""
        if self._written >= len(self._batch):
            take = self._unsent.popleft
            self._batch = b"".join([take() for _ in range(min(len(self._unsent), _MOST_AT_ONCE))])
            self._written = 0
        return self._batch

    def _waits(self) -> bool:
        return bool(self._logged or self._on_device or self._unsent or self._written < len(self._batch))

    def _put(self, records: bytes) -> None:
        os.write(self._fd, records)

    def _help(self) -> None:
        with self._lock:
            if self._helper is None:
                self._helper = threading.Thread(target=self._keep_moving, name="nbddp-metrics", daemon=True)
                self._helper.start()

    def _keep_moving(self) -> None:
        while True:
            time.sleep(_POLL_S)
            self._move(_time())


class MetricsFile(MetricsPipe):
    """The same into a file, for a job that no notebook watches; a record is there as soon as a pipe would have it."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._failed = False

    def _put(self, records: bytes) -> None:
        if self._failed:
            raise BrokenPipeError
        try:
            written = os.write(self._fd, records)
            if written < len(records):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # a full disk ends the curves; it does not end a training
            self._failed = True
            print(f"nbddp: nothing more goes into the file of metrics: {error}", file=sys.stderr)
            raise BrokenPipeError from error


def _fetch(tensor: Any) -> tuple[Any, Any]:
    import torch

    wide = torch.float32 if tensor.device.type == "mps" else torch.float64  # MPS has no float64
    pinned = torch.empty((), dtype=wide, pin_memory=True)
    # The conversion runs on the device, in order; the copy to pinned memory does not wait.
    pinned.copy_(tensor.reshape(()).to(wide), non_blocking=True)
    event = torch.Event(tensor.device)
    event.record()
    return event, pinned


_PACK = wire.RECORD.pack
_SIZE = wire.RECORD.size
_METRIC = wire.KIND_METRIC
_time = time.time
_OPS = wire.REDUCE_OPS
_pipe: MetricsPipe | None = None
_open_bars = 0


def log(
    values: Mapping[str, Any] | None = None,
    /,
    *,
    step: int | None = None,
    reduce: str | None = None,
    weight: float = 1,
    **metrics: Any,
) -> None:
    """Send metrics to the notebook: ``log(loss=loss, acc=acc)``, ``log({"val/loss": v})``.

    Never waits: not for the GPU (device tensors are copied asynchronously), not for the other ranks
    (no collective), not for the notebook. Outside a run it checks its arguments and does nothing else.

    Args:
        values: metrics whose names are no Python names, e.g. ``"val/loss"``.
        step: the x of these points, a whole number. Default: counted for you; a metric logged a second time
            begins a new step, so a ``val/acc`` logged after the 100th ``loss`` stands at that ``loss``'s step.
            After ``load_snapshot`` it goes on from where the snapshot was saved.
        reduce: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"`` over all ranks, combined in the notebook once
            every rank has logged it. Without ``step=``, the n-th value of a metric on one rank is combined with the
            n-th on the others, whatever else they log; with ``step=``, values of the same step are. Pass ``step=``
            where some ranks log a metric less often than others. Steps that some ranks never log are among
            ``run.history.notices``: the mean, minimum or maximum is then over the others, and a sum leaves them out.
            The first ``reduce`` of a metric counts for the whole run. Default: rank 0's values are the metric's.
        weight: this rank's share in a ``"mean"``, e.g. the size of an uneven last batch; at least 0.
        **metrics: numbers, or tensors of one element, of any device. The first 1,000 names of a run are kept.

    Raises:
        TypeError: metrics without names, a value or a weight that is not a number, a step that is not a whole number,
            a name that is not a string.
        ValueError: a tensor or an array of several elements, an unknown reduce, a weight below 0 or not finite, a step
            that 64 bits cannot hold. Nothing of this call is logged then.
    """
    if values is not None:
        try:
            metrics = {**values, **metrics}
        except TypeError:
            raise TypeError(
                f"log() takes metrics by name, log(loss=0.5) or log({{'val/loss': 0.5}}), not a bare {_kind(values)}"
            ) from None
        for name in metrics:
            if type(name) is not str:
                raise TypeError(f"a metric's name is a string, not {name!r}")
    try:
        op = _OPS[reduce]
    except (KeyError, TypeError):
        raise ValueError(f"reduce is None, 'mean', 'sum', 'min' or 'max', not {reduce!r}") from None
    if step is not None and (type(step) is not int or not _FIRST_STEP <= step <= _LAST_STEP):
        step = _whole(step)
    if weight is not _ONE and (type(weight) is not int or not 0 <= weight <= _MOST_WEIGHT):
        weight = _checked_weight(weight)
    if _pipe is None:
        for name, value in metrics.items():
            _check(name, value)
        return
    _pipe.log(metrics, step, op, weight)


def progress(iterable: Iterable[T], total: int | None = None, desc: str | None = None) -> Iterator[T]:
    """Iterate, and show how far it is and how long it takes in the panel. May be nested.

    Args:
        total: how many items, where ``len(iterable)`` does not tell.
        desc: what an item is, e.g. ``"epoch"``.
    """
    global _open_bars
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    level, _open_bars = _open_bars, _open_bars + 1
    desc = str(desc or "")[:_DESC_CHARS]
    done = 0
    try:
        _report_progress(level, desc, total, done)
        shown_at = time.monotonic()
        for item in iterable:
            yield item
            done += 1
            now = time.monotonic()
            if now - shown_at >= _PROGRESS_EVERY_S:
                shown_at = now
                _report_progress(level, desc, total, done)
    finally:
        _open_bars = level
        _report_progress(level, desc, total, done)


def count_samples(total: int) -> None:
    """Tell the notebook how many samples this rank's loaders have handed out so far."""
    if _pipe is not None:
        _pipe.record(wire.KIND_SAMPLES, "samples", 0, total)


def last_step() -> int | None:
    """The step that was logged last; None before the first, and outside a run."""
    return _pipe.last_step() if _pipe is not None else None


def last_steps() -> dict[str, int]:
    """Of each metric, the step at which it was logged last; empty outside a run."""
    return _pipe.last_steps() if _pipe is not None else {}


def resume_after(step: int, steps: Mapping[str, int] | None) -> None:
    """Let the steps that ``log`` counts go on after this one; ``steps`` are the ``last_steps`` at that time."""
    if _pipe is not None:
        _pipe.resume_after(step, steps)


def flush() -> None:
    """Return when the notebook's pipe holds everything logged so far."""
    if _pipe is not None:
        _pipe.flush()


def _report_progress(level: int, desc: str, total: int | None, done: int) -> None:
    if _pipe is not None:
        _pipe.record(wire.KIND_PROGRESS, desc, -1 if total is None else int(total), done, weight=level)


def _whole(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        advice = "pass the number of batches so far, e.g. step=epoch * len(loader) + i"
        raise TypeError(f"log(step={step!r}): a step is a whole number; {advice}") from None
    if not _FIRST_STEP <= number <= _LAST_STEP:
        raise ValueError(f"log(step={step!r}): a step is a whole number that 64 bits can hold")
    return number


def _checked_weight(weight: Any) -> float:
    try:
        if isinstance(weight, (str, bytes)):  # float() would take "3"
            raise TypeError
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"log(weight={weight!r}): a weight is a number, e.g. the number of samples") from None
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise ValueError(f"log(weight={weight!r}): a weight is at least 0 and finite, e.g. the number of samples")
    return number


def _check(name: str, value: Any) -> None:
    """As in a run, without one."""
    try:
        if isinstance(value, (str, bytes)) or (hasattr(value, "numel") and value.numel() != 1):
            raise TypeError
        if not hasattr(value, "numel"):
            float(value)
    except (TypeError, ValueError) as error:
        raise _refusal(name, value) or error from None


def _refusal(name: str, value: Any) -> Exception | None:
    """Why this is not a metric's value, and what is; None of a tensor that has one element."""
    if isinstance(value, (str, bytes)):
        return TypeError(f"log({name}=...) takes a number, not the text {short(value)}")
    if hasattr(value, "numel") and value.numel() == 1:
        return None
    if getattr(value, "ndim", 0) > 0:  # a tensor, an array
        shape = tuple(value.shape)
        return ValueError(f"log({name}=...) takes one number, not a {_kind(value)} of shape {shape}; use its mean()")
    if isinstance(value, Mapping):
        return TypeError(f"log({name}=...) takes a number, not a {_kind(value)}; log({{...}}) takes a dict of metrics")
    return TypeError(f"log({name}=...) takes a number or a tensor with one element, not {_kind(value)}")


def _kind(value: Any) -> str:
    return type(value).__name__


def enter(fd: int) -> None:
    """Open this rank's metrics pipe, or file; called once, before the user's code."""
    global _pipe
    os.set_blocking(fd, False)
    _pipe = MetricsFile(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else MetricsPipe(fd)
    # A DataLoader worker is a copy of this process: its ids would mix with ours.
    os.register_at_fork(after_in_child=_leave)


def _leave() -> None:
    global _pipe
    _pipe = None
