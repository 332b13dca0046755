"""All ranks of a run or session, on one machine or several: what they tell, and what they are told, on one thread."""

import contextlib
import dataclasses
import functools
import math
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nbddp.errors import LaunchError
from nbddp.history.records import RecordReader
from nbddp.kernel.interrupts import interrupts_held
from nbddp.kernel.rank_state import RankState
from nbddp.messages import Asks, Called, Defined, Leave, Misses, Ready, Report, Settings
from nbddp.payload import Packed, definition
from nbddp.process import server
from nbddp.process.gauges import Memory
from nbddp.process.machine import Event

POLL_S = 0.1  # how often what was printed and logged is looked for
_MEMORY_S = 0.1  # between two looks while ranks begin
_LEAVE_S = 30.0  # for threads and exit handlers of the user's code
_END_S = 2.0

_MOST_WAITING = 16  # events in the inbox, before the machines are asked for more
_NOT_PRELOADED = (
    "the fork server couldn't import nbddp, so each rank has to, which takes seconds: install nbddp, or put its "
    "folder on PYTHONPATH, not only on this notebook's sys.path"
)
_SERVER_ENDED = "the fork server exited unexpectedly; its output on stderr shows why"

Request = Callable[[], None]


class Crew:
    """The ranks. One thread uses it; others put requests into ``inbox``, which that thread carries out.

    Attributes:
        device: the type of the ranks' devices.
        ranks: what is known about each.
        inbox: what the machines tell, and requests.
        definitions: what the ranks have been sent by value, in order; see payload.
        metrics_to: gets decoded records, with the rank.
        steps: returns the step that each rank has logged last; -1: none.
        on_exit: called when a rank has ended, on another thread, while this one waits for the user; otherwise None.
        moved_at: when a rank has last said, printed, or logged something, or was told something.
    """

    def __init__(self, settings: Settings, machines: Sequence[Any]) -> None:
        self.ranks = [RankState(number) for number in range(settings.world_size)]
        self.inbox: queue.SimpleQueue[Event | Request] = queue.SimpleQueue()
        self.definitions: list[Any] = []
        self.metrics_to: Callable[[int, list[Any]], None] = lambda rank, records: None
        self.steps: Callable[[], list[int]] = lambda: [-1] * settings.world_size
        self.on_exit: Callable[[], None] | None = None
        self.moved_at = time.monotonic()
        self.device, self._settings, self._machines = settings.device, settings, machines
        self._readers = [RecordReader() for _ in self.ranks]
        self._threads: list[threading.Thread] = []
        self._over = False
        self._memory: tuple[float, list[int], dict[int, Memory]] = -math.inf, [], {}  # when it was read, and of whom

    @interrupts_held(server.give_up)
    def open(self) -> None:
        """Start all ranks. Raises LaunchError; whatever it raises, the crew has to be ended."""
        settings, machines = self._settings, self._machines
        share = -(-len(self.ranks) // len(machines))
        try:
            store = machines[0].store(len(self.ranks)) if settings.contract or len(machines) > 1 else None
            settings = dataclasses.replace(settings, nnodes=len(machines), store=store)
            for index, machine in enumerate(machines):
                mine = range(len(self.ranks))[index * share : (index + 1) * share]
                for rank in mine:
                    self.ranks[rank].host = machine.node
                machine.start(dataclasses.replace(settings, group_rank=index), mine)
                hear = functools.partial(self._hear, machine, len(mine))
                thread = threading.Thread(target=hear, name="nbddp-events", daemon=True)
                thread.start()
                self._threads.append(thread)
        except (OSError, EOFError) as error:
            why = _SERVER_ENDED if isinstance(error, (EOFError, ConnectionError, ProcessLookupError)) else error
            raise LaunchError(f"the ranks couldn't be started: {why}") from error

    def _hear(self, machine: Any, left: int) -> None:
        while left and not self._over:
            while self.inbox.qsize() > _MOST_WAITING and self.on_exit is None and not self._over:
                time.sleep(POLL_S / 10)  # requests, such as Stop, come after what waits; the rest waits in the files
            try:
                events = machine.events(POLL_S)
            except Exception as error:  # too many files are open: what a rank has told is lost
                return self.inbox.put(functools.partial(_raise, error))
            for event in events:
                left -= event.kind == "exit"
                self.inbox.put(event)
                if event.kind == "exit" and (on_exit := self.on_exit) is not None:
                    on_exit()

    def note_definitions(self, packed: Packed) -> int:
        """Note what the ranks are about to be sent by value. Returns how much they have been sent before."""
        before = len(self.definitions)
        self.definitions += packed.by_value
        return before

    def give(self, order: Any, ranks: Sequence[RankState]) -> None:
        """Give an order, to which each of these ranks will answer with a report."""
        for rank in ranks:
            rank.begin_order()
        self.send(order, ranks)

    def take(self, wait_s: float) -> Event | None:
        """Wait for one thing, and note it: what a rank has done, or what another thread asks for."""
        try:
            thing = self.inbox.get(timeout=wait_s) if wait_s > 0 else self.inbox.get_nowait()
        except queue.Empty:
            return None
        if not isinstance(thing, Event):
            thing()
            return None
        rank, self.moved_at = self.ranks[thing.rank], time.monotonic()
        if thing.kind == "exit":
            rank.exitcode, rank.exited_at = thing.data, self.moved_at
        elif thing.kind == "oom":
            rank.out_of_memory = True
        elif thing.kind == "lost":
            rank.lost = thing.data
        elif thing.kind == "output":
            rank.output.add(thing.data)
        elif thing.kind == "metrics":
            self.metrics_to(thing.rank, list(self._readers[thing.rank].feed(thing.data)))
        elif isinstance(thing.data, Report):
            rank.report, rank.prompt = rank.report or thing.data, None
        elif isinstance(thing.data, Asks):
            rank.prompt, rank.paused_at, rank.asked_at = thing.data.prompt, thing.data.line, time.monotonic()
            rank.hides = thing.data.hidden
        elif isinstance(thing.data, Misses):
            self.send(Defined(thing.data.name, definition(thing.data.name)), [rank])
        elif isinstance(thing.data, Ready):
            rank.ready, rank.pid = True, thing.data.pid
            if not thing.data.preloaded:
                warnings.warn(_NOT_PRELOADED, stacklevel=2)
        elif isinstance(thing.data, Called):
            rank.interruptible = True
        return thing

    def send(self, message: Any, ranks: Sequence[RankState]) -> None:
        """Send a message to these ranks."""
        self.moved_at = time.monotonic()
        for machine in self._machines:
            machine.send(_numbers(ranks), message)

    def interrupt(self, ranks: Sequence[RankState]) -> None:
        """Raise KeyboardInterrupt where the user's code runs; kill ranks that have not come so far."""
        for machine in self._machines:
            machine.signal(_numbers(rank for rank in ranks if rank.interruptible), signal.SIGINT)
            machine.signal(_numbers(rank for rank in ranks if not rank.interruptible), signal.SIGKILL)

    def kill(self, ranks: Sequence[RankState]) -> None:
        """Kill them; their ends come as events."""
        for machine in self._machines:
            machine.signal(_numbers(ranks), signal.SIGKILL)

    def stacks(self, wait_s: float) -> dict[int, str]:
        """Return the stacks of the ranks that run the user's code, and answer in time."""
        found: dict[int, str] = {}
        asked = _numbers(rank for rank in self.ranks if rank.interruptible and not rank.over)
        for machine in self._machines:
            found |= machine.stacks(asked, wait_s)
        return found

    def overview(self) -> list[str]:
        """Return a line per rank, with its process and the memory that it uses. Any thread may ask."""
        found = self.memory(at_most_s=0.0)
        return [_line(rank, found.get(rank.number)) for rank in self.ranks]

    def memory(self, at_most_s: float = 1.0) -> dict[int, Memory]:
        """Return what the ranks use. It may be as old as this; when a rank is new, 0.1 s. Any thread may ask."""
        asked = _numbers(rank for rank in self.ranks if rank.ready and rank.alive)
        read_at, of, found = self._memory
        if time.monotonic() >= read_at + (at_most_s if {*asked} <= {*of} else min(at_most_s, _MEMORY_S)):
            found = {}
            for machine in self._machines if asked else ():
                found |= machine.memory(asked)
            self._memory = time.monotonic(), asked, found
        return found

    def dismiss(self, gives_up: Callable[[], bool] = lambda: False) -> None:
        """Let the ranks end by themselves, with their threads and exit handlers, for a while, or until this is true."""
        self.send(Leave(), self.ranks)
        deadline = time.monotonic() + _LEAVE_S
        while any(rank.alive for rank in self.ranks) and (left := deadline - time.monotonic()) > 0 and not gives_up():
            if self.take(min(left, 1.0)) is None and not any(thread.is_alive() for thread in self._threads):
                break  # nobody hears their ends

    @interrupts_held()
    def end(self) -> None:
        """End all ranks and their children, and close everything."""
        self.kill(self.ranks)
        deadline = time.monotonic() + _END_S
        while any(rank.alive for rank in self.ranks) and time.monotonic() < deadline and self._threads:
            with contextlib.suppress(Exception):  # of a request
                self.take(POLL_S)
        self._over = True
        for thread in self._threads:
            thread.join()
        for rank in self.ranks:
            rank.close()
        for machine in self._machines:
            machine.close()


def _raise(error: Exception) -> None:
    raise error


def _line(rank: RankState, memory: Memory | None) -> str:
    if memory is None:
        return f"rank {rank.number}: {'ended' if rank.ready or not rank.alive else 'starting'}"
    gpu = f", GPU {memory.gpu[0] >> 20:,} of {memory.gpu[1] >> 20:,} MiB" if memory.gpu is not None else ""
    return f"rank {rank.number}: pid {rank.pid}, {memory.resident >> 20:,} MiB{gpu}"


def _numbers(ranks: Iterable[RankState]) -> list[int]:
    return [rank.number for rank in ranks]
