"""The ranks of this machine: starts their processes, hears them, signals them, ends them. It decides nothing.

All arguments and answers are plain data, so that a Ray actor can do the same on another machine.
"""

import contextlib
import errno
import fcntl
import mmap
import operator
import os
import re
import selectors
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe, reduction
from typing import Any, NamedTuple

import psutil

from nbddp.messages import Place, Report, Settings
from nbddp.process import dumps, gauges, oom, server
from nbddp.process.server import ForkedProcess, temporary_folder
from nbddp.process.store import Store
from nbddp.text import in_a_line
from nbddp.worker import rank as ranks_life
from nbddp.worker import tracked
from nbddp.worker.line import enveloped, send_block, with_block
from nbddp.worker.redirect import STACKS_SIGNAL

_END_S = 2.0
_READ_BYTES = 256 << 10
_PUNCH_BYTES = 16 << 20  # of a metrics file, given back when they have been read
_DUMP_BYTES = 1 << 20  # the most of a dump of stacks that is read
_POLL_S = 0.002
_WORKER_S = 0.1  # for the stack of a DataLoader worker


class Event(NamedTuple):
    """What a machine tells: ``message`` (from a rank), ``metrics`` and ``output`` (bytes), ``exit`` (the code).

    An ``oom``, without data, comes before the exit if it was most likely the OOM killer that ended the rank; ``lost``,
    with the reason, if its machine is lost.
    """

    kind: str
    rank: int
    data: Any


class _Descriptor:
    """A file descriptor for a process that is being started, which unpickles it as an int."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.methodcaller("detach"), (reduction.DupFd(self._fd),)


class _RankProcess:
    """One rank's process, its channel, and the files it writes for its whole life."""

    def __init__(self, settings: Settings, place: Place, oom_kills: int) -> None:
        self.number, self.gpu = place.rank, gauges.gpu_of(settings, place.local_rank)
        self.itself: psutil.Process | None = None
        self.exitcode: int | None = None
        self._oom_kills = oom_kills  # before it began
        self._killed = False  # by us
        self.channel, theirs = Pipe()
        with tempfile.TemporaryFile() as on_disk:  # what is printed may be long
            self.files = {"output": os.dup(on_disk.fileno())}
        self.files |= {kind: os.memfd_create(kind) for kind in ("metrics", "stacks")}
        for fd in self.files.values():
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        self._read = {"output": 0, "metrics": 0}
        handed = [theirs, *map(_Descriptor, self.files.values())]
        self.process = ForkedProcess(target=ranks_life.main, args=handed, name=f"{settings.name[:60]}-{self.number}")
        self.process.environ = settings.environ
        try:
            self.process.start()
        except BaseException:
            self._close_files()
            raise
        finally:
            theirs.close()

    def send(self, message: Any) -> None:
        """Send it; it's lost if the rank has ended."""
        envelope, block = enveloped(message)
        with contextlib.suppress(OSError):
            self.channel.send(envelope)
            if block is not None:
                with _too_many_files_raise():
                    send_block(self.channel, block)

    def news(self) -> Iterator[Event]:
        """Yield what has arrived. What the rank had written before a message, or its end, comes before that."""
        exitcode = self.process.exitcode if self.exitcode is None else None
        with contextlib.suppress(EOFError, OSError):
            while self.channel.poll():
                try:
                    envelope = self.channel.recv()
                except Exception as error:  # it needs a module that only the ranks have
                    if isinstance(error, (EOFError, OSError)):
                        raise
                    lost = f"[output of rank {self.number} can't be shown here: {in_a_line(error)}]\n"
                    yield Event("output", self.number, lost.encode())
                    continue
                with _too_many_files_raise():
                    envelope = with_block(self.channel, envelope)
                yield from self.written("output", envelope.printed)
                if isinstance(envelope.message, Report):
                    yield from self.written("metrics")
                yield Event("message", self.number, envelope.message)
        if exitcode is not None:
            yield from self.all_written()
            if exitcode < 0 and (crash := dumps.crash(self.dumped())):
                at = self._read["output"]
                line_end = "" if os.pread(self.files["output"], 1, max(0, at - 1)) in (b"", b"\n") else "\n"
                yield Event("output", self.number, f"{line_end}{crash}".encode())
            self.exitcode = exitcode
            self._end_children()
            if exitcode == -signal.SIGKILL and not self._killed and oom.kills() > self._oom_kills:
                yield Event("oom", self.number, None)
            yield Event("exit", self.number, exitcode)

    def all_written(self) -> Iterator[Event]:
        """Yield what is new in the files."""
        for kind in self._read:
            yield from self.written(kind)

    def written(self, kind: str, until: int | None = None) -> Iterator[Event]:
        """Yield what is new in one file, up to an offset, or its present end: a flood must not keep us here."""
        fd = self.files[kind]
        end = os.fstat(fd).st_size if until is None else until
        while (before := self._read[kind]) < end and (data := os.pread(fd, min(_READ_BYTES, end - before), before)):
            self._read[kind] += len(data)
            if kind == "metrics" and before // _PUNCH_BYTES != self._read[kind] // _PUNCH_BYTES:
                _give_back(fd, before // _PUNCH_BYTES * _PUNCH_BYTES)
            yield Event(kind, self.number, data)

    def _is_there(self) -> bool:
        return self.itself is not None and self.itself.is_running()

    def signal(self, number: int) -> None:
        """Send a signal to the rank; SIGKILL also to its children, which are in its process group once it has begun."""
        self._killed = self._killed or number == signal.SIGKILL
        for send in (os.killpg, os.kill) if number == signal.SIGKILL else (os.kill,):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self._is_there():
                    send(self.process.pid, number)

    def dumped(self, begin: int = 0) -> str:
        """Return what faulthandler has written since its file had this size; the newest part of it."""
        begin = max(begin, os.fstat(self.files["stacks"]).st_size - _DUMP_BYTES)
        return os.pread(self.files["stacks"], _DUMP_BYTES, begin).decode("utf-8", "replace")

    def dump_of_a_worker(self, wait_s: float) -> str:
        """Return the dump of a DataLoader worker of this rank that is computing a batch; "" if none is."""
        with contextlib.suppress(psutil.Error, OSError):
            for worker in self.itself.children() if self.itself is not None else ():
                begin, deadline = os.fstat(self.files["stacks"]).st_size, time.monotonic() + wait_s
                if self.answers_stacks(worker.pid):
                    worker.send_signal(STACKS_SIGNAL)
                    while not dumps.is_whole(dump := self.dumped(begin)) and time.monotonic() < deadline:
                        time.sleep(_POLL_S)
                    if dumps.computes_a_batch(dump):
                        return dump
        return ""

    def answers_stacks(self, pid: int | None = None) -> bool:
        """Whether the rank, or its child, has a handler for a request for stacks, which would kill it otherwise."""
        with contextlib.suppress(OSError), open(f"/proc/{pid or self.process.pid}/status") as file:
            caught = re.search(r"SigCgt:\s*([0-9a-f]+)", file.read())
            return caught is not None and bool(int(caught[1], 16) >> (STACKS_SIGNAL - 1) & 1)
        return False

    def _end_children(self) -> None:
        """Kill what is left of the rank's process group, and wait for it; its number is used again only after that.

        If the fork server has ended, nobody may reap the rank.
        """
        deadline = time.monotonic() + _END_S
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            while time.monotonic() < deadline and (self._is_there() or not psutil.pid_exists(self.process.pid)):
                os.killpg(self.process.pid, signal.SIGKILL)
                time.sleep(_POLL_S)
                if self._is_there() and self.itself.status() == psutil.STATUS_ZOMBIE:  # type: ignore[union-attr]
                    return

    def _close_files(self) -> None:
        self.channel.close()
        for fd in self.files.values():
            os.close(fd)

    def close(self) -> None:
        self._close_files()
        self.process.join(_END_S)
        with contextlib.suppress(ValueError):  # it is in an uninterruptible wait
            self.process.close()


class LocalMachine:
    """This machine's share of the ranks. Another kind of machine has the same methods.

    One thread calls ``events``, another all else; ``memory`` any thread.

    Attributes:
        node: the machine's name; "" for the notebook's own.

    Args:
        address: by which the ranks of all machines reach this one.
    """

    node = ""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._address = address
        self._ranks: dict[int, _RankProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._folder = ""
        self._looked_at = 0.0
        self._store: Store | None = None

    def store(self, size: int) -> tuple[str, int, int]:
        """Open a store for that many ranks, on this machine's address. Returns that, and a port that's kept free."""
        self._store = Store(size, self._address)
        return *self._store.address, self._store.free_port

    def start(self, settings: Settings, ranks: Sequence[int]) -> None:
        """Start one process per rank. Raises OSError, EOFError."""
        self._folder = self._folder or tempfile.mkdtemp(prefix="r-", dir=temporary_folder())
        oom_kills = oom.kills()
        with server.lock:
            for local_rank, rank in enumerate(ranks):
                place = Place(rank, local_rank, len(ranks), self._folder)
                started = self._ranks[rank] = _RankProcess(settings, place, oom_kills)
                started.channel.send((settings, place))
        if self._store is not None:
            self._store.open()
        for started in self._mine(ranks):
            with contextlib.suppress(psutil.NoSuchProcess):  # not only its pid: the number may be used again
                started.itself = psutil.Process(started.process.pid)
            # Once its pid has been read, the sentinel tells only the end.
            self._selector.register(started.channel, selectors.EVENT_READ, started)
            self._selector.register(started.process.sentinel, selectors.EVENT_READ, started)

    def events(self, wait_s: float) -> list[Event]:
        """Wait until something happens, and return it; what was printed and logged, at least after this time."""
        found: list[Event] = []
        for rank in {key.data for key, _ in self._selector.select(wait_s)}:
            found += rank.news()
            if rank.exitcode is not None:
                for file in (rank.channel, rank.process.sentinel):
                    self._selector.unregister(file)
        if (now := time.monotonic()) >= self._looked_at + wait_s:
            self._looked_at = now
            for rank in self._ranks.values():
                found += rank.all_written() if rank.exitcode is None else ()
        return found

    def send(self, ranks: Sequence[int], message: Any) -> None:
        """Send a message; the ranks all map the one copy of its block."""
        for rank in self._mine(ranks):
            rank.send(message)

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to the ranks themselves; SIGKILL also to their children."""
        for rank in self._mine(ranks):
            rank.signal(number)

    def stacks(self, ranks: Sequence[int], wait_s: float) -> dict[int, str]:
        """Return faulthandler's dumps of the ranks that answer in time."""
        asked = {rank: os.fstat(rank.files["stacks"]).st_size for rank in self._mine(ranks) if rank.answers_stacks()}
        for rank in asked:
            rank.signal(STACKS_SIGNAL)
        deadline, found = time.monotonic() + wait_s, dict.fromkeys(asked, "")
        while time.monotonic() < deadline and not all(map(dumps.is_whole, found.values())):
            time.sleep(_POLL_S)
            found = {rank: rank.dumped(begin) for rank, begin in asked.items()}
        waiting = [rank for rank, dump in found.items() if dumps.waits_for_a_worker(dump)]
        found |= {rank: dump for rank in waiting if (dump := rank.dump_of_a_worker(_WORKER_S))}
        return {rank.number: dump for rank, dump in found.items() if dump}

    def memory(self, ranks: Sequence[int]) -> dict[int, gauges.Memory]:
        """Return the memory of those of these ranks that have begun and not ended. Any thread may ask."""
        found = {rank.number: gauges.memory(rank.itself, rank.gpu) for rank in self._mine(ranks)}
        return {rank: memory for rank, memory in found.items() if memory is not None}

    def close(self) -> None:
        """Close everything. No thread waits for events any more."""
        self._selector.close()
        for rank in self._ranks.values():
            rank.close()
        if self._store is not None:
            self._store.close()
        if self._folder:
            tracked.remove_rest(self._folder)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _mine(self, ranks: Sequence[int]) -> list[_RankProcess]:
        return [self._ranks[rank] for rank in ranks if rank in self._ranks and self._ranks[rank].exitcode is None]


@contextlib.contextmanager
def _too_many_files_raise() -> Iterator[None]:
    """Raise RuntimeError when this process can't open another file; any other OSError means that the rank has ended."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise RuntimeError("too many open files; raise the limit (ulimit -n)") from error
        raise


def _give_back(fd: int, offset: int) -> None:
    """Free a stretch of the file that has been read: a long run's file would grow without an end."""
    with contextlib.suppress(OSError), mmap.mmap(fd, _PUNCH_BYTES, offset=offset) as stretch:
        stretch.madvise(mmap.MADV_REMOVE)
