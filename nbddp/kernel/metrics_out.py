"""Hands a run's metrics to its sinks (``run(to=...)``), each on a thread of its own."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence

from nbddp.history.history import History
from nbddp.kernel.state import RunState
from nbddp.latch import Latch, start_thread
from nbddp.sinks.interface import Sink
from nbddp.sinks.unsent import Unsent
from nbddp.text import in_a_line

_WRITE_EVERY_S = 0.5
_END_S = 10.0  # how long the cell waits for the sinks after the run


class MetricsOut:
    """The sinks of one run. One that raises or hangs is told of once, and the run and the other sinks go on."""

    def __init__(self, sinks: Sequence[Sink], history: History, state: RunState) -> None:
        self._feeds = [_SinkFeed(sink, history, state) for sink in sinks]

    def start(self) -> None:
        """Start all feeds, once: after an interrupt nothing shows whether the first call worked."""
        for feed in self._feeds:
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


class _SinkFeed:
    """Feeds one sink.

    Attributes:
        done: opened when the sink has everything, or takes nothing more.
        told: the user knows that the sink has failed or takes long.
    """

    def __init__(self, sink: Sink, history: History, state: RunState) -> None:
        self.name = sink.name
        self.done = Latch()
        self._sink = sink
        self._history = history
        self._state = state
        self.told = False
        self.thread: threading.Thread | None = None
        self._start_tokens = [self]  # one: the first thread that pops it feeds the sink

    def work(self) -> None:
        """Write what is new until the run is over and all is written."""
        try:
            self._start_tokens.pop()
        except IndexError:
            return
        self.thread = threading.current_thread()
        unsent = Unsent(self._history)
        try:
            over = False
            while not over:
                over = self._state.done.wait(_WRITE_EVERY_S)  # before the last points are taken
                if points := unsent.take():
                    self._sink.write(points, self._history)
            self._sink.close(self._history)
        except Exception as error:  # whatever the user's object raises
            self.fail(error)
        finally:
            self.done.open()

    def fail(self, error: Exception) -> None:
        self.tell(f"{self.name} takes no more metrics: {in_a_line(error)}. The run goes on, its history is whole")
        self.done.open()

    def tell(self, text: str) -> None:
        """Write it once, to the output of rank 0; after the run as a warning."""
        if self.told:
            return
        self.told = True
        outputs = self._state.outputs
        if not (outputs and outputs[0].note(text)):
            warnings.warn(text, stacklevel=2)
