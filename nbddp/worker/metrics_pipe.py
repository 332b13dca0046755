"""Writes a rank's metrics into a pipe to the notebook, or into a file, without waiting for the notebook or the GPU.

A value is one 40-byte record (``wire.RECORD``), written without blocking: it survives a SIGKILL of this rank and needs
no collective. Records that cannot be written at once (calls within 2 ms share a write; the pipe is full while the
notebook is busy) wait in a deque that a helper thread empties. A tensor on an accelerator is copied asynchronously into
pinned memory and read when its event is done. Later values wait until then, because the notebook counts values in the
order in which they arrive.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import os
import select
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Union

from nbddp import wire
from nbddp.shown import Shown, records_of
from nbddp.worker.metric_values import LAST_STEP, refusal

_BATCH_S = 0.002  # records younger than this may wait for the next call, to share its write
_POLL_S = 0.1  # how often the helper checks device copies and a full pipe; each check takes the GIL from the training
_MAX_BATCH = 256  # calls of log() whose records are joined
_MAX_WRITE = select.PIPE_BUF // wire.RECORD.size * wire.RECORD.size
_MAX_NAMES = 1 << 16  # a record's id has 16 bits
_MAX_UNREAD_BYTES = 8 << 20  # with more in front of it, an image is left out: the notebook does not read
_PACK = wire.RECORD.pack
_SIZE = wire.RECORD.size
_METRIC = wire.KIND_METRIC
_time = time.time

_Number = Union[float, "tuple[Any, Any]"]  # a tuple: an event, and the pinned memory that holds the number after it
_Logged = tuple[dict[str, _Number], Union[int, None], int, float, float]  # metrics, step, op, weight, time


class _Pending(NamedTuple):
    """One call of ``log()`` whose numbers are still on a device, or that follows such a call."""

    numbers: list[tuple[tuple[int, int, bool, float, int], _Number]]  # each with its record's first fields
    at: float

    def is_ready(self) -> bool:
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

    Any thread may log: logging only appends to a deque, which is atomic. One thread at a time takes the calls from
    the deque in order, counts their steps and writes their records into the pipe: a thread that logs, or the helper
    thread, which is started when a record first has to wait.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._ids: dict[str, int] = {}
        self._next_id = itertools.count()
        self._logged: collections.deque[_Logged | bytes] = collections.deque()  # bytes: whole records
        self._moved_at = 0.0
        self._helper: threading.Thread | None = None
        self._lock = threading.RLock()  # protects everything below
        self._counting = False  # a signal handler may log while its thread counts steps
        self._steps: dict[str, int] = {}
        self._step = 0
        self._resumed_after: int | None = None  # the last step of the process that wrote the snapshot
        self._on_device: collections.deque[_Pending] = collections.deque()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._batch, self._written = b"", 0  # the bytes being written, and how many of them are in the pipe

    def log(self, metrics: dict[str, Any], step: int | None, op: int, weight: float) -> None:
        """Queue one call of ``log()``; takes ownership of ``metrics``."""
        ids = self._ids
        for name, value in metrics.items():  # first check all of them: a call that raises logs nothing
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

    def has(self, name: str) -> bool:
        """Return whether this name has been logged."""
        return name in self._ids

    def record(self, kind: int, name: str, step: int, value: float, weight: float = 0.0) -> None:
        """Send one record of another kind at once."""
        now = _time()
        if name not in self._ids:
            self._define(name)
        self._logged.append(_PACK(kind, 0, self._ids[name], False, weight, step, value, now))
        self._move(now)

    def show(self, shown: Shown) -> None:
        """Send an image at once, unless too much waits already for a notebook that does not read."""
        with self._lock:
            unread = sum(map(len, self._unsent))
        if unread <= _MAX_UNREAD_BYTES:
            self._logged.append(records_of(shown))
            self._move(_time())

    def begin_again(self, fd: int) -> None:
        """Write into another pipe from now on, with new ids and steps; closes the present one."""
        with self._lock:
            os.close(self._fd)
            self._fd = fd
            self._ids, self._next_id = {}, itertools.count()
            self._steps, self._step, self._resumed_after = {}, 0, None
            self._logged.clear()
            self._on_device.clear()
            self._unsent.clear()
            self._batch, self._written = b"", 0

    def last_step(self) -> int | None:
        """The latest step, of this process or of the one whose snapshot it resumed; None before the first."""
        with self._lock:
            self._count_steps()
            return self._step if self._steps else self._resumed_after

    def last_steps(self) -> dict[str, int]:
        """The latest step of each metric."""
        with self._lock:
            self._count_steps()
            return dict(self._steps)

    def resume_after(self, step: int, steps: Mapping[str, int] | None = None) -> None:
        """Continue counting from this step, unless a later one has been logged.

        Args:
            steps: ``last_steps`` at that time. Without it, every metric counts as logged at this step.
        """
        with self._lock:
            last = self.last_step()
            if last is None or step > last:
                self._step = step
                self._steps = dict(steps or {})
                self._resumed_after = None if steps else step

    def send(self) -> None:
        """Write what can be written of everything logged so far; does not wait."""
        self._move(_time())

    def flush(self) -> None:
        """Return when everything logged so far is in the pipe; waits for copies from the device."""
        self._move(_time())
        while self._has_unsent():
            if self._on_device:
                with contextlib.suppress(RuntimeError):  # the device has failed; the next move finds that, too
                    self._on_device[0].wait()
            select.select([], [self._fd], [])
            self._move(_time())

    def _number(self, name: str, value: Any) -> _Number:
        """The value as a float, or as an asynchronous copy from its device."""
        on_cpu = getattr(value, "is_cpu", None)  # None: not a tensor
        if on_cpu is False and value.numel() == 1:
            return _fetch(value.detach())
        try:
            if on_cpu is not None:
                return float(value.item())
            if isinstance(value, (str, bytes)):  # float() would take "3"
                raise TypeError
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise refusal(name, value) or error from None

    def _define(self, name: str) -> None:
        ident = next(self._next_id)
        if ident >= _MAX_NAMES:
            raise ValueError("more than 65,536 metric names; does a name contain the number of a step or a sample?")
        text = name.encode("utf-8", "replace")
        size = wire.NAME_PIECE_BYTES
        pieces = [text[i : i + size] for i in range(0, len(text), size)] or [b""]
        more = [1] * (len(pieces) - 1) + [0]
        self._logged.append(
            b"".join(wire.NAME_PIECE.pack(wire.KIND_NAME, m, ident, piece) for m, piece in zip(more, pieces))
        )
        self._ids.setdefault(name, ident)  # if two threads define it at once, the first id counts

    # ------------------------------------------------------------------ on one thread at a time

    def _move(self, now: float) -> None:
        """Move logged values into the pipe until it is full."""
        self._moved_at = now
        if self._lock.acquire(blocking=False):  # otherwise another thread is moving values
            try:
                self._count_steps()
                self._write_unsent()
            finally:
                self._lock.release()
        if self._helper is None and self._has_unsent():
            self._help()

    def _count_steps(self) -> None:
        if self._counting:
            return
        self._counting = True
        try:
            while self._logged:
                self._unsent.append(self._records(self._logged.popleft()))
            while self._on_device and self._on_device[0].is_ready():
                self._unsent.append(self._on_device.popleft().records())
        except RuntimeError:  # the device has failed, as after a device-side assert: its numbers are lost
            self._on_device.clear()
        finally:
            self._counting = False

    def _records(self, logged: _Logged | bytes) -> bytes:
        """The records of one call; empty if they have to wait for a copy from a device."""
        if isinstance(logged, bytes):
            return logged
        metrics, step, op, weight, at = logged
        ids, steps, counted = self._ids, self._steps, step is None
        if step is None:
            step, resumed_after = self._step, self._resumed_after
            for name in metrics:
                if steps.get(name, resumed_after) == step:  # a metric logged a second time begins a new step
                    step += step != LAST_STEP
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
        self._on_device.append(_Pending(list(zip(fields, metrics.values())), at))
        return b""

    def _write_unsent(self) -> None:
        """Write until the pipe is full. Writes of up to PIPE_BUF bytes are atomic, so no record is cut."""
        try:
            while self._next_batch():
                self._put(self._batch[self._written : self._written + _MAX_WRITE])
                self._written += _MAX_WRITE
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the notebook no longer reads
            self._unsent.clear()
            self._batch = b""

    def _next_batch(self) -> bytes:
        """The bytes being written, or the next ones; empty when nothing is unsent."""
        if self._written >= len(self._batch):
            take = self._unsent.popleft
            self._batch = b"".join([take() for _ in range(min(len(self._unsent), _MAX_BATCH))])
            self._written = 0
        return self._batch

    def _has_unsent(self) -> bool:
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
    """Writes the same records to a file, for a job without a notebook, as promptly as to a pipe."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._failed = False

    def show(self, shown: Shown) -> None:
        """The file holds numbers alone: a job may show images for weeks."""

    def _put(self, records: bytes) -> None:
        if self._failed:
            raise BrokenPipeError
        try:
            written = os.write(self._fd, records)
            if written < len(records):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # a full disk ends the curves, not the training
            self._failed = True
            print(f"nbddp: stopped writing metrics to the file: {error}", file=sys.stderr)
            raise BrokenPipeError from error


def _fetch(tensor: Any) -> tuple[Any, Any]:
    import torch

    pinned = _pinned.take(tensor.device.type)
    # Converted on the device, in stream order; the copy to pinned memory does not block.
    pinned.copy_(tensor.reshape(()).to(pinned.dtype), non_blocking=True)
    event = torch.Event(tensor.device)
    # The copy is on this stream, which is not the current device's if the model is spread over several devices.
    event.record(torch.accelerator.current_stream(tensor.device))
    return event, pinned


class _PinnedNumbers:
    """Pinned memory for numbers, allocated for many at a time: to pin memory may wait for the device.

    A block lives as long as a number in it is still to be read; torch then takes it for another one.
    """

    _COUNT = 512

    def __init__(self) -> None:
        self._left: Iterator[Any] = iter(())

    def take(self, device_type: str) -> Any:
        """Return a tensor of one number."""
        import torch

        dtype = torch.float32 if device_type == "mps" else torch.float64  # MPS has no float64
        for number in self._left:
            if number.dtype == dtype:
                return number
        with torch.inference_mode(False):  # else it could be written to in inference mode alone
            block = torch.empty(self._COUNT, dtype=dtype, device="cpu", pin_memory=True)
            self._left = iter(block.unbind())
        return next(self._left)


_pinned = _PinnedNumbers()
