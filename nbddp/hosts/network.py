"""The look at the network before ranks start: each host tries to reach the others, and measures the connections.

Runs in the notebook kernel, which says who tries whom; ``agent/network.py`` runs on the hosts.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nbddp.errors import LaunchError
from nbddp.hosts.frames import Header
from nbddp.hosts.host import Host
from nbddp.text import plain

_MOST_PAIRS_OF = 8  # hosts; beyond, each tries the next one, and the first
_FAR_SLOWER = 10
_GIGABIT = 100e6  # bytes per second; what has these is not called slow
_NOTICED_LATENCY_S = 5e-3
_MOST_NAMED = 3


@dataclass(frozen=True)
class Link:
    """The connection from one host to another, measured once, for 0.1 s over one TCP connection.

    Attributes:
        latency_s: seconds for one byte there and back, the best of five.
        bytes_per_s: None where there are so many hosts that it was not measured.
    """

    latency_s: float
    bytes_per_s: float | None


Links = dict[tuple[str, str], Link]  # by the names of the hosts: from, to


class Look:
    """One look at the network, by the agents of a round. Its methods are called on the hosts' threads."""

    def __init__(self, hosts: Sequence[Host], address: Mapping[str, str]) -> None:
        self.token = secrets.token_hex(16)
        self.links: Links = {}
        self._hosts = list(hosts)
        self._address = address
        self._ports: dict[str, int] = {}
        self._looked: set[str] = set()
        self._lock = threading.Lock()

    def listens(self, host: Host, port: int) -> None:
        """Note a host's port; when all are known, let all hosts try to reach the others."""
        with self._lock:
            self._ports[host.name] = port
            if len(self._ports) < len(self._hosts):
                return
        for index, each in enumerate(self._hosts):
            peers = [(name, self._address[name], self._ports[name], rate) for name, rate in self._peers(index)]
            each.send({"kind": "peers", "peers": peers})

    def _peers(self, index: int) -> list[tuple[str, bool]]:
        """Return whom a host tries, in an order in which all try different ones, and whether the rate is measured."""
        names = [host.name for host in self._hosts]
        following = names[index + 1 :] + names[:index]
        if len(names) <= _MOST_PAIRS_OF:
            return [(name, True) for name in following]
        return [(following[0], True), *[(names[0], False)] * (names[0] not in (names[index], following[0]))]

    def has_looked(self, host: Host, header: Header) -> bool:
        """Note what a host has found, and let all begin if it was the last one. Returns whether it was.

        Raises:
            LaunchError: it cannot reach another host.
        """
        if header["failed"]:
            raise LaunchError(self._failed(host.name, header["failed"]))
        found = {(host.name, str(name)): Link(*values) for name, *values in header["links"]}
        with self._lock:
            self.links |= found
            self._looked.add(host.name)
            if len(self._looked) < len(self._hosts):
                return False
        for each in self._hosts:
            each.send({"kind": "begin"})
        return True

    def _failed(self, name: str, failed: Sequence[tuple[str, str]]) -> str:
        words = [f"{other} ({self._address[other]}): {plain(str(why))}" for other, why in failed[:_MOST_NAMED]]
        others = f", and {len(failed) - _MOST_NAMED} other hosts" if len(failed) > _MOST_NAMED else ""
        return (
            f"{name} cannot reach {', '.join(words)}{others}. Is there a firewall between them? "
            "The ranks connect to each other on ports that the system chooses"
        )


def slow_links(links: Links) -> str:
    """Return which connections are far slower than the others, in words; "" for none."""
    rates = {pair: link.bytes_per_s for pair, link in links.items() if link.bytes_per_s is not None}
    best = max(rates.values(), default=0.0)
    slow = {pair for pair, rate in rates.items() if rate * _FAR_SLOWER < best and rate < _GIGABIT}
    if slow:
        most = max(rates[pair] for pair in slow)
        return f"{_named(slow, links)}: {_rate(most)}, the others up to {_rate(best)}"
    least_s = min((link.latency_s for link in links.values()), default=0.0)
    allowed_s = max(_FAR_SLOWER * least_s, _NOTICED_LATENCY_S)
    late = {pair: link.latency_s for pair, link in links.items() if link.latency_s > allowed_s}
    if late:
        return (
            f"{_named(late, links)}: {max(late.values()) * 1e3:,.1f} ms there and back, others {least_s * 1e3:,.1f} ms"
        )
    return ""


def _named(slow: Iterable[tuple[str, str]], links: Links) -> str:
    """Return a host that all these connections have in common, else the connections."""
    pairs = sorted(slow)
    common = set.intersection(*map(set, pairs))
    culprits = [name for name in common if sum(name in pair for pair in links) == len(pairs)]
    if len(culprits) == 1:
        return f"all connections of {plain(culprits[0])}"
    words = [f"{plain(one)} to {plain(other)}" for one, other in pairs]
    return ", ".join(words[:_MOST_NAMED]) + (f" and {len(words) - _MOST_NAMED} more" * (len(words) > _MOST_NAMED))


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.1f} MB/s" if bytes_per_s < 10e6 else f"{bytes_per_s / 1e6:,.0f} MB/s"
