"""Logs in again to hosts that were lost, in the background, with growing pauses, until the cluster is closed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nbddp.errors import LaunchError
from nbddp.hosts.host import Host
from nbddp.latch import Latch, start_thread

FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_POLL_S = 0.1  # between two looks at logins under way
_CLOSE_TIMEOUT_S = 5.0
_FINAL = ("Permission denied", "Host key verification failed")  # further attempts may lock the user out


class Returns:
    """The hosts of a cluster, of which lost ones are replaced by new logins that have answered.

    One thread serves all lost hosts, and ends when none is left. It holds no reference to the cluster.

    Attributes:
        hosts: in the order of the ranks.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]], heartbeat_s: float, login_timeout_s: float) -> None:
        self.hosts: list[Host] = []
        self._commands = commands
        self._heartbeat_s = heartbeat_s
        self._login_timeout_s = login_timeout_s
        self._attempts: dict[str, _Attempts] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread_over: Latch | None = None  # of a thread that runs
        self._bell = threading.Event()

    def begin(self) -> None:
        """From now on, log in again to each host that is lost."""
        for host in self.hosts:
            host.when_lost = self._start
        if any(host.lost for host in self.hosts):
            self._start()

    def words(self, name: str) -> str:
        """Return how the new logins to a lost host go."""
        attempts = self._attempts.get(name)
        if attempts is None or not attempts.problem:
            return "it is logged in to again in the background"
        if attempts.is_final():
            return f"the new login failed, and there is no other: {attempts.problem}"
        return f"it is logged in to again in the background; the last login failed: {attempts.problem}"

    def close(self) -> None:
        """End the logins under way; no other begins."""
        with self._lock:
            self._closed = True
            over = self._thread_over
        self._bell.set()
        if over is not None:
            over.wait(_CLOSE_TIMEOUT_S)

    def disown(self) -> None:
        """In a process forked from the notebook kernel: close the pipes of the logins under way."""
        for attempts in list(self._attempts.values()):
            if attempts.host is not None:
                attempts.host.close_stdin()

    def _start(self) -> None:
        with self._lock:
            if self._closed or self._thread_over is not None:
                self._bell.set()
                return
            over = self._thread_over = Latch()
        start_thread(lambda: self._run(over), "nbddp-returns", lambda _: self._end(over))

    # ------------------------------------------------------------------ on the thread

    def _run(self, over: Latch) -> None:
        try:
            while lost := self._lost():
                for index in lost:
                    self._attend(index)
                self._bell.wait(min((each.wait_s() for each in self._attempts.values()), default=0.0))
                self._bell.clear()
        finally:
            for attempts in self._attempts.values():
                attempts.abandon()
            self._end(over)

    def _lost(self) -> list[int]:
        """Return the lost hosts; without any, or if the cluster is closed, this thread is over."""
        with self._lock:
            lost = [index for index, host in enumerate(self.hosts) if host.lost]
            if self._closed or not lost:
                self._thread_over = None
                return []
            return lost

    def _end(self, over: Latch) -> None:
        with self._lock:
            if self._thread_over is over:
                self._thread_over = None
        over.open()

    def _attend(self, index: int) -> None:
        """Begin the next login to a lost host if it is time, or look whether the one under way has answered."""
        name = self.hosts[index].name
        attempts = self._attempts.setdefault(name, _Attempts())
        try:
            if attempts.host is None:
                if time.monotonic() >= attempts.due:
                    attempts.begin(Host(name, self._commands[name], self._heartbeat_s))
            elif attempts.host.has_answered(0.0) or time.monotonic() - attempts.due > self._login_timeout_s:
                attempts.host.greet(self._login_timeout_s)
                refuse_twins([host for host in self.hosts if not host.lost] + [attempts.host])
                self._replace(index, attempts.host)
                del self._attempts[name]
        except LaunchError as error:
            attempts.fail(str(error).removeprefix(f"{name}: "))

    def _replace(self, index: int, new: Host) -> None:
        with self._lock:
            if self._closed:
                raise LaunchError("the cluster was closed")
            old, self.hosts[index] = self.hosts[index], new
        old.close(time.monotonic())
        new.when_lost = self._start
        if new.lost:
            self._start()


@dataclass
class _Attempts:
    """The logins to one lost host.

    Attributes:
        host: the login under way, or None.
        due: monotonic time at which it began, or the next one begins.
        pause_s: before the next one.
        problem: why the last one failed; "" before its end.
    """

    host: Host | None = None
    due: float = field(default_factory=lambda: time.monotonic() + FIRST_PAUSE_S)
    pause_s: float = field(default_factory=lambda: FIRST_PAUSE_S)
    problem: str = ""

    def begin(self, host: Host) -> None:
        self.host, self.due = host, time.monotonic()

    def fail(self, problem: str) -> None:
        self.abandon()
        self.problem = problem
        self.pause_s = min(2 * self.pause_s, max(_LONGEST_PAUSE_S, FIRST_PAUSE_S))
        self.due = float("inf") if self.is_final() else time.monotonic() + self.pause_s

    def is_final(self) -> bool:
        return any(text in self.problem for text in _FINAL)

    def abandon(self) -> None:
        if self.host is not None:
            host, self.host = self.host, None
            with contextlib.suppress(OSError):
                host.close(time.monotonic())

    def wait_s(self) -> float:
        if self.host is not None:
            return _POLL_S
        return max(0.0, min(self.due - time.monotonic(), _LONGEST_PAUSE_S))


def refuse_twins(hosts: Sequence[Host]) -> None:
    """Raise LaunchError if two of the hosts are one machine."""
    seen: dict[str, str] = {}
    for host in hosts:
        first = seen.setdefault(host.facts["identity"], host.name)
        if first != host.name:
            raise LaunchError(f"{first} and {host.name} are the same machine: name it once, with more ranks")
