"""Hands a run's metrics to its sinks (``run(to=...)``), each on a thread of its own."""

from __future__ import annotations

import collections
import threading
import time
import warnings
from collections.abc import Callable, Sequence

from nbddp.errors import LaunchError
from nbddp.history.history import History
from nbddp.kernel.state import RunState
from nbddp.latch import Latch, Once, start_thread
from nbddp.sinks.interface import Points, Sink
from nbddp.sinks.unsent import Unsent
from nbddp.text import in_a_line

_PAUSES_S = [0.5, 1, 2, 4, 8, 15, 30, 60]  # before the next write: after a success, after one failure, ...
_TRIES_AT_THE_END = 2
_RETRY_AT_THE_END_S = 1.0
_END_S = 10.0  # how long the cell waits for the sinks after the run

_being_written: set[str] = set()  # files that a run of this notebook kernel writes


class MetricsOut:
    """The sinks of one run. One that raises is tried again; that it raises or hangs is reported once.

    The run and the other sinks go on.

    Raises:
        LaunchError: a file is written by another run, or twice by this one.
    """

    def __init__(self, sinks: Sequence[Sink], history: History, state: RunState) -> None:
        paths = [sink.path for sink in sinks if sink.path is not None]
        for sink in sinks:
            if sink.path in _being_written:
                raise LaunchError(f"to={sink.name!r}: a run that is not over writes this file. Use another one")
            if sink.path is not None and paths.count(sink.path) > 1:
                raise LaunchError(f"to={sink.name!r} names a file that to= names twice")
        self._feeds = [_SinkFeed(sink, history, state) for sink in sinks]

    def start(self) -> None:
        """Start all feeds, once: after an interrupt nothing shows whether the first call worked."""
        for feed in self._feeds:
            feed.claim_file()
            start_thread(feed.work, f"nbddp-to-{feed.name}", feed.fail)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all sinks have what the run logged; the run is over. For one that takes long, only once.

        Args:
            timeout_s: for all sinks together. Default: 10.
        """
        deadline = time.monotonic() + (_END_S if timeout_s is None else timeout_s)
        for feed in self._feeds:
            by_itself = feed.thread is threading.current_thread()  # a function that stops its own run
            if not feed.told and not by_itself and not feed.done.wait(max(0.0, deadline - time.monotonic())):
                feed.tell(f"{feed.name} has not taken over all metrics yet: it goes on as long as this notebook does")

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call the function when :meth:`wait` would return, at once or on another thread."""

        def wait() -> None:
            self.wait()
            callback()

        if all(feed.done.is_open or feed.told for feed in self._feeds):
            callback()
        else:
            start_thread(wait, "nbddp-to-wait", lambda _: wait())


class _SinkFeed:
    """Feeds one sink.

    Attributes:
        done: opened when the sink has everything, or takes nothing more.
        told: the user knows that the sink takes long or nothing more.
    """

    def __init__(self, sink: Sink, history: History, state: RunState) -> None:
        self.name = sink.name
        self.done = Latch()
        self._sink = sink
        self._history = history
        self._state = state
        self.told = self._told_of_retries = False
        self.thread: threading.Thread | None = None
        self._start = Once()
        self._backlog: collections.deque[list[Points]] = collections.deque()

    def claim_file(self) -> None:
        if self._sink.path is not None and not self._start.claimed:
            _being_written.add(self._sink.path)

    def _end(self) -> None:
        if self._sink.path is not None:
            _being_written.discard(self._sink.path)
        self.done.open()

    def work(self) -> None:
        """Write what is new until the run is over and all is written."""
        if not self._start.claim():
            return
        self.thread = threading.current_thread()
        try:
            self._feed()
        except Exception as error:  # whatever the user's object raises
            self.fail(error)
        finally:
            self._end()

    def _feed(self) -> None:
        """Raises what the sink raises after the end of the run, once it has been tried again."""
        unsent = Unsent(self._history)
        failures, tries_left = 0, _TRIES_AT_THE_END
        while True:
            over = self._state.done.wait(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
            if points := unsent.take():  # the last ones, if the run is over
                self._backlog.append(points)
            try:
                self._write()
                if over:
                    return self._sink.close(self._history)
                failures = 0
            except Exception as error:  # whatever the user's object raises
                tries_left -= over
                if not tries_left:
                    raise
                if over:
                    self.done.wait(_RETRY_AT_THE_END_S)
                else:
                    failures += 1
                    self._tell_of_retries(error)

    def _write(self) -> None:
        while self._backlog:
            self._sink.write(self._backlog[0], self._history)
            self._backlog.popleft()

    def fail(self, error: Exception) -> None:
        self.tell(f"{self.name} takes no more metrics: {in_a_line(error)}. The run goes on, its history is whole")
        self._end()

    def _tell_of_retries(self, error: Exception) -> None:
        if not self._told_of_retries:
            self._told_of_retries = True
            self._say(f"{self.name} did not take metrics: {in_a_line(error)}. They are written again until it does")

    def tell(self, text: str) -> None:
        """Say why the sink does not have all metrics, once."""
        if not self.told:
            self.told = True
            self._say(text)

    def _say(self, text: str) -> None:
        """Write it to the output of rank 0; after the run as a warning."""
        outputs = self._state.outputs
        if not (outputs and outputs[0].note(text)):
            warnings.warn(text, stacklevel=3)
