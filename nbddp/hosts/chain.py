"""Sends a large payload along a chain of hosts: the notebook sends it to the first, each passes it on to the next.

    notebook ── login ──> gpu1 ── network ──> gpu2 ── network ──> gpu3 ──> ...

Each piece is passed on as it arrives, so all hosts have the payload when the first one has it, and some pieces later.
Where a host cannot fetch from the one before it, the notebook sends it the rest; those behind it go on as they are.
Runs in the notebook kernel; ``agent/chain.py`` runs on the hosts.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence

from nbddp.hosts.frames import Header
from nbddp.hosts.host import Host
from nbddp.payload import Packed
from nbddp.text import plain

LEAST_NBYTES = 8 << 20  # below, setting up the chain takes longer than it saves
KINDS = ("serves", "fetching", "fetch failed", "has payload")
_numbers = itertools.count(1)


def pays(hosts: Sequence[Host], packed: Packed, least_hosts: int) -> bool:
    """Return whether to send the payload along a chain, and not from here to each of these hosts."""
    return len(hosts) >= least_hosts and packed.nbytes >= LEAST_NBYTES


class Chain:
    """One payload on its way. ``receive`` is called on the hosts' threads."""

    def __init__(
        self,
        hosts: Sequence[Host],
        address: Mapping[str, str],
        data: tuple[Packed, int],
        orders: Sequence[tuple[Host, Sequence[Header]]],
        note: Callable[[Host, str], None],
    ) -> None:
        """
        Args:
            hosts: those that need the payload, in the order of the chain.
            address: by host, the address at which the others reach it.
            data: the payload, and the file descriptor of its block, open until :meth:`cancel`.
            orders: for each host of the run, what it is to do when all hosts have the payload, in this order.
            note: called with a host and what the user may want to know of it.
        """
        self._hosts = list(hosts)
        self._address = address
        self._packed, self._block = data
        self._orders = orders
        self._note = note
        self._number = next(_numbers)
        self._next = dict(zip([host.name for host in hosts], hosts[1:]))
        self._before = dict(zip([host.name for host in hosts[1:]], hosts))
        self._waiting = {host.name for host in hosts}
        self._over = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Prepare all hosts, and send the first pieces."""
        secret = secrets.token_hex(32)
        for host in self._hosts:
            host.expect_payload(self._packed)
            host.send(
                {
                    "kind": "chain",
                    "number": self._number,
                    "nbytes": self._packed.nbytes,
                    "secret": secret,
                    "address": self._address[host.name],
                    "serves": host.name in self._next,
                }
            )
        self._send_rest(self._hosts[0], 0)

    def receive(self, host: Host, header: Header) -> None:
        """Process a frame of a host about a chain, one of ``KINDS``."""
        with self._lock:
            if self._over or header["number"] != self._number:
                return
            if header["kind"] == "serves":
                self._let_next_fetch(host, header["port"])
            elif header["kind"] == "fetching":
                host.note_arrived(header["done"])
            elif header["kind"] == "fetch failed":
                what = f"{self._before[host.name].name} cannot send the payload here ({plain(str(header['why']))})"
                self._note(host, f"{what}; the notebook sends the rest")
                self._send_rest(host, header["at"])
            else:
                host.note_arrived(self._packed.nbytes)
                self._waiting.discard(host.name)
                if not self._waiting:
                    self._end()

    def _let_next_fetch(self, host: Host, port: int) -> None:
        following = self._next[host.name]
        if port:
            order = {"kind": "fetch", "number": self._number, "address": self._address[host.name], "port": port}
            following.send(order)
        else:
            self._send_rest(following, 0)

    def _send_rest(self, host: Host, start: int) -> None:
        host.send_pieces(self._block, self._packed, start, self._number)

    def _end(self) -> None:
        self._over = True
        self._send_over()
        for host in self._hosts:
            host.note_received(self._packed)
        for host, orders in self._orders:
            for order in orders:
                host.send(order)

    def _send_over(self) -> None:
        for host in self._hosts:
            host.send({"kind": "chain over", "number": self._number})

    def cancel(self) -> list[Host]:
        """Send no more. Returns the hosts whose orders are cancelled with it: all, unless all have the payload."""
        with self._lock:
            if self._over:
                return []
            self._over = True
        self._send_over()
        return [host for host, _ in self._orders]
