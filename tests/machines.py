"""Machines for tests: one whose events are written down, and one that is reached by pickle, as Ray's actor is."""

import pickle
import queue
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp.kernel import start
from nbddp.kernel.run import Run
from nbddp.kernel.settings import Options, decide
from nbddp.messages import Called, Failure, Function, Leave, Ready, Report, Settings
from nbddp.process.gauges import Memory
from nbddp.process.machine import Event, LocalMachine


class FakeMachine:
    """A machine without processes: after a function come the events of its script, after ``Leave`` the ends.

    Ranks that are interrupted report so, unless they are deaf.

    Args:
        comes_to: how far the ranks come by themselves: "starting", "ready", or "called".
        when: what a message, by its class, makes the ranks tell: once.
        node: the machine's name.
    """

    def __init__(
        self,
        *script: Event,
        deaf: bool = False,
        comes_to: str = "called",
        when: Mapping[type, Sequence[Event]] | None = None,
        node: str = "",
    ) -> None:
        self.node = node
        self._script, self._deaf, self._events = script, deaf, queue.SimpleQueue[Event]()
        self._comes_to, self._when = comes_to, dict(when or {})
        self.alive: list[int] = []
        self.sent: list[Any] = []
        self.signals: list[tuple[list[int], int]] = []
        self.closed = False

    def store(self, size: int) -> tuple[str, int, int]:
        return "127.0.0.1", 1, 2

    def start(self, settings: Settings, ranks: Sequence[int]) -> None:
        self.settings, self.alive = settings, list(ranks)
        if self._comes_to != "starting":
            self.tell(*(message(rank, Ready(rank)) for rank in ranks))

    def tell(self, *events: Event) -> None:
        for event in events:
            if event.kind == "exit":
                self.alive.remove(event.rank)
            self._events.put(event)

    def events(self, wait_s: float) -> list[Event]:
        try:
            return [self._events.get(timeout=wait_s)]
        except queue.Empty:
            return []

    def send(self, ranks: Sequence[int], what: Any) -> None:
        if isinstance(what, Function):
            if self._comes_to == "called":
                self.tell(*(message(rank, Called()) for rank in self._mine(ranks)))
            return self.tell(*self._script)
        self.sent.append(what)
        self.tell(*self._when.pop(type(what), ()))
        if isinstance(what, Leave):
            self._end(ranks, 0)

    def signal(self, ranks: Sequence[int], number: int) -> None:
        if ranks := self._mine(ranks):
            self.signals.append((ranks, number))
        if number == signal.SIGKILL:
            self._end(ranks, -number)
        elif number == signal.SIGINT and not self._deaf:
            self.tell(*(failed(rank, 9.0, "", "KeyboardInterrupt") for rank in ranks))

    def _end(self, ranks: Sequence[int], code: int) -> None:
        self.tell(*(Event("exit", rank, code) for rank in self._mine(ranks)))

    def _mine(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank in self.alive]

    def stacks(self, ranks: Sequence[int], wait_s: float) -> dict[int, str]:
        return {}

    def memory(self, ranks: Sequence[int]) -> dict[int, Memory]:
        return dict.fromkeys(ranks, Memory(1 << 20))

    def close(self) -> None:
        self.closed = True


class PicklingMachine:
    """A machine's ranks behind a wire: each argument and each answer goes through pickle."""

    def __init__(self, machine: LocalMachine | None = None, node: str = "") -> None:
        self._machine, self.node = machine or LocalMachine(), node

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            answer = getattr(self._machine, name)(*pickle.loads(pickle.dumps(args)))
            return pickle.loads(pickle.dumps(answer))

        return call


def message(rank: int, what: Any) -> Event:
    return Event("message", rank, what)


def finished(rank: int, at: float = 1.0) -> Event:
    return message(rank, Report(at))


def failed(rank: int, at: float, text: str, kind: str = "RuntimeError") -> Event:
    return message(rank, Report(at, failure=Failure("call", kind, f"{kind}: {text}")))


def exited(rank: int, code: int) -> Event:
    return Event("exit", rank, code)


def run_on(machines: Callable[[], Sequence[Any]], fn: Callable[..., Any], *args: Any, **options: Any) -> Run[Any]:
    """Carry out a run on these machines. Returns it when it's over, also if it failed."""
    given = Options(**{"nprocs": 4, "show": False, "device": "cpu", **options})
    run: Run[Any] = Run(decide("train", given), given)
    start.carry_out(run, start.pack_call("train", fn, args, {}), machines)
    return run


def follow(nprocs: int, *scripts: Sequence[Event] | FakeMachine, **options: Any) -> Run[Any]:
    """Follow the events that are written down, one script per attempt."""
    machines = iter([each if isinstance(each, FakeMachine) else FakeMachine(*each) for each in scripts])
    return run_on(lambda: [next(machines)], print, nprocs=nprocs, **options)
