"""Worker side. ``log`` and ``progress``: numbers to the notebook that never wait, for it or for the GPU.

A value is one 32-byte record in a pipe (``wire.RECORD``), written without blocking: it survives a
SIGKILL of this rank and needs no collective. What does not leave at once (calls within 2 ms share a
write; the pipe is full because the notebook is busy) waits in a deque that a helper thread empties.
A tensor on an accelerator is copied asynchronously into pinned memory and read when its event is done.
"""

from __future__ import annotations

import collections
import errno
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

from nbddp import wire
from nbddp.errors import short

T = TypeVar("T")

_BATCH_S = 0.002  # records younger than this may wait for the next call, to share its write
_POLL_S = 0.1  # how often the thread looks at device copies and a full pipe; each look takes the GIL from the training
_PROGRESS_EVERY_S = 0.1
_DESC_CHARS = 120  # of what an item of a loop is; it is sent with every report of a new name, and shown in a line
_MAX_WRITE = select.PIPE_BUF // wire.RECORD.size * wire.RECORD.size


class MetricsPipe:
    """This rank's end of its metrics pipe.

    ``log`` runs on the training thread; the helper starts with the first record that waits.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._ids: dict[str, int] = {}
        self._steps: dict[str, int] = {}
        self._step = 0
        self._resumed_after: int | None = None  # a step of the process that wrote the snapshot
        self._unsent: collections.deque[bytes] = collections.deque()
        self._written_at = 0.0
        self._on_device: collections.deque[tuple[Any, Any, int, int, float, int, float]] = collections.deque()
        self._helper: threading.Thread | None = None
        self._lock = threading.Lock()

    def log(self, metrics: Mapping[str, Any], step: int | None, op: int, weight: float) -> None:
        now = time.time()
        steps = self._steps
        if step is None:
            step = self._step
            for name in metrics:
                if steps.get(name, self._resumed_after) == step:  # a metric comes a second time: a new step begins
                    self._step = step = step + 1
                    break
        else:
            self._step = step
        records = b""
        for name, value in metrics.items():
            if type(value) is not float:
                value = self._number(name, value, step, op, weight, now)
                if value is None:
                    steps[name] = step
                    continue
            ident = self._ids.get(name)
            if ident is None:
                ident = self._define(name)
            steps[name] = step
            records += _PACK(wire.KIND_METRIC, op, ident, weight, step, value, now)
        self._send(records, now)

    def record(self, kind: int, name: str, step: int, value: float, weight: float = 0.0) -> None:
        """One record of another kind, sent at once."""
        now = time.time()
        self._send(_PACK(kind, 0, self._id(name), weight, step, value, now), now, at_once=True)

    @property
    def last_step(self) -> int | None:
        """The step logged last, by this process or by the one whose snapshot it resumed; None before the first."""
        return self._step if self._steps else self._resumed_after

    def resume_after(self, step: int) -> None:
        """Count on from this step, unless there are later ones already."""
        if self.last_step is None or step > self.last_step:
            self._step = self._resumed_after = step
            self._steps.clear()

    def flush(self) -> None:
        """Return when everything logged so far is in the pipe; waits for copies from the device."""
        self._collect(wait=True)
        while self._unsent:
            select.select([], [self._fd], [])
            self._write_unsent()

    def _number(self, name: str, value: Any, step: int, op: int, weight: float, now: float) -> float | None:
        """The value as a float, or None when it is on its way from a device."""
        on_cpu = getattr(value, "is_cpu", None)  # None: no tensor
        if on_cpu is False and value.numel() == 1:
            self._fetch(value.detach(), self._id(name), step, op, weight, now)
            return None
        try:
            if on_cpu is not None:
                return float(value.item())
            if isinstance(value, (str, bytes)):  # float() would take "3"
                raise TypeError
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise _refusal(name, value) or error from None

    def _fetch(self, tensor: Any, ident: int, step: int, op: int, weight: float, now: float) -> None:
        import torch

        wide = torch.float32 if tensor.device.type == "mps" else torch.float64  # MPS has no float64
        pinned = torch.empty((), dtype=wide, pin_memory=True)
        # The conversion runs on the device, in order; the copy to pinned memory does not wait.
        pinned.copy_(tensor.reshape(()).to(wide), non_blocking=True)
        event = torch.Event(tensor.device)
        event.record()
        self._on_device.append((event, pinned, op, ident, weight, step, now))
        self._help()

    def _collect(self, *, wait: bool) -> None:
        while self._on_device:
            with self._lock:
                if not self._on_device:
                    return
                event, pinned, op, ident, weight, step, at = self._on_device[0]
                if wait:
                    event.synchronize()
                elif not event.query():
                    return
                self._on_device.popleft()
            self._send(_PACK(wire.KIND_METRIC, op, ident, weight, step, pinned.item(), at), at, at_once=True)

    def _id(self, name: str) -> int:
        ident = self._ids.get(name)
        return self._define(name) if ident is None else ident

    def _define(self, name: str) -> int:
        if type(name) is not str:
            raise TypeError(f"a metric's name is a string, not {name!r}")
        ident = len(self._ids)
        if ident > 0xFFFF:
            raise ValueError("more than 65,536 metric names; is a name made from a step or a sample?")
        text = name.encode("utf-8", "replace")
        pieces = [text[i : i + 24] for i in range(0, len(text), 24)] or [b""]
        for i, piece in enumerate(pieces):
            more = int(i + 1 < len(pieces))
            self._unsent.append(wire.NAME_PIECE.pack(wire.KIND_NAME, more, ident, piece))
        self._ids[name] = ident
        return ident

    def _send(self, records: bytes, now: float, *, at_once: bool = False) -> None:
        if records:
            self._unsent.append(records)
        if at_once or now - self._written_at > _BATCH_S:
            self._written_at = now
            self._write_unsent()
        if self._unsent:
            self._help()

    def _write_unsent(self) -> None:
        """Move what waits into the pipe, as far as it goes; a record is written once and whole."""
        if not self._lock.acquire(blocking=False):
            return  # the helper is at it
        try:
            while self._unsent:
                batch = self._unsent.popleft()
                while self._unsent and len(batch) + len(self._unsent[0]) <= _MAX_WRITE:
                    batch += self._unsent.popleft()
                try:
                    for start in range(0, len(batch), _MAX_WRITE):
                        self._put(batch[start : start + _MAX_WRITE])
                except BlockingIOError:
                    self._unsent.appendleft(batch[start:])
                    return
                except BrokenPipeError:  # the notebook reads no more
                    self._unsent.clear()
        finally:
            self._lock.release()

    def _put(self, records: bytes) -> None:
        os.write(self._fd, records)

    def _help(self) -> None:
        if self._helper is None:
            self._helper = threading.Thread(target=self._keep_moving, name="nbddp-metrics", daemon=True)
            self._helper.start()

    def _keep_moving(self) -> None:
        while True:
            time.sleep(_POLL_S)
            self._collect(wait=False)
            self._write_unsent()


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


_PACK = wire.RECORD.pack
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
        step: the x of these points. Default: counted for you; a metric logged a second time begins a
            new step, so a ``val/acc`` logged after the 100th ``loss`` stands at that ``loss``'s step.
            After ``load_snapshot`` it goes on from where the snapshot was saved.
        reduce: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"`` over all ranks, combined in the notebook
            once every rank has logged this step. Default: rank 0's values are the metric's.
        weight: this rank's share in a ``"mean"``, e.g. the size of an uneven last batch.
        **metrics: numbers, or tensors of one element, of any device.

    Raises:
        TypeError: metrics without names, a value that is not a number. ValueError: a tensor or an array of several
            elements, an unknown reduce.
    """
    if values is not None:
        try:
            metrics = {**values, **metrics}
        except TypeError:
            raise TypeError(
                f"log() takes metrics by name, log(loss=0.5) or log({{'val/loss': 0.5}}), not a bare {_kind(values)}"
            ) from None
    try:
        op = wire.REDUCE_OPS[reduce]
    except (KeyError, TypeError):
        raise ValueError(f"reduce is None, 'mean', 'sum', 'min' or 'max', not {reduce!r}") from None
    if _pipe is None:
        for name, value in metrics.items():
            _check(name, value)
        return
    _pipe.log(metrics, None if step is None else int(step), op, float(weight))


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
    return _pipe.last_step if _pipe is not None else None


def resume_after(step: int) -> None:
    """Let the steps that ``log`` counts go on after this one."""
    if _pipe is not None:
        _pipe.resume_after(step)


def flush() -> None:
    """Return when the notebook's pipe holds everything logged so far."""
    if _pipe is not None:
        _pipe.flush()


def _report_progress(level: int, desc: str, total: int | None, done: int) -> None:
    if _pipe is not None:
        _pipe.record(wire.KIND_PROGRESS, desc, -1 if total is None else int(total), done, weight=level)


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
